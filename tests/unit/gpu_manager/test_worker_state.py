"""The life of a worker."""

import itertools

import pytest

from gpufaas_gpu_manager.worker_state import IllegalTransition, WorkerEvent, WorkerState, advance


def test_a_good_life() -> None:
    state = WorkerState.WAITING
    for event in (
        WorkerEvent.RESERVATION_MADE,
        WorkerEvent.BECAME_READY,
        WorkerEvent.END_REQUESTED,
        WorkerEvent.REAPED,
    ):
        state = advance(state, event)

    assert state is WorkerState.GONE


def test_one_that_never_had_a_process_is_gone_at_once() -> None:
    assert advance(WorkerState.WAITING, WorkerEvent.END_REQUESTED) is WorkerState.GONE


def test_ready_after_the_order_to_end_does_not_bring_it_back() -> None:
    assert advance(WorkerState.ENDING, WorkerEvent.BECAME_READY) is WorkerState.ENDING


def test_memory_comes_back_only_with_the_reaping_of_a_process() -> None:
    """Every way into GONE of a worker that had a process is REAPED."""
    for state, event in itertools.product(WorkerState, WorkerEvent):
        try:
            after = advance(state, event)
        except IllegalTransition:
            continue
        if after is WorkerState.GONE and state is not WorkerState.WAITING:
            assert event is WorkerEvent.REAPED


@pytest.mark.parametrize("event", list(WorkerEvent))
def test_nothing_happens_to_one_that_is_gone(event: WorkerEvent) -> None:
    with pytest.raises(IllegalTransition, match="gone"):
        advance(WorkerState.GONE, event)
