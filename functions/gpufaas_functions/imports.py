"""
What a worker imports of others' modules. Where that took long it is told to the node, and imported for the next one.
"""

import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_core.wire.heads import Imported
from gpufaas_functions.answers import in_one_line
from gpufaas_functions.author_modules import found

LONG_S: Final[Seconds] = 0.5
_MOST: Final = 64 * 1024
"""Characters of names that are told, and of what variables hold: transformers with a model has some 50,000."""


class Imports:
    """From its making on. :param folder: of the author's modules"""

    def __init__(self, folder: str) -> None:
        self._folder = folder + os.sep
        self._modules = set(sys.modules)
        self._env = dict(os.environ)
        self._began = time.perf_counter()

    def told(self, apart_s: Seconds = 0.0) -> Imported | None:
        """Return what was imported. None: it took no long time. :param apart_s: spent on something else"""
        seconds = time.perf_counter() - self._began - apart_s
        if seconds < LONG_S:
            return None
        names = [name for name in list(sys.modules) if name not in self._modules and self._is_others(name)]
        env = {name: value for name, value in os.environ.items() if self._env.get(name) != value and value.isascii()}
        fits = sum(map(len, names)) <= _MOST and sum(map(len, env.values())) <= _MOST
        return Imported(seconds, names, env) if names and fits else None

    def _is_others(self, name: str) -> bool:
        spec = getattr(sys.modules[name], "__spec__", None)
        if spec is None or spec.name != name or name in found or name.partition(".")[0] == "function":
            return False
        places = (spec.origin, *(spec.submodule_search_locations or ()))
        return name.isascii() and not any(str(each).startswith(self._folder) for each in places)


def import_ahead(bundle: str, env: Mapping[str, str], asked: Sequence[str], modules: Sequence[str]) -> str:
    """
    Import what workers of *bundle* import, as they do, but for the author's own modules; leave environment and path as
    they were.

    :param env: what they find set
    :param asked: has to import; what fails of it is returned
    :param modules: what of these does not import is left to workers
    """
    environ, path = dict(os.environ), list(sys.path)
    os.chdir(os.path.join(bundle, "function"))
    os.environ.update(env)
    more = [os.path.abspath(each) for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [os.path.join(bundle, "site"), *more]
    try:
        for name in (*asked, *modules):
            try:
                importlib.import_module(name)
            except BaseException as exc:  # modules may do anything, sys.exit, too
                if name in asked:
                    return f"{name}: {in_one_line(exc)}"
    finally:
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:] = path
    return ""
