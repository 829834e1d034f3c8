"""
Compile the modules that decide, with mypyc, into this environment (docs/adr/0045)::

    python scheduler/compile.py [--remove]

A minute of one core. It needs a C compiler and Python's headers.
"""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from gpufaas_core import compiled

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "compiled"
DECIDE = {
    "scheduler/gpufaas_scheduler": (
        "engine.py", "fit.py", "view.py", "world/*.py", "handle/*.py", "policies/passes.py",
        "policies/least_wait/[!_]*.py",
    ),
    "cache-manager/gpufaas_cache_manager": ("eviction.py", "residency.py"),
}  # fmt: skip
"""
What a call passes, but for policies: these may be subclassed, and have options. Structs are no structs of msgspec for
mypyc: it forgets their arguments, such as `frozen`. So modules with messages are left as they are; `world/light.py` has
the arguments of a struct in a compiled module.
"""
LEFT = {"world/light.py"}


def main() -> None:
    missing = _missing()
    if missing:
        sys.exit(f"compiling the engine needs {missing}; without it, Python runs it")
    before = compiled.digest()
    modules = [
        str((ROOT / package / path).relative_to(ROOT))
        for package, patterns in DECIDE.items()
        for pattern in patterns
        for path in sorted(each.relative_to(ROOT / package) for each in (ROOT / package).glob(pattern))
        if path.name != "__init__.py" and str(path) not in LEFT
    ]
    print(f"compiling {len(modules)} modules: a minute or two", flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=BUILD, prefix="made-"))
    done = subprocess.run(
        [sys.executable, __file__, "--build", str(made), *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        shutil.rmtree(made)
        lines = [each for each in (done.stdout + done.stderr).splitlines() if "Treating generator" not in each]
        sys.exit("\n".join([*lines[-40:], "the engine could not be compiled: Python goes on to run it"]))
    files = {_name(path.relative_to(made)): str(path.relative_to(made)) for path in made.rglob("*.so")}
    (made / compiled.LIST).write_text(json.dumps({"digest": before, "modules": files}))
    where = compiled.folder()
    where.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(where, ignore_errors=True)
    shutil.move(made, where)
    print(f"the engine is compiled: {where}; {compiled.VARIABLE}=0 lets Python run it again")


def _missing() -> str:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(os.environ.get("CC", compiler)) is None:
        return f"a C compiler ({compiler} is not there; on Debian: apt install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of Python (on Debian: apt install python3-dev)"
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        return "mypy and setuptools (pip install -e '.[compile]')"
    return ""


def _name(path: Path) -> str:
    return ".".join([*path.parent.parts, path.name.split(".")[0]])


def _build(made: str, modules: list[str]) -> None:
    """Run in a process of its own: mypyc ends it where it finds errors."""
    from mypyc.build import mypycify
    from setuptools import setup

    extensions = mypycify(
        modules, opt_level="2", debug_level="0", multi_file=True, group_name="gpufaas", target_dir=str(BUILD / "c")
    )
    with contextlib.redirect_stdout(io.StringIO()):
        setup(
            name="gpufaas-compiled",
            packages=[],
            py_modules=[],
            ext_modules=extensions,
            script_args=["build_ext", "--build-lib", made, "--build-temp", str(BUILD / "o")],
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--build"]:
        _build(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:] == ["--remove"]:
        shutil.rmtree(compiled.folder(), ignore_errors=True)
    else:
        main()
