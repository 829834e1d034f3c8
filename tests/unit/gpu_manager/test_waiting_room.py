"""Calls wait for a slot of their worker. Those of a grant begin together: when, and with whom."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_gpu_manager.waiting_room import LATE_S, WaitingRoom


class ManualTimers:
    def __init__(self) -> None:
        self.set: dict[str, tuple[float, Callable[[], None]]] = {}

    def later(self, name: str, delay: float, action: Callable[[], None]) -> None:
        self.set[name] = delay, action

    def cancel(self, name: str) -> None:
        self.set.pop(name, None)

    def go_off(self) -> None:
        for delay, action in list(self.set.values()):
            assert delay == LATE_S
            action()


class Call:
    """Stands for an exchange."""

    def __init__(self, number: int, grant: int) -> None:
        self.name = number
        self.grant = Grant(1, grant, (CallId(f"c{number}"),), FunctionId("f"), "", (Part(DeviceId("n/d"), 1),), False)

    def __repr__(self) -> str:
        return f"c{self.name}"


def room(calls: int) -> tuple[Any, ManualTimers, list[list[Call]], list[Call]]:
    timers, begun = ManualTimers(), []  # type: ignore[var-annotated]
    made: Any = WaitingRoom(timers, begun.append)  # type: ignore[arg-type]
    made.expect(7, calls)
    return made, timers, begun, [Call(number, 7) for number in range(calls)]


def test_a_batch_begins_with_its_last_call() -> None:
    made, timers, begun, (one, two, three) = room(3)
    made.come(two)
    made.come(one)
    assert begun == []

    made.come(three)

    assert begun == [[two, one, three]]
    assert timers.set == {}


def test_a_call_that_is_late_runs_by_itself() -> None:
    made, timers, begun, (one, two, three) = room(3)
    made.come(one)
    made.come(two)
    timers.go_off()
    made.come(three)

    assert begun == [[one, two], [three]]


def test_a_batch_begins_without_those_that_have_left() -> None:
    made, _, begun, (one, two, three) = room(3)
    made.come(one)
    made.leave(three)
    assert begun == []
    made.leave(one)
    made.come(two)

    assert begun == [[two]]


def test_calls_that_wait_for_a_slot_begin_together_without_those_that_left() -> None:
    made, _, _, (one, two, three) = room(3)
    alone = Call(9, 8)
    made.line.extend([[one, two, three], [alone]])
    made.leave(two)
    assert list(made) == [one, three, alone]

    assert made.take(three) == [one, three]
    assert made.take(three) == [], "once"
    made.leave(alone)
    assert not made.line, "a turn without calls does not wait"


@given(
    st.integers(1, 6), st.lists(st.tuples(st.sampled_from(("come", "leave", "late")), st.integers(0, 5)), max_size=20)
)
@examples(200)
def test_each_call_that_came_and_stayed_begins_once(calls: int, steps: list[tuple[str, int]]) -> None:
    made, timers, begun, every = room(calls)
    came: list[Call] = []
    gone: list[Call] = []
    for step, at in steps:
        call = every[at % calls]
        if step == "late":
            timers.go_off()
        elif step == "come" and call not in came and call not in gone:
            came.append(call)
            made.come(call)
        elif step == "leave" and call not in gone and not any(call in each for each in begun):
            gone.append(call)
            made.leave(call)
    for call in every:
        if call not in came and call not in gone:
            came.append(call)
            made.come(call)

    started = [each for batch in begun for each in batch]
    assert sorted(map(repr, started)) == sorted(repr(each) for each in came if each not in gone)
    assert timers.set == {}


def test_calls_that_wait_together_are_handed_over_together() -> None:
    made, _, _, (one, two) = room(2)
    other, _, _, _ = room(1)
    made.line.append([one, two])

    made.hand_over(other)

    assert other.take(two) == [one, two]
    assert not made.line, "the old worker has them no more"
