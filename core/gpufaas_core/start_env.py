"""
Variables of a function's environment that are read when a process starts, or when torch and numpy are imported.

Workers are forked after that. `gpufaas_functions.start_env` puts some of them in force in a fork. Those of
`own_process` cannot be: a worker is a process of its own for them. All others are read later, and are only set.
"""

import re
from collections.abc import Mapping
from typing import Final

THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""A fork tells libraries that are loaded already. Those of other libraries (numexpr, numba) are read when they load."""

_OWN_PROCESS: Final = re.compile(
    r"""
    (?:LD_ | MALLOC_ | GLIBC_TUNABLES= | OPENSSL_)  # the loader, the C library, OpenSSL
    | (?:LANG | LC_ALL | LC_CTYPE)=(?!C$ | POSIX$ | .*(?i:utf-?8))  # Python takes UTF-8 with C, too
    | PYTHONHASHSEED=(?!random$) | PYTHONIOENCODING=(?!(?i:utf-?8)$) | PYTHONUTF8=(?!1$)
    | PYTHON(?!ASYNCIODEBUG | BREAKPOINT | DONTWRITEBYTECODE | FAULTHANDLER | HASHSEED | INSPECT | IOENCODING | PATH=
        | PYCACHEPREFIX | SAFEPATH | STARTUP | UNBUFFERED | UTF8 | WARNINGS)[A-Z]+=
    | PYTHON_(?:CPU_COUNT | FROZEN_MODULES | GIL)=
    | (?!(?:OMP | MKL | OPENBLAS)_NUM_THREADS=[1-9]\d{0,2}$)
        (?:G?OMP | KMP | MKL(?:DNN)? | ONEDNN | DNNL | OPENBLAS | GOTO)_  # also a number of threads that is none
    | (?:NPY | NUMPY | NVPL | GFORTRAN | FX | KINETO | COMPILE_STROBELIGHT | ACC_DEVICE)_ | PYTORCH_
    | TORCH(?!_HOME= | _EXTENSIONS_DIR= | _CUDA_ARCH_LIST= | _NCCL_ | INDUCTOR_(?!FORCE_DISABLE_CACHES=))
    """,
    re.VERBOSE,
)
"""Of NAME=VALUE. An unknown one of torch counts: it reads a hundred of them."""


def own_process(env: Mapping[str, str]) -> list[str]:
    """Return the names in *env* for which a worker must be a process of its own. Empty values change nothing."""
    return [name for name, value in env.items() if value and _OWN_PROCESS.match(f"{name}={value}")]
