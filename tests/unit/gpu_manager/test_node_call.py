"""The states of a call at its node: a step that the table does not allow changes nothing."""

import asyncio
from typing import Any, cast

import pytest

from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_core.steps import IllegalStep, Step
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import (
    ABANDON,
    ABANDONED,
    AHEAD,
    ARRIVE,
    BEGIN_BODY,
    BIND,
    COMING,
    DISCARDED,
    END,
    FINISHED,
    FOLLOW,
    GIVEN_UP,
    GO_AHEAD,
    HOLD,
    LEAVE,
    LEFT_AHEAD,
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
    NodeCall,
)

STEPS = (BEGIN_BODY, ARRIVE, QUEUE, LEAVE, BIND, GO_AHEAD, FOLLOW, HOLD, SEND, ABANDON, END)
STATES = range(UNCLAIMED + 1)
GRANT = Grant(1, 1, (CallId("c"),), FunctionId("f"), "d", (Part(DeviceId("n/cpu:0"), 1),), False)


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
        ((ARRIVE, GO_AHEAD, FOLLOW, END), OVER),
        ((ARRIVE, GO_AHEAD, HOLD), AHEAD),
        ((ARRIVE, GO_AHEAD, END), OVER),
        ((ARRIVE, GO_AHEAD, ABANDON), LEFT_AHEAD),
        ((ARRIVE, GO_AHEAD, ABANDON, FOLLOW), ABANDONED),
        ((ARRIVE, GO_AHEAD, ABANDON, END), DISCARDED),
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
            assert state not in GIVEN_UP or following in GIVEN_UP


def test_a_call_is_given_to_a_slot_once() -> None:
    into_running = {state for step in (FOLLOW, SEND) for state, following in step.items() if following == RUNNING}

    assert (set(BIND), set(GO_AHEAD)) == ({WAITING}, {WAITING})
    assert into_running == {AHEAD, UNSENT, RUNNING}, "that a slot has already"
    assert [state for step in STEPS for state, following in step.items() if following == AHEAD] == [WAITING, AHEAD]


def test_only_what_a_worker_never_had_is_placed_again() -> None:
    assert {COMING, QUEUED, AHEAD, UNSENT} == UNTOUCHED
    assert not any(following in UNTOUCHED for step in (BIND, FOLLOW, SEND, END, ABANDON) for following in step.values())


def test_what_is_ahead_is_said_by_its_state_alone() -> None:
    call = NodeCall(GRANT, 0.0)
    call.arrive(CallHead("c", "HEAD", "/", b"", []), b"")
    assert (call.ahead, call.bodiless) == (False, True)

    call.step(GO_AHEAD)
    assert (call.ahead, call.untouched, call.abandoned) == (True, True, False)
    call.step(ABANDON)
    assert (call.ahead, call.untouched, call.abandoned) == (True, False, True)
    call.step(FOLLOW)
    assert (call.ahead, call.finished) == (False, False)
    call.step(END)
    assert call.finished


def test_its_shell_keeps_all_of_it_in_slots() -> None:
    loop = asyncio.new_event_loop()
    assert vars(Exchange(GRANT, cast(Any, None), loop, 0.0)) == {}
    loop.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_not_in_the_table_says_what_was_wrong(step: Step) -> None:
    for state in STATES:
        if state not in step:
            with pytest.raises(IllegalStep, match=r"a call that .+ cannot .+"):
                step[state]


def test_an_exchange_that_runs_cannot_arrive_again_and_is_not_changed() -> None:
    loop = asyncio.new_event_loop()
    exchange = Exchange(GRANT, cast(Any, None), loop, 0.0)
    first = CallHead("c", "POST", "/", b"", [])
    exchange.arrive(first, b"first")

    with pytest.raises(IllegalStep):
        exchange.arrive(CallHead("c", "POST", "/two", b"", []), b"second")

    assert (exchange.state, exchange.head, exchange.body) == (WAITING, first, b"first")
    exchange.bind(cast(Any, _Slot()), 0.0, 1)
    with pytest.raises(IllegalStep):
        exchange.bind(cast(Any, _Slot()), 0.0, 1)
    loop.close()


class _Slot:
    def begin(self, *_: object) -> None: ...
