"""What a worker runs on a slot and has behind that: held against a worker that does as ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_core.steps import IllegalStep
from gpufaas_core.wire.heads import CallHead
from gpufaas_core.wire.order import BATCH_STREAMS, STREAMS
from gpufaas_core.wire.prefix import BrokenFrame
from gpufaas_gpu_manager.node_call import AHEAD, BIND, FOLLOW, GO_AHEAD, RUNNING, UNSENT, NodeCall
from gpufaas_gpu_manager.turn import Turns


def call(name: str = "c", *, ahead: bool = False) -> NodeCall:
    made = NodeCall(Grant(1, 1, (CallId(name),), FunctionId("f"), "", (Part(DeviceId("n/d"), 1),), False), 0.0)
    made.arrive(CallHead(name, "POST", "/", b"", []), b"")
    made.step(GO_AHEAD if ahead else BIND)
    return made


def turns(*sizes: int, begun: int = 0) -> tuple[Turns[NodeCall], list[list[NodeCall]]]:
    """Return the turns of a slot that was sent so many calls together, 0 being one that is alone; and the calls."""
    made: Turns[NodeCall] = Turns([begun])
    sent: list[list[NodeCall]] = []
    for size in sizes:
        if size:
            made.add_batch(size)
        sent.append([call(f"{len(sent)}.{each}", ahead=bool(sent)) for each in range(size or 1)])
        for each in sent[-1]:
            made.add(each)
    return made, sent


def test_what_is_sent_behind_a_turn_follows_it() -> None:
    made, (first, second) = turns(0, 2)
    assert (made.now.calls, made.now.number, made.next.calls, made.next.number) == (first, 1, second, 2)

    assert made.end()

    assert (made.now.calls, made.now.number, made.next.number) == (second, 2, 0)


def test_a_slot_takes_no_third_turn_and_is_not_changed() -> None:
    made, (first, second) = turns(0, 0)

    with pytest.raises(IllegalStep, match="a slot that has two turns"):
        made.add(call())
    with pytest.raises(IllegalStep, match="a slot that has two turns"):
        made.add_batch(2)

    assert (made.sent, made.now.calls, made.next.calls, made.coming) == (2, first, second, 0)


def test_a_batch_is_over_with_its_last_answer() -> None:
    made, ([one, two, three],) = turns(3)
    assert made.now.batch.pop(1) is two
    assert not made.end()

    assert made.stream() is one
    assert (made.now.place, made.now.calls) == (0, [one, three])
    assert not made.end()
    assert (made.now.call, made.now.calls) == (None, [three])
    del made.now.batch[2]
    assert made.end()
    assert (made.now.number, made.now.calls) == (0, [])


@pytest.mark.parametrize(("begun", "marked"), [(0, [2]), (1, [2]), (2, []), (3, []), (-1, [])])
def test_only_what_the_worker_has_not_begun_is_marked(begun: int, marked: list[int]) -> None:
    made, _ = turns(0, 0, begun=begun)

    assert list(made.mark()) == marked
    assert not made.mark(), "once"


@pytest.mark.parametrize(("begun", "marked"), [(0, [1, 2]), (1, [2]), (2, [])])
def test_of_a_silent_worker_all_that_it_has_not_begun_is_marked(begun: int, marked: list[int]) -> None:
    made, _ = turns(0, 2, begun=begun)

    assert list(made.mark(all_of_it=True)) == marked


def test_a_call_whose_body_streams_is_not_taken_back_and_nothing_can_follow_it() -> None:
    made: Turns[NodeCall] = Turns([0])
    made.add(call(), streams=True)

    assert not made.unbegun
    assert not made.can_follow
    assert not made.mark(all_of_it=True)


@pytest.mark.parametrize("state", [STREAMS, BATCH_STREAMS])
def test_what_is_answered_in_part_was_begun_whatever_the_worker_counts(state: int) -> None:
    made, _ = turns(2)
    made.now.state = state

    assert not made.unbegun
    assert not made.mark(all_of_it=True)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_what_was_not_marked_cannot_be_dropped(number: int) -> None:
    made, (first, second) = turns(0, 0, begun=1)
    made.mark()

    with pytest.raises(BrokenFrame, match="which was not marked"):
        made.drop(number)

    assert (made.now.calls, made.next.calls) == (first, second)


def test_what_follows_cannot_be_dropped_before_what_runs_is_answered() -> None:
    made, _ = turns(0, 0, begun=1)
    made.mark()

    with pytest.raises(BrokenFrame, match="before what ran was answered"):
        made.drop(2)


@pytest.mark.parametrize(
    ("begun", "states"),
    [
        (0, [UNSENT, AHEAD]),
        (1, [RUNNING, AHEAD]),
        (2, [RUNNING, RUNNING]),
        (7, [RUNNING, RUNNING]),
        (-1, [RUNNING, RUNNING]),
    ],
)
@pytest.mark.parametrize("sizes", [(0, 0), (2, 0), (0, 3), (2, 2)])
def test_of_a_dead_worker_what_it_had_not_begun_can_be_placed_again(
    begun: int, states: list[int], sizes: tuple[int, int]
) -> None:
    made, sent = turns(*sizes, begun=begun)

    made.died()
    made.died()  # it may be said twice

    assert [{each.state for each in calls} for calls in sent] == [{state} for state in states]


class Worker:
    """Begins what it gets in order, counts it, looks whether it is marked, and answers it."""

    def __init__(self) -> None:
        self.got: list[tuple[int, list[NodeCall]]] = []
        self.begun = [0]
        self.marked: range = range(0)
        """What the node has written in the memory of both."""
        self.said: list[tuple[str, int, list[NodeCall]]] = []
        """What it has said, and the node has not read: a turn was answered, or dropped."""
        self.ran: list[NodeCall] = []

    def go_on(self) -> None:
        if self.got:
            number, calls = self.got.pop(0)
            self.begun[0] = number
            if number in self.marked:
                self.said.append(("dropped", number, calls))
            else:
                self.ran += calls
                self.said.append(("answered", number, calls))


STEPS = st.lists(
    st.sampled_from(("send", "send", "go on", "go on", "read", "read", "mark", "mark all", "late", "look"))
)


@given(STEPS, st.lists(st.integers(0, 3), min_size=1), st.booleans())
@examples(300)
def test_each_call_runs_or_is_placed_again_and_never_both(steps: list[str], sizes: list[int], dies: bool) -> None:
    worker, sent, answered, again = Worker(), [], [], []  # type: ignore[var-annotated]
    made: Turns[NodeCall] = Turns(worker.begun)

    def follow() -> None:
        for each in made.now.calls:
            if each.ahead:
                each.step(FOLLOW)

    def send(size: int) -> None:
        if made.marked or (made.busy and not made.has_room):
            return  # nothing goes ahead while something is marked, and a silent worker gets no calls
        calls = [call(f"c{len(sent)}.{each}", ahead=made.busy) for each in range(size or 1)]
        if size:
            made.add_batch(size)
        for each in calls:
            made.add(each)
        sent.extend(calls)
        worker.got.append((made.sent, calls))

    def read() -> None:
        if not worker.said:
            return
        what, number, calls = worker.said.pop(0)
        if what == "dropped":
            dropped = made.drop(number)
            assert dropped in ([], calls)
            again.extend(dropped)
        else:
            assert made.now.number == number
            assert made.now.calls == calls
            answered.extend(calls)
            made.now.batch.clear()
            assert made.end()
        follow()

    for at, step in enumerate(steps):
        if step == "send":
            send(sizes[at % len(sizes)])
        elif step == "go on":
            worker.go_on()
        elif step == "read":
            read()
        elif step == "look":
            again.extend(made.take_back())
        elif marked := made.mark(all_of_it=step == "mark all"):
            if step == "late":
                worker.go_on()  # before it can see the mark
            worker.marked = marked

    if dies:
        made.died()
        left = [*made.now.calls, *made.next.calls]
        assert not {each.name for each in left if each.untouched} & {each.name for each in worker.ran}
        assert {each.name for each in left if not each.untouched} <= {
            each.name for _, _, calls in worker.said for each in calls
        }, "the worker came to them"
        return
    while worker.got or worker.said:
        worker.go_on()
        read()
    assert not made.busy
    assert not made.marked
    assert sorted(each.name for each in [*answered, *again]) == sorted(each.name for each in sent)
    assert answered == worker.ran
