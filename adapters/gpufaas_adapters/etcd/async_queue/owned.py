"""The calls that this gateway owns, in memory, as far as it knows."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from gpufaas_adapters.etcd.async_queue.bodies import Bodies
from gpufaas_adapters.etcd.async_queue.records import StoredCall
from gpufaas_async_calls.call import Phase, Waiting


class OwnedCalls:
    """
    :ivar on_found: called with counts of calls that became ours without being accepted here
    :ivar on_lost: called with key, function and whether it was claimed, of a call that is not ours any more
    """

    def __init__(self, bodies: Bodies) -> None:
        self.on_found: Callable[[Sequence[Waiting]], None] = lambda _: None
        self.on_lost: Callable[[int, str, bool], None] = lambda *_: None
        self._bodies = bodies
        self._calls: dict[int, StoredCall] = {}
        self._due: dict[tuple[Phase, str], list[tuple[float, int]]] = {}
        """Calls that are not claimed, the longest due first."""

    def all(self) -> list[StoredCall]:
        return list(self._calls.values())

    def get(self, key: int) -> StoredCall | None:
        return self._calls.get(key)

    def due(self, phase: Phase, function: str, limit: int) -> list[tuple[float, StoredCall]]:
        """Return calls that are not claimed, with the time at which they are due, the longest due first."""
        return [(at, self._calls[key]) for at, key in self._due.get((phase, function), [])[:limit]]

    def add(self, call: StoredCall) -> None:
        self._calls[call.key] = call
        insort(self._due.setdefault(call.lane, []), call.place)

    def claim(self, call: StoredCall) -> None:
        self._not_due(call)
        call.is_claimed = True

    def drop(self, call: StoredCall) -> None:
        if self._calls.get(call.key) is call:
            del self._calls[call.key]
            self._not_due(call)

    def lose(self, call: StoredCall) -> None:
        """Drop a call that was cancelled through another gateway, or that another has taken over."""
        self.drop(call)
        if not call.is_claimed:
            self._bodies.remove_files(call.key)
        self.on_lost(call.key, call.record.function, call.is_claimed)

    def found(self, calls: Iterable[StoredCall]) -> None:
        self.on_found(counted(calls))

    def _not_due(self, call: StoredCall) -> None:
        due = self._due.get(call.lane, [])
        at = bisect_left(due, call.place)
        if at < len(due) and due[at] == call.place:
            del due[at]
        if not due:
            self._due.pop(call.lane, None)


def counted(calls: Iterable[StoredCall]) -> list[Waiting]:
    counts: Counter[tuple[Phase, str]] = Counter()
    first: dict[tuple[Phase, str], float] = {}
    for each in calls:
        counts[each.lane] += 1
        first[each.lane] = min(first.get(each.lane, each.place[0]), each.place[0])
    return [Waiting(phase, function, count, first[phase, function]) for (phase, function), count in counts.items()]
