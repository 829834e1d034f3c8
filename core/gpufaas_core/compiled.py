"""
The compiled forms of the modules that decide, where this environment has them (docs/adr/0045).

`make compiled` puts them into the environment, with a digest of the sources that they were made of. Python modules run
where there are none, when a source is not as it was, and with ``GPUFAAS_COMPILED=0``. Compiled modules cannot be mixed
with the Python modules that they stand for: all of them are taken, or none.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

VARIABLE: Final = "GPUFAAS_COMPILED"
PACKAGES: Final = ("gpufaas_core", "gpufaas_cache_manager", "gpufaas_scheduler")
"""What is compiled is in these, and so is all that it imports."""
LIBRARY: Final = "gpufaas__mypyc"
"""The module with the machine code of all the others."""
LIST: Final = "compiled.json"


def folder() -> Path:
    """Return where this environment keeps them."""
    return Path(sys.prefix, "share", "gpufaas", "compiled")


def digest() -> str:
    """Return the digest of the sources of `PACKAGES`, and of the Python that modules are compiled for."""
    found = hashlib.sha256(EXTENSION_SUFFIXES[0].encode())
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = os.path.dirname(spec.origin)
        for path in sorted(_sources(root)):
            with open(path, "rb") as source:
                text = source.read()
            found.update(f"{package}{path[len(root) :]} {len(text)}\n".encode())
            found.update(text)
    return found.hexdigest()


def _sources(root: str) -> list[str]:
    return [os.path.join(at, name) for at, _, names in os.walk(root) for name in names if name.endswith(".py")]


@cache
def _look() -> tuple[Mapping[str, Path], str]:
    """Return the compiled modules that may be taken, by name, and what to tell people."""
    if os.environ.get(VARIABLE) == "0":
        return {}, f"Python ({VARIABLE}=0)"
    where = folder()
    try:
        made = json.loads((where / LIST).read_bytes())
    except FileNotFoundError:
        return {}, "Python"
    if made["digest"] != digest():
        return {}, "Python (its compiled form is of other sources: make compiled)"
    return {name: where / file for name, file in made["modules"].items()}, "compiled"


def said() -> str:
    """Return in words what decides: ``compiled``, or ``Python`` and why."""
    return _look()[1]


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name != LIBRARY and not name.startswith(_WITHIN):
            return None
        file = _look()[0].get(name)
        return None if file is None else spec_from_file_location(name, file)


_WITHIN: Final = tuple(f"{package}." for package in PACKAGES)


def enable() -> None:
    """Take compiled modules from now on. A package that has some calls this before any of its modules is imported."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
