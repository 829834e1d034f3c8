"""
How often each waiting call was passed over, for an order that limits this.

A scan of the queue ends at the call that it starts, or at the end of the queue, and passes over all calls before that
point. So the count of call n is the number of scans that ended behind n. Only whether it is at least `limit` matters.
So the `limit` largest ends are kept, and call n is at the limit if n is below the least of them. This is exact, and
costs one `insort` per scan.

Calls that left the queue and came back keep their numbers, but the scans meanwhile did not pass over them. Each has an
explicit count, in its `WaitingCall.note`. There are nearly always none.
"""

from bisect import bisect_right, insort

import msgspec

from gpufaas_scheduler.contract import NEVER
from gpufaas_scheduler.roles import PassesQueue
from gpufaas_scheduler.view_contract import WaitingCall


class Passes:
    """Counts are exact up to *limit*."""

    __slots__ = ("_ends", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ends = [0] * limit
        """The `limit` largest ends of scans, ascending."""

    def of(self, call: WaitingCall) -> int:
        """Return how often *call* was passed over; `limit` stands for this or more."""
        return call.note if call.left else self.limit - bisect_right(self._ends, call.number)

    def first_at_limit(self, queue: PassesQueue, before: int = NEVER) -> WaitingCall | None:
        """Return the first call of *queue* that was passed over `limit` times, and is not set aside."""
        ends = self._ends
        found = queue.first_stayed(ends[0] if ends and ends[0] < before else before)
        for call in queue.returned:
            if call.number >= before or (found is not None and call.number > found.number):
                break
            if call.note >= self.limit and call.function not in queue.aside:
                return call
        return found

    def count(self, queue: PassesQueue, before: int) -> None:
        """A scan passed over every call of *queue* with a number below *before* (`NEVER`: over all)."""
        ends = self._ends
        if ends:
            # Later arrivals were not passed over: no end lies beyond the present numbers.
            insort(ends, min(before, queue.next_number))
            del ends[0]
        for call in queue.returned:
            if call.number > before:  # with an equal number, it is before the call where the scan ended
                break
            call.note += 1

    def save(self) -> bytes:
        return msgspec.msgpack.encode(self._ends)

    def load(self, state: bytes) -> None:
        """Go on with the counts of an older one, perhaps with another limit."""
        ends = msgspec.msgpack.decode(state, type=list[int])
        self._ends = sorted([*[0] * self.limit, *ends])[-self.limit :] if self.limit else []
