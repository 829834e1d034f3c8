"""Puts the environment of a function in force in its worker, as if the process had started with it."""

import ctypes
import faulthandler
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Final

_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Those of other libraries (numexpr, numba) are read when the author imports them."""
_SETTERS: Final = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")
_BLAS: Final = re.compile(r"/\S*openblas\S*")


def with_threads(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return *env* with the numbers of threads of math libraries, which are *threads* where *env* does not say."""
    return {**{name: env.get("OMP_NUM_THREADS") or str(threads) for name in _THREADS}, **env}


def put_in_force(env: Mapping[str, str], threads: int, *, forked: bool) -> None:
    """
    Give this process *env*, as `with_threads` returns it. Call it in the function's directory.

    :param forked: False: the process has started with it, but for PYTHONPATH
    """
    new = {name: value for name, value in env.items() if value and value != os.environ.get(name)}
    os.environ.update(with_threads(env, threads))
    sys.path[:0] = [os.path.abspath(each) for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    if "TZ" in env:
        time.tzset()
        zone = env["TZ"].removeprefix(":")
        # glibc calls it by its first letters, with the time of UTC.
        if not time.timezone and not time.daylight and time.tzname[0] == zone.partition("/")[0] not in ("UTC", "GMT"):
            print(f"gpufaas: TZ: there is no time zone {zone!r} here: the time is UTC", file=sys.stderr, flush=True)
    if not forked:
        return
    for name, act in _ACTS.items():
        if name in new:
            act(new[name])
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or env.get("MKL_NUM_THREADS") or threads))
    if of_numpy := env.get("OPENBLAS_NUM_THREADS") or env.get("OMP_NUM_THREADS"):
        _use_threads(int(of_numpy))


def _filter_warnings(options: str) -> None:
    asked = [each for each in options.split(",") if each]
    sys.warnoptions += asked
    warnings._processoptions(asked)  # type: ignore[attr-defined] # it says which of them are wrong


def _set_allocator(settings: str) -> None:
    if torch := sys.modules.get("torch"):  # with CUDA it has read them when it was imported
        torch._C._accelerator_setAllocatorSettings(settings)


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
    "PYTHONFAULTHANDLER": lambda _: faulthandler.enable(),
    "PYTHONWARNINGS": _filter_warnings,
    "PYTORCH_ALLOC_CONF": _set_allocator,
    "PYTORCH_CUDA_ALLOC_CONF": _set_allocator,  # last: torch prefers it
}
