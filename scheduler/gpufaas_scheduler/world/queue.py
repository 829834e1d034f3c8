"""
The global queue: calls in arrival order, with indexes by function.

A literal scan of the queue costs O(queue) per decision. This index gives the same answers at less cost:

*Which call is first?* Each function has a queue of its own, and a heap has one entry per function that waits. The
number of an entry is a lower bound of the arrival number of the function's first call, and is corrected when the entry
surfaces. So a hit, which takes a call from the middle, costs nothing here.

*Calls that come back* (a node refused them, or their device left) keep their number. They are in a short list of their
own, and are merged into every answer. The list is nearly always empty.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar, cast

from gpufaas_core.model import FunctionId
from gpufaas_scheduler.contract import NEVER
from gpufaas_scheduler.view_contract import WaitingCall


class HasFlow(Protocol):
    """What the queue needs of a function."""

    @property
    def flow(self) -> Flow[Any]: ...


class Queued(Protocol):
    """What the queue needs of a call."""

    left: bool
    """It left its queue: see `view_contract.WaitingCall.left`."""
    note: int
    """See `view_contract.WaitingCall.note`."""

    @property
    def function(self) -> FunctionId: ...
    @property
    def owner(self) -> HasFlow: ...
    @property
    def number(self) -> int:
        """Arrival number. It orders the queue, and a call that comes back keeps it."""


CallT = TypeVar("CallT", bound=Queued)


class Flow(Generic[CallT]):
    """The waiting calls of one function, in arrival order. A call that leaves from the middle stays as a tombstone."""

    __slots__ = ("calls", "head", "listed", "tombstones")

    def __init__(self) -> None:
        self.calls: deque[CallT] = deque()
        """The first one is no tombstone."""
        self.head = NEVER
        """Arrival number of the first call; `NEVER`: none waits."""
        self.listed = False
        """Whether it has an entry in the heap of `GlobalQueue`."""
        self.tombstones = 0

    def __lt__(self, other: Flow[CallT]) -> bool:
        # Entries with equal numbers: a call has become one of another function. Only one of the two is up to date.
        return False

    def __iter__(self) -> Iterator[CallT]:
        return (each for each in self.calls if not each.left)

    def append(self, call: CallT) -> None:
        call.left = False
        if not self.calls:
            self.head = call.number
        self.calls.append(call)

    def put_back(self, call: CallT) -> None:
        """Insert *call* by its number. O(calls before it); O(1) at the end."""
        if not self.calls or self.calls[-1].number < call.number:
            self.append(call)
            return
        before = []
        while self.calls and self.calls[0].number < call.number:
            before.append(self.calls.popleft())
        call.left = False
        self.calls.appendleft(call)
        self.calls.extendleft(reversed(before))
        self.head = self.calls[0].number

    def remove(self, call: CallT) -> None:
        """Take *call* out of any place."""
        call.left = True
        calls = self.calls
        if calls[0] is not call:
            self.tombstones += 1
            if self.tombstones * 2 > len(calls):
                self.calls = deque(each for each in calls if not each.left)
                self.tombstones = 0
            return
        calls.popleft()
        while calls:
            first = calls[0]
            if not first.left:
                self.head = first.number
                return
            calls.popleft()
            self.tombstones -= 1
        self.head = NEVER


class GlobalQueue(Generic[CallT]):
    """All waiting calls of placed functions."""

    __slots__ = (
        "_aside", "_heads", "_oldest", "_oldest_limit", "_oldest_until", "aside", "count",
        "leaving", "next_number", "returned",
    )  # fmt: skip

    def __init__(self) -> None:
        self.count = 0
        self.next_number = 0
        self.returned: list[CallT] = []
        """Calls that came back, by number."""
        self.leaving: Callable[[WaitingCall], int] | None = None
        """See `policy_contract.Noting`."""
        self._heads: list[tuple[int, Flow[CallT]]] = []
        self._aside: list[tuple[int, Flow[CallT]]] = []
        self.aside: set[FunctionId] = set()
        """The functions that are set aside."""
        self._oldest: list[CallT] = []
        """The last answer of `oldest`."""
        self._oldest_limit = 0
        self._oldest_until = -1
        """The number of the last call in `_oldest`, or `NEVER` if this has room for more; -1: `_oldest` is void."""

    def __len__(self) -> int:
        return self.count

    def append(self, call: CallT) -> None:
        queue = call.owner.flow
        calls = queue.calls
        if not calls:
            if not queue.listed:
                queue.listed = True
                heappush(self._heads, (call.number, queue))
            if call.number < self._oldest_until:
                self._extend_oldest(call)
            queue.head = call.number
        # `Flow.append`, inlined: each call passes here.
        call.left = False
        calls.append(call)
        self.count += 1

    def put_back(self, call: CallT) -> None:
        """Let *call* wait again, with its number."""
        insort(self.returned, call, key=_number)
        self._oldest_until = -1
        self.count += 1

    def _extend_oldest(self, call: CallT) -> None:
        """A function begins to wait with *call* while `_oldest` has room for it."""
        found = self._oldest
        if self.returned or (found and call.number < found[-1].number):
            self._oldest_until = -1
            return
        found.append(call)
        if len(found) == self._oldest_limit:
            self._oldest_until = call.number

    def remove(self, call: CallT) -> None:
        if call.number <= self._oldest_until:
            self._oldest_until = -1
        self.count -= 1
        if self.leaving is not None:
            call.note = self.leaving(call)  # type: ignore[arg-type]
        if call.left:
            self.returned.remove(call)
            return
        call.owner.flow.remove(call)

    def first(self, before: int = NEVER) -> CallT | None:
        """Return the first call with a number below *before* whose function is not set aside."""
        found = self.first_stayed(before)
        for call in self.returned:
            if call.number >= before or (found is not None and call.number > found.number):
                break
            if call.function not in self.aside:
                return call
        return found

    def oldest(self, limit: int) -> Sequence[CallT]:
        """Rewind, and return the first call of each of the *limit* functions that have waited longest, by number."""
        if self.aside:
            self.rewind()
        if self._oldest_limit == limit and self._oldest_until >= 0:
            return self._oldest
        heads = self._heads
        found: list[CallT] = []
        taken = []
        while heads and len(found) < limit:
            number, queue = heads[0]
            head = queue.head
            if head == number:
                found.append(queue.calls[0])
                taken.append(heappop(heads))
            elif head == NEVER:
                heappop(heads)
                queue.listed = False
            else:
                heapreplace(heads, (head, queue))
        for entry in taken:
            heappush(heads, entry)
        if self.returned:
            firsts: dict[FunctionId, CallT] = {}
            for call in sorted([*found, *self.returned], key=_number):
                firsts.setdefault(call.function, call)
            found = list(firsts.values())[:limit]
        self._oldest, self._oldest_limit = found, limit
        self._oldest_until = found[-1].number if len(found) == limit else NEVER
        return found

    def first_stayed(self, before: int = NEVER) -> CallT | None:
        """Return `first` among the calls that did not come back."""
        heads = self._heads
        found = None
        while heads:
            number, queue = heads[0]
            if number >= before:
                break
            head = queue.head
            if head == number:
                found = queue.calls[0]
                break
            if head == NEVER:
                heappop(heads)
                queue.listed = False
            else:
                heapreplace(heads, (head, queue))
        return found

    def firsts(self) -> Iterator[CallT]:
        """Yield a waiting call of each function, those that are set aside included."""
        for _, queue in chain(self._heads, self._aside):
            if queue.head != NEVER:
                yield queue.calls[0]
        yield from self.returned

    def more_of(self, call: CallT, limit: int) -> list[CallT]:
        """Return up to *limit* other waiting calls of the function of *call*, by number. O(limit)."""
        found = list(islice((each for each in call.owner.flow if each is not call), limit))
        back = [each for each in self.returned if each.owner is call.owner and each is not call]
        return sorted([*back, *found], key=_number)[:limit] if back else found

    def set_aside(self, call: WaitingCall) -> None:
        """Leave the function of *call* out until `rewind`, since it cannot be placed now."""
        self.aside.add(call.function)
        heads = self._heads
        function = cast(Queued, call).owner.flow
        if heads and heads[0][1] is function:
            self._aside.append(heappop(heads))
        elif function.listed:
            # *call* was in `returned`, so the entry of its function is elsewhere in the heap.
            at = next((i for i, (_, queue) in enumerate(heads) if queue is function), None)
            if at is not None:
                self._aside.append(heads[at])
                heads[at] = heads[-1]
                heads.pop()
                heapify(heads)

    def rewind(self) -> None:
        """End a pass through the queue: no function is set aside any more."""
        if self.aside:
            self.aside.clear()
            for entry in self._aside:
                heappush(self._heads, entry)
            self._aside.clear()


def _number(call: Queued) -> int:
    return call.number
