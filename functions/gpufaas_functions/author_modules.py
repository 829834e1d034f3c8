"""
The author's modules, in a worker and in processes that `multiprocessing` starts there: those run this one as their main
module, in place of the fork server or the handler.

``import helper`` and ``from .helper import x`` find one module, ``helper``. ``function.helper``, by which OpenFaaS's
templates know it, is an alias. ``__main__`` has what handler.py has: pickles of a training script name classes there.
"""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

found: Final[list[str]] = []
"""Names of the author's modules."""


class AuthorSpec(ModuleSpec):
    """Of a module in the author's folder, or in a package there."""

    @property
    def parent(self) -> str:
        """The package in which its relative imports begin."""
        return f"function.{super().parent}".rstrip(".")


class _Finder(importlib.abc.Loader):
    """Finds the author's modules, which are in *folder*, and is the loader of their aliases."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top, _, inner = name.partition(".")
        if name == "function":
            return PathFinder.find_spec(name, [os.path.dirname(self._folder)])
        if top == "function":  # what is named as a module of Python has no alias: it would hide that
            known = inner.partition(".")[0] not in sys.stdlib_module_names and importlib.util.find_spec(inner)
            return ModuleSpec(name, self) if isinstance(known, AuthorSpec) else None
        spec = PathFinder.find_spec(name, path, target)
        places = spec and (spec.submodule_search_locations or [spec.origin or ""])
        if spec and places and next(iter(places)).startswith(self._folder + os.sep):
            spec.__class__ = AuthorSpec
            found.append(name)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.partition(".")[2])
        spec.loader_state = module.__spec__  # the import now gives it the spec of the alias
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__ and module.__spec__.loader_state


class _Main(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            handler = sys.modules.get("handler") or importlib.import_module("handler")
            if hasattr(handler, name):
                return getattr(handler, name)
        raise AttributeError(f"module '__main__' has no {name!r}: define or import it in handler.py")

    def __repr__(self) -> str:
        """As pickle names it when it finds no class there."""
        return "<module '__main__', which has what handler.py has: define or import it there>"


def _install() -> None:
    """Find the author's modules: their folder is the first one in `sys.path` that has handler.py."""
    folder = next((each for each in sys.path if os.path.isfile(os.path.join(each, "handler.py"))), "")
    if os.path.basename(folder) == "function" and not PathFinder.find_spec("function", [folder]):  # else it is a module
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder(folder))
        if os.path.isfile(os.path.join(folder, "__init__.py")):
            importlib.import_module("function")  # as in OpenFaaS, it comes first


def import_handler(name: str = "handler") -> ModuleType:
    """Import the module *name* of the author, whose folder is in `sys.path`. Raises what its code raises."""
    sys.modules["__main__"] = main = _Main("__main__")
    main.__spec__ = __spec__
    _install()
    return importlib.import_module(name)


if __name__ == "__mp_main__":
    _install()
    __getattr__ = _Main("__main__").__getattr__
