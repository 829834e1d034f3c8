"""
Compiling the modules of a bundle when it is extracted, since its workers cannot: they must not write there.

Only parsed, never imported, and in a process of its own: hostile sources crash a compiler or take all memory, and then
their function only starts without bytecode. `_compile_all` knows the standard library alone: it is run as a file.
"""

import contextlib
import os
import py_compile
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

_MODE: Final = py_compile.PycInvalidationMode.UNCHECKED_HASH
"""Sources are not looked at when a module is imported: nobody changes them."""
_MEMORY: Final = 1 << 30
_TIME_S: Final = 30
"""Of processor time; torch's 2,300 modules take 6 s. What is left then is compiled by each worker that imports it."""


def compile_modules(directory: Path) -> None:
    """Write the bytecode of what is below *directory* beside it, as far as it compiles within the limits. Blocks."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, directory],
            check=False, timeout=2 * _TIME_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


def _compile_all(directory: str) -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (_TIME_S, _TIME_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    found = [os.path.join(at, name) for at, _, names in os.walk(directory) for name in names if name.endswith(".py")]
    for file in sorted(found, key=lambda path: (path.count(os.sep), path)):  # what is imported first lies on top
        with contextlib.suppress(Exception):  # no syntax of this Python, or too much for it: its import says so
            py_compile.compile(file, doraise=True, invalidation_mode=_MODE)


if __name__ == "__main__":
    _compile_all(sys.argv[1])
