"""Puts the environment of a function in force in its worker, as if the process had started with it."""

import ctypes
import faulthandler
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from gpufaas_core.start_env import THREADS

_RULE: Final = re.compile(r"(?:<[^>]+>|[A-Za-z]{3,})[-+]?\d|UTC|GMT")
"""A time zone that needs no file."""
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
    new = {name: value for name, value in env.items() if value and value != os.environ.get(name)}
    os.environ.update(with_threads(env, threads))
    sys.path[:0] = [os.path.abspath(each) for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    if "TZ" in env:
        time.tzset()
        _check_zone(env["TZ"].removeprefix(":"))
    if not forked:
        return
    for name in new.keys() & _ACTS.keys():
        _ACTS[name](new[name])
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or env.get("MKL_NUM_THREADS") or threads))
    if of_numpy := env.get("OPENBLAS_NUM_THREADS") or env.get("OMP_NUM_THREADS"):
        _use_threads(int(of_numpy))


def _check_zone(zone: str) -> None:
    file = os.path.join(os.environ.get("TZDIR", "/usr/share/zoneinfo"), zone)
    if zone and not _RULE.match(zone) and not os.path.isfile(file):
        print(f"gpufaas: TZ: there is no time zone {zone!r} here: the time is UTC", file=sys.stderr, flush=True)


def _filter_warnings(options: str) -> None:
    asked = [each for each in options.split(",") if each]
    sys.warnoptions += asked
    warnings._processoptions(asked)  # type: ignore[attr-defined] # it says which of them are wrong


def _set_allocator(settings: str) -> None:
    """Tell torch's allocator, which has read them when a torch with CUDA was imported."""
    torch: Any = sys.modules.get("torch")
    if tell := getattr(getattr(torch, "_C", None), "_accelerator_setAllocatorSettings", None):
        tell(settings)


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
    "PYTORCH_ALLOC_CONF": _set_allocator,
    "PYTORCH_CUDA_ALLOC_CONF": _set_allocator,
}
