"""The index of the queue, alone: the property test of the engine would not say which part is wrong."""

from hypothesis import given
from hypothesis import strategies as st

from gpufaas_core.model import CallId, Function, FunctionId
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.changes import Changes
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.queue import GlobalQueue


class Queue:
    """A global queue over functions named by letters; a call is named after its function and arrival number."""

    def __init__(self) -> None:
        self.queue: GlobalQueue[Call] = GlobalQueue()
        self.functions: dict[str, FunctionState] = {}

    def arrive(self, functions: str) -> list[Call]:
        calls = []
        for name in functions:
            owner = self.functions.setdefault(name, FunctionState(Function(FunctionId(name), ""), Changes()))
            number = self.queue.next_number
            self.queue.next_number += 1
            call = Call(CallId(f"{name}{number}"), owner.id, owner, number, 0.0, None)
            self.queue.append(call)
            calls.append(call)
        return calls

    def first(self) -> str | None:
        found = self.queue.first()
        return None if found is None else found.id


def test_the_first_call_is_found_whatever_left_before_it() -> None:
    queue = Queue()
    f0, g1, f2, _ = queue.arrive("fgfg")

    queue.queue.remove(f2)
    queue.queue.remove(f0)
    assert queue.first() == "g1"
    queue.queue.remove(g1)

    assert queue.first() == "g3"
    assert len(queue.queue) == 1


def test_a_call_that_comes_back_has_its_number_and_what_was_noted_as_it_left() -> None:
    queue = Queue()
    f0, g1 = queue.arrive("fg")
    queue.queue.leaving = lambda call: 7 + call.number
    queue.queue.remove(f0)
    queue.queue.remove(g1)
    (h2,) = queue.arrive("h")
    queue.queue.put_back(g1)
    queue.queue.put_back(f0)

    assert [(each.id, each.left, each.note) for each in queue.queue.returned] == [("f0", True, 7), ("g1", True, 8)]
    assert queue.first() == "f0"
    assert queue.queue.first_stayed() is h2
    assert queue.queue.first_stayed(before=2) is None


def test_a_function_that_is_set_aside_is_left_out_until_the_queue_is_rewound() -> None:
    queue = Queue()
    f0, _, _, _ = queue.arrive("ffgf")

    queue.queue.set_aside(f0)
    assert queue.first() == "g2"
    queue.queue.rewind()

    assert queue.first() == "f0"


def test_a_call_that_came_back_is_set_aside_with_its_function() -> None:
    queue = Queue()
    f0, _, _ = queue.arrive("fgf")
    queue.queue.remove(f0)
    queue.queue.put_back(f0)

    queue.queue.set_aside(f0)

    assert queue.first() == "g1"


def test_calls_that_leave_from_the_middle_are_not_kept() -> None:
    """A head that cannot be placed must not let the queue behind it grow with cancelled calls."""
    queue = Queue()
    queue.arrive("f")

    for _ in range(1000):
        (call,) = queue.arrive("f")
        queue.queue.remove(call)

    assert len(queue.functions["f"].flow.calls) < 10


@given(st.lists(st.tuples(st.sampled_from(["arrive", "remove", "return", "aside"]), st.integers(0, 99)), max_size=60))
def test_the_oldest_calls_are_those_of_a_scan_whatever_happened_before(steps: list[tuple[str, int]]) -> None:
    """The answer is kept between questions; a scan of all waiting calls keeps nothing."""
    queue, limit = Queue(), 3
    waiting: list[Call] = []
    gone: list[Call] = []
    for step, number in steps:
        if step == "arrive":
            waiting += queue.arrive("fghijk"[number % 6])
        elif step == "remove" and waiting:
            gone.append(waiting.pop(number % len(waiting)))
            queue.queue.remove(gone[-1])
        elif step == "return" and gone:
            waiting.append(gone.pop(number % len(gone)))
            queue.queue.put_back(waiting[-1])
        elif step == "aside" and waiting:
            queue.queue.set_aside(waiting[number % len(waiting)])
        firsts: dict[str, str] = {}
        for call in sorted(waiting, key=lambda each: each.number):
            firsts.setdefault(call.function, call.id)

        assert [each.id for each in queue.queue.oldest(limit)] == list(firsts.values())[:limit]
