"""Puts the environment of a function in force in its worker, as if the process had started with it."""

import contextlib
import ctypes
import faulthandler
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from gpufaas_core.start_env import THREADS

_ZONES: Final = ("/usr/share/zoneinfo", "/usr/lib/zoneinfo", "/usr/share/lib/zoneinfo", "/etc/zoneinfo")
_RULE: Final = re.compile(r"(?:<[^>]+>|[A-Za-z]{3,})[-+]?\d|UTC|GMT")
"""A zone that needs no file."""
_SETTERS: Final = (
    "scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_",
    "openblas_set_num_threads", "MKL_Set_Num_Threads",
)  # fmt: skip
_BLAS: Final = re.compile(r"/\S*(?:openblas|mkl_rt)\S*")


def with_threads(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return *env* with the numbers of threads of math libraries, which are *threads* where *env* does not say."""
    return {**{name: env.get("OMP_NUM_THREADS") or str(threads) for name in THREADS}, **env}


def put_in_force(env: Mapping[str, str], threads: int, *, forked: bool) -> None:
    """
    Give this process *env*. Call it in the function's directory.

    :param threads: see `with_threads`
    :param forked: False: the process has started with it, but for PYTHONPATH
    """
    os.environ.update(with_threads(env, threads))
    sys.path[:0] = [os.path.abspath(each) for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    if "TZ" in env:
        time.tzset()
        _check_zone(env["TZ"])
    if not forked:
        return
    for name, act in _ACTS.items():
        if env.get(name):
            act(env[name])
    if "torch" in sys.modules:
        of_torch = env.get("OMP_NUM_THREADS") or env.get("MKL_NUM_THREADS")  # as it reads them when it is imported
        sys.modules["torch"].set_num_threads(int(of_torch or threads))
    if of_numpy := env.get("OPENBLAS_NUM_THREADS") or env.get("OMP_NUM_THREADS"):
        _use_threads(int(of_numpy))


def _check_zone(zone: str) -> None:
    name = zone.removeprefix(":")
    folders = (os.environ.get("TZDIR", ""), *_ZONES)
    if name and not _RULE.match(name) and not any(os.path.isfile(os.path.join(each, name)) for each in folders):
        print(f"gpufaas: TZ: there is no time zone {zone!r} here: the time is UTC", file=sys.stderr, flush=True)


def _filter_warnings(options: str) -> None:
    asked = [each for each in options.split(",") if each]
    sys.warnoptions += asked
    warnings._processoptions(asked)  # type: ignore[attr-defined] # it says which of them are wrong


def _use_threads(number: int) -> None:
    """Let the libraries that numpy has loaded use *number* threads: they have read the variables already."""
    with open("/proc/self/maps") as maps:
        paths = set(_BLAS.findall(maps.read()))
    for library in map(ctypes.CDLL, paths):
        for name in _SETTERS:
            if hasattr(library, name):
                getattr(library, name)(number)


_ACTS: Final[dict[str, Callable[[str], object]]] = {
    "PYTHONDONTWRITEBYTECODE": lambda _: setattr(sys, "dont_write_bytecode", True),
    "PYTHONPYCACHEPREFIX": lambda folder: setattr(sys, "pycache_prefix", folder),
    "PYTHONFAULTHANDLER": lambda _: faulthandler.enable(),
    "PYTHONWARNINGS": _filter_warnings,
}


@contextlib.contextmanager
def noting_reads() -> Iterator[set[str]]:
    """Gather the names of variables that Python code asks for and that are not set."""
    names: set[str] = set()
    find = os._Environ.__getitem__

    def noted(environ: Any, name: Any) -> Any:
        try:
            return find(environ, name)
        except KeyError:
            names.add(name)
            raise

    os._Environ.__getitem__ = noted  # type: ignore[method-assign]
    try:
        yield names
    finally:
        os._Environ.__getitem__ = find  # type: ignore[method-assign]
