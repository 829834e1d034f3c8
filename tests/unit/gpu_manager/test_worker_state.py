"""The life of a worker."""

import itertools

import pytest

from gpufaas_core.steps import IllegalStep, Step
from gpufaas_gpu_manager.worker_state import BECOME_READY, BEGIN, END, LEAVE_DEVICE, PARK, REAP, WorkerState

STEPS = (BEGIN, BECOME_READY, PARK, LEAVE_DEVICE, END, REAP)


def test_a_good_life() -> None:
    state = WorkerState.WAITING
    for step in (BEGIN, BECOME_READY, END, REAP):
        state = step[state]

    assert state is WorkerState.GONE


def test_one_that_never_had_a_process_is_gone_at_once() -> None:
    assert END[WorkerState.WAITING] is WorkerState.GONE


def test_ready_after_the_order_to_end_does_not_bring_it_back() -> None:
    assert BECOME_READY[WorkerState.ENDING] is WorkerState.ENDING


def test_memory_comes_back_only_with_the_reaping_of_a_process() -> None:
    """Every way into GONE of a worker that had a process is REAP."""
    for state, step in itertools.product(WorkerState, STEPS):
        if step.get(state) is WorkerState.GONE and state is not WorkerState.WAITING:
            assert step is REAP


@pytest.mark.parametrize("step", STEPS)
def test_nothing_happens_to_one_that_is_gone(step: "Step[WorkerState]") -> None:
    with pytest.raises(IllegalStep, match="is gone"):
        step[WorkerState.GONE]
