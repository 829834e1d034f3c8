"""What follows from the end of a worker: for its calls, and for the scheduler."""

import pytest

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import LoadFailed, OutOfMemory, WorkerCrashed
from gpufaas_core.messages import CopyFailed, Measured, WorkerExited
from gpufaas_core.model import DeviceId, FunctionId
from gpufaas_core.units import GiB, MiB
from gpufaas_core.wire.heads import FailedHead
from gpufaas_gpu_manager.worker_end import Cause, WorkerEnd, end_of, killed_for_memory
from gpufaas_gpu_manager.worker_state import WorkerState

FUNCTION, DEVICE = FunctionId("f.ns@1"), DeviceId("n/cpu:0")
RAN_OUT = FailedHead("MemoryError", "", True)
KILLED = "it ended with signal SIGKILL"


def ended(
    before: WorkerState, how: str = "it ended with exit status 1", memory_limit: int = 0, **known: object
) -> WorkerEnd:
    spec = WorkerSpec(FUNCTION, "f", "ns", "", "http", memory_limit=memory_limit)
    return end_of(spec, DEVICE, 0, before, how, Cause(**known), 128 * MiB, GiB)  # type: ignore[arg-type]


def test_a_crash_is_told_with_the_last_words_and_is_not_placed_again() -> None:
    end = ended(WorkerState.READY)

    assert issubclass(end.kind, WorkerCrashed)
    assert str(end.error("\nits last words")) == "the worker of f.ns died: it ended with exit status 1\nits last words"
    assert end.facts == (WorkerExited(FUNCTION, DEVICE, "it ended with exit status 1", 0),)
    assert not end.place_again


def test_one_that_was_told_to_end_is_no_news_to_the_scheduler() -> None:
    end = ended(WorkerState.ENDING)

    assert (end.asked_for, end.facts) == (True, ())


def test_a_load_that_failed_says_what_it_said_itself_without_its_last_words() -> None:
    end = ended(WorkerState.STARTING, failure=FailedHead("ImportError: no x", ""))

    assert issubclass(end.kind, LoadFailed)
    assert str(end.error("\nits last words")) == "f.ns did not load on n/cpu:0: ImportError: no x"
    assert end.facts == (CopyFailed(FUNCTION, DEVICE, "ImportError: no x", False, 0, False),)


@pytest.mark.parametrize(("memory_limit", "again"), [(0, True), (64 * MiB, False)])
def test_a_load_that_ran_out_of_memory_gets_more_unless_its_limit_is_fixed(memory_limit: int, again: bool) -> None:
    end = ended(WorkerState.STARTING, memory_limit=memory_limit, failure=RAN_OUT)

    assert issubclass(end.kind, OutOfMemory)
    assert "at its limit of 128 MiB (the device has 1.0 GiB; the annotation gpufaas.memory" in end.reason
    assert end.place_again is again


def test_a_ready_one_that_ran_out_of_memory_is_measured_too() -> None:
    end = ended(WorkerState.READY, failure=RAN_OUT)

    assert [type(each) for each in end.facts] == [Measured, WorkerExited]
    assert issubclass(end.kind, OutOfMemory)


def test_a_container_that_was_killed_for_memory_is_out_of_memory() -> None:
    assert issubclass(ended(WorkerState.READY, how=killed_for_memory(64 * MiB)).kind, OutOfMemory)


def test_what_others_killed_and_what_had_no_files_are_not_the_functions_fault() -> None:
    assert ended(WorkerState.STARTING, how=KILLED).blameless
    assert not ended(WorkerState.STARTING, how=KILLED, killed_for="its load made no progress").blameless
    assert not ended(WorkerState.STARTING, how=KILLED, failure=RAN_OUT).blameless

    short = ended(WorkerState.STARTING, how="too few files", no_files=True)
    assert (short.blameless, short.place_again) == (True, True)
