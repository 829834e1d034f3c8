"""When a worker is silent, and when it is ended for calls that nobody waits for; time is counted in looks."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpufaas_core.messages import CopySilent
from gpufaas_gpu_manager import call_watch
from gpufaas_gpu_manager.call_watch import LATE, LOOK_S, CallWatch

GRACE = 40
"""Looks, in 10 s."""
SILENT = 4
"""Looks after a sign of life: within 1 s."""


class Timers:
    """Have one timer, which is due when the test says so."""

    def __init__(self) -> None:
        self.action: Callable[[], None] | None = None

    def later(self, name: str, delay: float, action: Callable[[], None]) -> None:  # noqa: ARG002
        assert self.action is None, "the timer is not set again before it is due"
        self.action = action


class Call:
    """An exchange that a slot has."""

    abandoned = False
    timeout_s = 0.0

    def __init__(self, now: float) -> None:
        self.bound_at = now


class Rig:
    """A worker and its calls."""

    serves = takes_calls = True
    stopped = replaced = False
    copy = 0
    spec = SimpleNamespace(function="f")
    device = SimpleNamespace(id="n/d")

    def __init__(self, *, pings: bool, frames: bool = True) -> None:
        """:param frames: it speaks them, and so answers a ping"""
        self.now = 1000.0
        self.frames = frames
        self.asked = 0
        """The pings that it got."""
        self.pinged = False
        """It owes the answer to one."""
        self.calls: list[Call] = []
        self.killed: list[str] = []
        self.said: list[bool] = []
        """Whether it is silent, as the scheduler was told."""
        self.unbegun = False
        self.timers = Timers()
        self.kill = self.killed.append
        self.settings = SimpleNamespace(abort_grace_s=GRACE * LOOK_S)
        this = cast(Any, self)
        self.watch = CallWatch(this, this, this, this)
        self.watch.pings = pings

    def report(self, said: CopySilent) -> None:
        self.said.append(said.silent)

    def bind_waiting(self) -> None: ...

    def bound(self) -> Iterable[Any]:
        return self.calls

    def ping(self) -> bool:
        self.asked += self.frames
        self.pinged = self.frames
        return self.frames

    def take_all_back(self, _: str) -> None:
        if self.unbegun:
            self.calls, self.unbegun = [], False

    def begin(self) -> Call:
        self.calls.append(Call(self.now - 1.0))
        self.watch.begin()
        return self.calls[-1]

    def abandon(self, call: Call, left_s: float | None = None) -> None:
        """:param left_s: so much is left of its time; None: it has no limit"""
        call.abandoned = True
        if left_s is not None:
            call.timeout_s = self.now + left_s - call.bound_at
        self.watch.begin()

    def look(self, times: int = 1, *, pong: bool = False) -> None:
        for _ in range(times):
            self.now += LOOK_S
            if pong:
                self.pinged = False
            action, self.timers.action = self.timers.action, None
            if action is not None:
                action()

    @property
    def looks(self) -> bool:
        return self.timers.action is not None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    def make(**how: bool) -> Rig:
        rig = Rig(**how)
        monkeypatch.setattr(call_watch, "time", SimpleNamespace(monotonic=lambda: rig.now))
        return rig

    return make


@pytest.fixture
def loop(made: Callable[..., Rig]) -> Rig:
    """It answers pings while calls run."""
    return made(pings=True)


@pytest.fixture
def thread(made: Callable[..., Rig]) -> Rig:
    """Its only thread runs its call."""
    return made(pings=False)


@pytest.fixture
def server(made: Callable[..., Rig]) -> Rig:
    """It speaks HTTP."""
    return made(pings=False, frames=False)


# --- signs of life ---


def test_a_worker_that_answers_no_ping_is_silent_within_a_second_and_is_heard_with_its_answer(loop: Rig) -> None:
    loop.begin()
    loop.look()
    loop.look(pong=True)

    loop.look(SILENT - 1)
    assert loop.said == [True]
    loop.look(GRACE // 2)
    assert loop.said == [True]
    loop.look(pong=True)

    assert loop.said == [True, False]
    assert loop.killed == []


def test_a_worker_that_ends_calls_is_not_silent_whatever_becomes_of_its_pings(loop: Rig) -> None:
    loop.begin()
    for _ in range(GRACE):
        loop.watch.answered = True
        loop.look()

    assert loop.said == []
    assert loop.asked == 1, "one at a time"


def test_a_thread_that_does_not_begin_its_call_is_silent_until_it_answers_a_ping(thread: Rig) -> None:
    thread.begin()
    thread.unbegun = True
    thread.look(SILENT)

    assert (thread.said, thread.calls, thread.asked) == ([True], [], 1), "its call is placed again"
    thread.look(pong=True)
    assert thread.said == [True, False]
    assert not thread.looks


def test_a_thread_that_runs_a_call_owes_nothing_unless_it_is_stopped(thread: Rig) -> None:
    thread.begin()
    thread.look(3 * GRACE)
    assert thread.said == []
    assert thread.asked == 0

    thread.stopped = True
    thread.look(SILENT - 1)
    assert thread.said == [True]
    thread.stopped = False
    thread.look(pong=True)
    assert thread.said == [True, False]


def test_a_server_is_silent_while_it_is_stopped(server: Rig) -> None:
    server.begin()
    server.stopped = True
    server.look(SILENT)
    assert server.said == [True]

    server.stopped = False
    server.look()
    assert server.said == [True, False]


def test_a_worker_that_was_only_slow_gets_more_time_until_it_has_ended_a_call(loop: Rig) -> None:
    """Else each call could be given to it, and be taken back before it begins."""

    def looks_until_silent() -> int:
        """It answers its last ping first."""
        loop.look(pong=True)
        before, looks = len(loop.said), 1
        while len(loop.said) == before:
            loop.look()
            looks += 1
        loop.look(pong=True)
        return looks

    loop.begin()
    first, second, third = (looks_until_silent() for _ in range(3))
    assert first < second < third
    loop.watch.answered = True
    assert looks_until_silent() == first
    loop.stopped = True
    assert looks_until_silent() == first, "nobody takes a stopped one for slow"


def test_what_stays_silent_is_ended_if_no_caller_waits_for_what_it_has_begun(thread: Rig) -> None:
    thread.begin()
    thread.unbegun = True
    thread.look(GRACE - 1)
    assert thread.killed == []
    thread.look()

    assert thread.killed == ["it gave no sign of life for 10 s"]


def test_what_stays_silent_is_left_alone_while_a_caller_waits_for_what_it_has_begun(loop: Rig) -> None:
    loop.begin()

    loop.look(3 * GRACE)

    assert loop.said == [True]
    assert loop.killed == []


def test_nothing_is_asked_once_its_calls_have_ended(loop: Rig) -> None:
    loop.begin()
    loop.look()
    loop.calls.clear()
    loop.look(pong=True)

    assert not loop.looks
    assert loop.asked == 1


# --- calls that nobody waits for ---


def test_a_call_that_goes_on_for_nobody_costs_its_worker_after_the_grace(thread: Rig) -> None:
    thread.abandon(thread.begin())

    thread.look(GRACE - 1)
    assert thread.killed == []
    thread.look()

    assert thread.killed == ["a call that nobody waits for ran on for 10 s"]
    assert not thread.looks


@pytest.mark.parametrize("left_s", [0.0, 3.0, 100.0])
def test_it_may_go_on_for_a_second_beyond_its_time_limit_at_most(thread: Rig, left_s: float) -> None:
    thread.abandon(thread.begin(), left_s)
    looks = min(GRACE, max(LATE, int(left_s / LOOK_S)))

    thread.look(looks - 1)
    assert thread.killed == []
    thread.look()

    assert thread.killed == [f"a call that nobody waits for ran on for {looks * LOOK_S:g} s"]


def test_hang_ups_without_end_do_not_put_it_off(thread: Rig) -> None:
    thread.abandon(thread.begin())

    for _ in range(GRACE):
        thread.abandon(passing := thread.begin())
        thread.look()
        thread.calls.remove(passing)

    assert thread.killed == ["a call that nobody waits for ran on for 10 s"]


def test_calls_that_end_within_their_grace_cost_nothing_however_many_there_are(thread: Rig) -> None:
    for _ in range(3 * GRACE):
        thread.abandon(thread.begin())
        if len(thread.calls) == GRACE:
            del thread.calls[0]
        thread.look()

    assert thread.killed == []


def test_a_call_that_is_over_is_left_alone_while_another_one_runs_and_the_worker_lives(loop: Rig) -> None:
    other = loop.begin()
    loop.abandon(loop.begin(), 0.0)

    loop.look(3 * GRACE, pong=True)
    assert loop.killed == []
    loop.calls.remove(other)
    loop.look(pong=True)

    assert loop.killed == [f"a call that nobody waits for ran on for {(3 * GRACE + 1) * LOOK_S:g} s"]


def test_a_loop_that_stands_still_is_ended_though_other_calls_wait(loop: Rig) -> None:
    loop.abandon(loop.begin())

    for _ in range(GRACE):
        loop.begin()
        loop.look()
    assert loop.killed == []
    loop.look()

    (reason,) = loop.killed
    assert reason.startswith("it stood still for 10 s, while a call ran that nobody waits for")


def test_a_loop_that_a_call_blocks_beyond_its_time_is_ended_within_a_second(loop: Rig) -> None:
    loop.begin()
    call = loop.begin()
    loop.look(3 * GRACE)
    loop.abandon(call, 0.0)

    loop.look(LATE - 1)
    assert loop.killed == []
    loop.look()

    (reason,) = loop.killed
    assert reason.startswith("it stood still for 1 s")


def test_a_loop_that_stops_to_answer_later_is_ended_as_well(loop: Rig) -> None:
    loop.begin()
    loop.abandon(loop.begin())
    loop.look(5, pong=True)

    loop.look(GRACE + 1)

    assert loop.killed


def test_a_call_that_was_abandoned_before_has_no_part_in_the_next_one(loop: Rig) -> None:
    loop.abandon(call := loop.begin(), 0.0)
    loop.look(LATE - 1)
    loop.calls.remove(call)
    loop.look(pong=True)
    assert not loop.looks

    loop.abandon(loop.begin(), 0.0)
    loop.look(LATE - 1)

    assert loop.killed == []
