"""
Runs `gpufaas` as ``python -m gpufaas_cli`` does, and says first whose code it is.

    python -P benchmarks/_started.py FILE [ARGUMENTS...]

An editable installation names one working tree: who has two may measure the wrong one and not see it. So each process
of a platform that is measured writes to FILE what `code` finds in it. Workers answer it: this file is a function, too.
"""

import importlib.util
import json
import pkgutil
import runpy
import sys
from pathlib import Path
from typing import Any, Final

ENGINE: Final = "gpufaas_scheduler.engine"


def code() -> dict[str, str]:
    """Return the file that this process has each package of the platform from, and the engine: compiled, no ``.py``."""
    names = [each.name for each in pkgutil.iter_modules() if each.name.startswith("gpufaas_")]
    return {name: str(spec.origin) for name in (*names, ENGINE) if (spec := importlib.util.find_spec(name))}


def handle(event: Any, context: Any) -> Any:  # noqa: ARG001
    return {"body": code()}


if __name__ == "__main__":
    Path(sys.argv.pop(1)).write_text(json.dumps(code()))
    if sys.argv[1:]:
        runpy.run_module("gpufaas_cli", run_name="__main__", alter_sys=True)
