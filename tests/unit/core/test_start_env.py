"""Which variables of a function's environment a forked worker cannot obey."""

import pytest

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import FunctionId
from gpufaas_core.start_env import own_process


@pytest.mark.parametrize(
    "asked",
    [
        "LD_PRELOAD=x.so", "LD_LIBRARY_PATH=/x", "MALLOC_ARENA_MAX=1", "GLIBC_TUNABLES=x", "OPENSSL_CONF=/x",
        "PYTHONHASHSEED=0", "PYTHONOPTIMIZE=1", "PYTHONMALLOC=debug", "PYTHONUTF8=0", "PYTHONIOENCODING=latin-1",
        "PYTHONPLATLIBDIR=x", "PYTHON_GIL=0", "LC_ALL=de_DE.ISO-8859-1", "OMP_PROC_BIND=true", "KMP_BLOCKTIME=1",
        "MKL_CBWR=AVX2", "OPENBLAS_CORETYPE=Haswell", "OMP_NUM_THREADS=abc", "OMP_NUM_THREADS=0", "OMP_NUM_THREADS=4,2",
        "GOTO_NUM_THREADS=1", "TORCH_LOGS=dynamo", "TORCH_LOGS_OUT=x", "TORCH_COMPILE_DEBUG=1", "PYTORCH_JIT=0",
        "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync", "TQDM_DISABLE=1",
    ],
)  # fmt: skip
def test_what_has_been_read_when_a_worker_is_forked_needs_a_process_of_its_own(asked: str) -> None:
    name, _, value = asked.partition("=")
    assert own_process({"LEVEL": "3", name: value}) == [name]
    assert own_process({name: ""}) == []


@pytest.mark.parametrize(
    "asked",
    [
        "TZ=Asia/Tokyo", "PYTHONPATH=/x", "PYTHONWARNINGS=error", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONHASHSEED=random", "PYTHONUTF8=1", "PYTHONIOENCODING=utf-8", "PYTHON_ENV=production",
        "OMP_NUM_THREADS=4", "MKL_NUM_THREADS=4", "OPENBLAS_NUM_THREADS=4", "NUMEXPR_NUM_THREADS=4", "LANG=C",
        "LC_ALL=de_DE.UTF-8", "LC_NUMERIC=de_DE", "TORCH_HOME=/x", "TORCHINDUCTOR_CACHE_DIR=/x", "HF_HOME=/x",
        "CUDA_VISIBLE_DEVICES=0", "LDAP_URL=x", "TORCHDYNAMO_VERBOSE=1", "TORCH_COMPILE_DISABLE=1",
        "TORCH_CUDA_ARCH_LIST=9", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64",
        "PYTORCH_ALLOC_CONF=expandable_segments:False",
    ],
)  # fmt: skip
def test_what_a_fork_obeys_or_reads_later_needs_none(asked: str) -> None:
    name, _, value = asked.partition("=")
    assert own_process({name: value}) == []


def test_programs_and_images_are_processes_of_their_own_anyway() -> None:
    def spec(**kwargs: str) -> WorkerSpec:
        return WorkerSpec(FunctionId("a.b@1"), "a", "b", "d", env={"LD_PRELOAD": "x", "PYTHONHASHSEED": "1"}, **kwargs)  # type: ignore[arg-type]

    assert spec(kind="model").own_process == "LD_PRELOAD, PYTHONHASHSEED"
    assert spec(kind="server").own_process == ""
    assert spec(kind="model", image="image:1").own_process == ""
