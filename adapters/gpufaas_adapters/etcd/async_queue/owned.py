"""The calls that this gateway owns, in memory, as far as it knows."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpufaas_adapters.etcd.async_queue.bodies import Bodies
from gpufaas_adapters.etcd.async_queue.records import CALLS, CallRecord, bodies_of, path_of
from gpufaas_adapters.etcd.client import DoDelete, DoDeletePrefix, Etcd
from gpufaas_async_calls.call import Phase, Waiting


@dataclass(slots=True, eq=False)
class OwnedCall:
    key: int
    record: CallRecord
    revision: int
    """At which it was last written, as far as we know."""
    is_claimed: bool = False

    @property
    def lane(self) -> tuple[Phase, str]:
        assert self.record.phase != "dead"
        return self.record.phase, self.record.function

    @property
    def place(self) -> tuple[float, int]:
        return self.record.due_at or 0.0, self.key


class OwnedCalls:
    """
    :ivar on_found: called with counts of calls that became ours without being accepted here
    :ivar on_lost: called with key, function and whether it was claimed, of a call that is not ours any more
    """

    def __init__(self, bodies: Bodies) -> None:
        self.on_found: Callable[[Sequence[Waiting]], None] = lambda _: None
        self.on_lost: Callable[[int, str, bool], None] = lambda *_: None
        self._bodies = bodies
        self._calls: dict[int, OwnedCall] = {}
        self._due: dict[tuple[Phase, str], list[tuple[float, int]]] = {}
        """Calls that are not claimed, the longest due first."""

    def all(self) -> list[OwnedCall]:
        return list(self._calls.values())

    def get(self, key: int) -> OwnedCall | None:
        return self._calls.get(key)

    def is_claimed(self, key: int) -> bool:
        return (call := self._calls.get(key)) is not None and call.is_claimed

    def due(self, phase: Phase, function: str, limit: int) -> list[tuple[float, OwnedCall]]:
        """Return calls that are not claimed, with the time at which they are due, the longest due first."""
        return [(at, self._calls[key]) for at, key in self._due.get((phase, function), [])[:limit]]

    def add(self, call: OwnedCall) -> None:
        self._calls[call.key] = call
        insort(self._due.setdefault(call.lane, []), call.place)

    def claim(self, call: OwnedCall) -> None:
        self._not_due(call)
        call.is_claimed = True

    def drop(self, call: OwnedCall) -> None:
        if self._calls.get(call.key) is call:
            del self._calls[call.key]
            self._not_due(call)

    def lose(self, call: OwnedCall) -> None:
        """Drop a call that was cancelled through another gateway, or that another has taken over."""
        self.drop(call)
        if not call.is_claimed:
            self._bodies.remove_files(call.key)
        self.on_lost(call.key, call.record.function, call.is_claimed)

    def found(self, calls: Iterable[OwnedCall]) -> None:
        self.on_found(counted(calls))

    def _not_due(self, call: OwnedCall) -> None:
        due = self._due.get(call.lane, [])
        at = bisect_left(due, call.place)
        if at < len(due) and due[at] == call.place:
            del due[at]
        if not due:
            self._due.pop(call.lane, None)


def counted(calls: Iterable[OwnedCall]) -> list[Waiting]:
    counts: Counter[tuple[Phase, str]] = Counter()
    first: dict[tuple[Phase, str], float] = {}
    for each in calls:
        counts[each.lane] += 1
        first[each.lane] = min(first.get(each.lane, each.place[0]), each.place[0])
    return [Waiting(phase, function, count, first[phase, function]) for (phase, function), count in counts.items()]


class RefusedCalls:
    """Calls that were refused because etcd did not answer; they may have been written."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._calls: list[OwnedCall] = []

    def add(self, calls: Iterable[OwnedCall]) -> None:
        self._calls += calls

    async def delete(self) -> None:
        """Delete them from etcd. Done before any other write."""
        while self._calls:
            call = self._calls[-1]
            path = path_of(CALLS, call.record.id, call.key)
            await self._etcd.txn((), (DoDelete(path), DoDeletePrefix(bodies_of(call.key))))
            self._calls.pop()
