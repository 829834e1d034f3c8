"""How often calls were passed over, alone: the property test of the engine would not say which part is wrong."""

from tests.unit.scheduler.test_queue import Queue

from gpufaas_scheduler.policies.passes import Passes


class Counted(Queue):
    """A queue with the counts of an order."""

    def __init__(self, limit: int = 2) -> None:
        super().__init__()
        self.passes = Passes(limit)
        self.queue.leaving = self.passes.of

    def scan(self, before: int) -> None:
        self.passes.count(self.queue, before)

    def at_limit(self) -> str | None:
        found = self.passes.first_at_limit(self.queue)
        return None if found is None else found.id


def test_a_scan_passes_over_the_calls_ahead_of_its_end_only() -> None:
    queue = Counted(limit=5)
    f0, g1, f2 = queue.arrive("fgf")

    queue.scan(before=1)
    queue.scan(before=2)

    assert [queue.passes.of(call) for call in (f0, g1, f2)] == [2, 1, 0]


def test_a_scan_that_found_nothing_does_not_pass_over_calls_of_the_future() -> None:
    queue = Counted(limit=5)
    (f0,) = queue.arrive("f")

    queue.scan(before=1 << 62)
    (f1,) = queue.arrive("f")

    assert [queue.passes.of(call) for call in (f0, f1)] == [1, 0]


def test_a_call_that_comes_back_has_the_passes_that_it_had_and_counts_on() -> None:
    queue = Counted(limit=2)
    f0, g1 = queue.arrive("fg")
    queue.scan(before=2)
    queue.queue.remove(f0)
    queue.scan(before=2)

    queue.queue.put_back(f0)

    assert [queue.passes.of(call) for call in (f0, g1)] == [1, 2]
    assert queue.first() == "f0"
    assert queue.at_limit() == "g1"
    queue.scan(before=1)
    assert queue.at_limit() == "f0"


def test_a_call_at_the_limit_that_came_back_is_set_aside_with_its_function() -> None:
    queue = Counted(limit=1)
    f0, g1 = queue.arrive("fg")
    queue.scan(before=2)
    queue.queue.remove(f0)
    queue.queue.put_back(f0)
    assert queue.at_limit() == "f0"

    queue.queue.set_aside(f0)

    assert queue.at_limit() == g1.id


def test_counts_go_on_after_a_takeover_also_with_another_limit() -> None:
    for limit, at_limit in ((2, "f0"), (3, None), (1, "f0"), (0, "f0")):
        queue = Counted(limit=2)
        queue.arrive("fg")
        queue.scan(before=1)
        queue.scan(before=1)
        saved = queue.passes.save()
        queue.passes = Passes(limit)

        queue.passes.load(saved)

        assert queue.at_limit() == at_limit
