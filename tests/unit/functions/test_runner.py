"""What the runner takes for an out of memory."""

import pytest

from gpufaas_functions.runner import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Torch's is called so."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
    ids=str,
)
def test_these_are_out_of_memory_also_as_causes(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("the weights cannot be loaded")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("error", [ValueError("no"), BlockingIOError(11, "Resource temporarily unavailable")], ids=str)
def test_these_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
