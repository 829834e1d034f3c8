"""When a worker is ended for calls that nobody waits for; time is counted in looks."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from gpufaas_gpu_manager.abandoned import LOOKS, AbandonedCalls


class Timers:
    """Have one timer, which is due when the test says so."""

    def __init__(self) -> None:
        self.action: Callable[[], None] | None = None

    def later(self, name: str, delay: float, action: Callable[[], None]) -> None:  # noqa: ARG002
        assert self.action is None, "the timer is not set again before it is due"
        self.action = action


class Call:
    """An exchange that a slot has, and the slot."""

    def __init__(self) -> None:
        self.abandoned = False
        self.slot = self
        self.pings = 0

    def ping(self) -> None:
        self.pings += 1


class Rig:
    def __init__(self, *, pings: bool) -> None:
        self.bound: list[Call] = []
        self.killed: list[str] = []
        self.timers = Timers()
        self.calls = AbandonedCalls(cast(Any, self.timers), 10.0, lambda: cast(Any, self.bound), self.killed.append)
        self.calls.pings = pings

    def begin(self) -> Call:
        self.bound.append(Call())
        return self.bound[-1]

    def abandon(self, call: Call) -> None:
        call.abandoned = True
        self.calls.watch()

    def look(self, *, pong: bool = False) -> None:
        if pong:
            self.calls.on_pong()
        action, self.timers.action = self.timers.action, None
        if action is not None:
            action()

    @property
    def looks(self) -> bool:
        return self.timers.action is not None


@pytest.fixture
def loop() -> Rig:
    return Rig(pings=True)


@pytest.fixture
def threads() -> Rig:
    return Rig(pings=False)


def test_a_call_that_goes_on_for_nobody_costs_its_worker_after_the_grace(threads: Rig) -> None:
    threads.abandon(threads.begin())

    for _ in range(LOOKS - 1):
        threads.look()
    assert threads.killed == []
    threads.look()

    assert threads.killed == ["a call that nobody waits for ran on for 10 s"]
    assert not threads.looks


def test_hang_ups_without_end_do_not_put_it_off(threads: Rig) -> None:
    threads.abandon(threads.begin())

    for _ in range(LOOKS):
        threads.abandon(passing := threads.begin())
        threads.look()
        threads.bound.remove(passing)

    assert threads.killed == ["a call that nobody waits for ran on for 10 s"]


def test_calls_that_end_within_their_grace_cost_nothing_however_many_there_are(threads: Rig) -> None:
    for _ in range(3 * LOOKS):
        threads.abandon(threads.begin())
        if len(threads.bound) == LOOKS:
            del threads.bound[0]
        threads.look()

    assert threads.killed == []


def test_a_call_of_a_thread_is_left_alone_while_another_call_runs(threads: Rig) -> None:
    other = threads.begin()
    threads.abandon(stuck := threads.begin())

    for _ in range(3 * LOOKS):
        threads.look()
    assert threads.killed == []
    threads.bound.remove(other)
    threads.look()

    assert threads.killed
    assert stuck.pings == 0, "threads answer no pings"


def test_a_loop_that_stands_still_is_ended_though_other_calls_wait(loop: Rig) -> None:
    loop.abandon(loop.begin())

    for _ in range(LOOKS - 1):
        loop.begin()
        loop.look()
    assert loop.killed == []
    loop.look()

    (reason,) = loop.killed
    assert reason.startswith("it stood still for 10 s, while a call ran that nobody waits for")


def test_a_loop_that_answers_keeps_its_worker_though_a_call_does_not_end(loop: Rig) -> None:
    loop.begin()
    loop.abandon(endless := loop.begin())

    for _ in range(3 * LOOKS):
        loop.look(pong=True)

    assert loop.killed == []
    assert endless.pings == 3 * LOOKS + 1


def test_a_loop_that_stops_to_answer_later_is_ended_as_well(loop: Rig) -> None:
    loop.begin()
    loop.abandon(loop.begin())
    for _ in range(5):
        loop.look(pong=True)

    for _ in range(LOOKS):
        loop.look()

    assert loop.killed


def test_without_an_abandoned_call_nothing_is_asked(loop: Rig) -> None:
    loop.abandon(call := loop.begin())
    loop.bound.remove(call)
    loop.look()

    assert not loop.looks
    loop.abandon(again := loop.begin())
    assert again.pings == 1
    for _ in range(LOOKS):
        loop.look()
    assert loop.killed, "it was not spared for the ping before"
