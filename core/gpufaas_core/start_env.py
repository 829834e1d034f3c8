"""
Variables of a function's environment that are read when a process starts, or when torch and numpy are imported.

Workers are forked after that. `gpufaas_functions.start_env` puts some of them in force in a fork. Those of
`own_process` cannot be: a worker is a process of its own for them. All others are read later, and are only set.
"""

import re
from collections.abc import Mapping
from typing import Final

_OWN_PROCESS: Final = re.compile(
    r"""
    LD_ | MALLOC_ | GLIBC_TUNABLES= | OPENSSL_
    | (?:LANG | LC_ALL | LC_CTYPE)=(?!C$ | POSIX$ | .*(?i:utf-?8))  # Python takes UTF-8 with C, too
    | PYTHON(?:HASHSEED=(?!random$) | IOENCODING=(?!(?i:utf-?8)$) | UTF8=(?!1$))
    | PYTHON(?:COERCECLOCALE | DEVMODE | HOME | INTMAXSTRDIGITS | MALLOC | MALLOCSTATS | NODEBUGRANGES | NOUSERSITE
        | OPTIMIZE | PERFSUPPORT | PLATLIBDIR | PROFILEIMPORTTIME | PYCACHEPREFIX | TRACEMALLOC
        | VERBOSE | WARNDEFAULTENCODING | _CPU_COUNT | _GIL | _PERF_JIT_SUPPORT)=
    | (?!(?:OMP | MKL | OPENBLAS)_NUM_THREADS=[1-9]\d{0,2}$)  # also a number of threads that is none
        (?:G?OMP | KMP | MKL(?:DNN)? | ONEDNN | DNNL | OPENBLAS | GOTO | NPY)_
    | PYTORCH_(?:API | JIT | MATCHER | (?:CUDA_)?ALLOC_CONF=.*backend)
    | TORCH_(?:ALLOW_TF32 | BLAS | CPP_LOG | CUDAGRAPH | CUDA_SAN | DEVICE_BACKEND | DISTRIBUTED | D?TRACE | ENRICH
        | FAKE_TENSOR_DEBUG | LINALG | LOGS | PYTHON | SHOW_CPP | USE_RTLD
        | COMPILE_(?:CACHE | DEBUG | DYNAMIC_ | FORCE | JOB | ST | UNBACKED))
    | TQDM_  # torch imports it
    | TORCH(?:DYNAMO_(?:EXTENDED | NO_DATA | TRANSLATION) | EXPORT_ | INDUCTOR_FORCE)
    """,
    re.VERBOSE,
)
"""Of NAME=VALUE. What torch reads when it compiles, or first uses a GPU, is not among them."""


def own_process(env: Mapping[str, str]) -> list[str]:
    """Return the names in *env* for which a worker must be a process of its own. Empty values change nothing."""
    return [name for name, value in env.items() if value and _OWN_PROCESS.match(f"{name}={value}")]
