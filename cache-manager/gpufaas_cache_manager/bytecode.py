"""
Compiling the modules of a bundle when it is extracted, since its workers cannot: they must not write there.

Only parsed, never imported, and in a process of its own: hostile sources crash a compiler or take all memory, and then
their function only starts without bytecode. This file is its program, too. It imports next to nothing, or that would
take thrice as long as a small bundle.
"""

import marshal
import os
import resource
import sys
from importlib._bootstrap_external import MAGIC_NUMBER, cache_from_source

_UNCHECKED = MAGIC_NUMBER + (0b01).to_bytes(4, "little") + bytes(8)
"""Begins bytecode whose source is not looked at when it is imported (PEP 552): nobody changes it."""
_MEMORY = 1 << 30
_NOT_IMPORTED = ("test", "tests")
"""Folders of packages: half of what there is to compile in some."""
_TIME_S = 15
"""Of processor time; torch's 2,300 modules take 6 s. What is left then is compiled by each worker that imports it."""


def compile_modules(directory: str | os.PathLike[str]) -> None:
    """Write the bytecode of what is below *directory* beside it, as far as it compiles within the limits. Blocks."""
    import contextlib
    import subprocess

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, directory],
            check=False, timeout=2 * _TIME_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


def _compile_all(directory: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_TIME_S, _TIME_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    found: list[str] = []
    for at, folders, names in os.walk(directory):
        folders[:] = [each for each in folders if each not in _NOT_IMPORTED]
        found += [os.path.join(at, name) for name in names if name.endswith(".py")]
    for file in sorted(found, key=lambda path: (path.count(os.sep), path)):  # what is imported first lies on top
        try:
            _compile(file)
        except Exception:  # no syntax of this Python, or too much for it: its import says so
            continue


def _compile(file: str) -> None:
    with open(file, "rb") as source:
        code = marshal.dumps(compile(source.read(), file, "exec", dont_inherit=True))
    place = cache_from_source(file)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(f"{place}~", "xb") as aside:  # this process may be killed at any time
        aside.write(_UNCHECKED + code)
    os.replace(f"{place}~", place)


if __name__ == "__main__":
    _compile_all(sys.argv[1])
