"""The states of a call at its node: a step that the table does not allow changes nothing."""

import asyncio
from typing import Any, cast

import pytest

from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_core.steps import IllegalStep, Step
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.exchange_state import (
    ABANDON,
    ABANDONED,
    ARRIVE,
    BEGIN_BODY,
    BIND,
    COMING,
    DISCARDED,
    END,
    FINISHED,
    HOLD,
    LEAVE,
    OPENED,
    OVER,
    QUEUE,
    QUEUED,
    RUNNING,
    SEND,
    UNCLAIMED,
    UNSENT,
    UNTOUCHED,
    WAITING,
)

STEPS = (BEGIN_BODY, ARRIVE, QUEUE, LEAVE, BIND, HOLD, SEND, ABANDON, END)
STATES = range(UNCLAIMED + 1)


def after(*steps: Step) -> int:
    state = OPENED
    for step in steps:
        state = step[state]
    return state


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ((ARRIVE, BIND, END), OVER),
        ((BEGIN_BODY, ARRIVE, BIND, END), OVER),
        ((ARRIVE, BIND, HOLD), UNSENT),
        ((ARRIVE, BIND, HOLD, SEND), RUNNING),
        ((ARRIVE, QUEUE, LEAVE, BIND, END), OVER),
        ((ARRIVE, BIND, ABANDON), ABANDONED),
        ((ARRIVE, BIND, ABANDON, END), DISCARDED),
        ((END,), UNCLAIMED),
        ((BEGIN_BODY, END), UNCLAIMED),
        ((END, ARRIVE), OVER),
    ],
)
def test_lives_of_a_call(steps: tuple[Step, ...], state: int) -> None:
    assert after(*steps) == state


def test_what_is_finished_stays_so() -> None:
    for step in STEPS:
        for state, following in step.items():
            assert state < FINISHED or following >= FINISHED


def test_what_nobody_waits_for_is_answered_to_nobody() -> None:
    for step in STEPS:
        for state, following in step.items():
            assert state not in (ABANDONED, DISCARDED) or following in (ABANDONED, DISCARDED)


def test_a_call_is_given_to_a_slot_once() -> None:
    into_running = {(state, id(step)) for step in STEPS for state, following in step.items() if following == RUNNING}

    assert {state for state, step in into_running if step == id(BIND)} == {WAITING}
    assert {state for state, step in into_running if step != id(BIND)} == {UNSENT, RUNNING}


def test_only_what_a_worker_never_had_is_placed_again() -> None:
    assert {COMING, QUEUED, UNSENT} == UNTOUCHED
    assert not any(following in UNTOUCHED for step in (BIND, SEND, END, ABANDON) for following in step.values())


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_not_in_the_table_says_what_was_wrong(step: Step) -> None:
    for state in STATES:
        if state not in step:
            with pytest.raises(IllegalStep, match=r"an exchange that .+ cannot .+"):
                step[state]


def test_an_exchange_that_runs_cannot_arrive_again_and_is_not_changed() -> None:
    loop = asyncio.new_event_loop()
    grant = Grant(1, 1, (CallId("c"),), FunctionId("f"), "d", (Part(DeviceId("n/cpu:0"), 1),), False)
    exchange = Exchange(grant, None, loop, 0.0)
    first = CallHead("c", "POST", "/", b"", [])
    exchange.arrive(first, b"first")

    with pytest.raises(IllegalStep):
        exchange.arrive(CallHead("c", "POST", "/two", b"", []), b"second")

    assert (exchange.state, exchange.head, exchange.body) == (WAITING, first, b"first")
    exchange.bind(cast(Any, _Slot()), 0.0, True)
    with pytest.raises(IllegalStep):
        exchange.bind(cast(Any, _Slot()), 0.0, True)
    loop.close()


class _Slot:
    def begin(self, *_: object) -> None: ...
