"""Which asynchronous calls to claim next, and how many of them have not ended."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gpufaas_async_calls.call import Phase
from gpufaas_async_calls.settings import AsyncSettings
from gpufaas_core.errors import Overloaded


class Wanted(NamedTuple):
    """Calls to be claimed."""

    phase: Phase
    function: str
    queue: str
    limit: int


@dataclass(eq=False)
class PhaseQueue:
    """The calls of one phase: when some of a function are due, and how many are being worked on."""

    phase: Phase
    settings: AsyncSettings
    queue_of: Callable[[str], str]
    busy_in: Counter[str] = field(default_factory=Counter)
    """By queue, of which a function's calls may be in two: it was updated."""
    due: dict[str, float] = field(default_factory=dict)
    """By function: when its next unclaimed call is due. The order is that of their turns."""
    _busy: Counter[str] = field(default_factory=Counter)

    def expect(self, function: str, at: float) -> None:
        self.due[function] = min(at, self.due.get(function, math.inf))

    def wanted(self, now: float) -> list[Wanted]:
        """Return what to claim: for each function that is due, as many calls as there is room for in its queue."""
        rooms: dict[str, tuple[int, int]] = {}
        wanted: list[Wanted] = []
        for function, due in self.due.items():
            if due > now:
                continue
            queue = self.queue_of(function)
            if queue not in rooms:
                at_once, per_function = self.settings.bounds(self.phase, queue)
                rooms[queue] = at_once - self.busy_in[queue], per_function
            room, per_function = rooms[queue]
            if (count := min(room, per_function - self._busy[function])) > 0:
                wanted.append(Wanted(self.phase, function, queue, count))
                rooms[queue] = room - count, per_function
        return wanted

    def claimed(self, function: str, queue: str, count: int, next_due: float | None) -> None:
        self.due.pop(function, None)
        if next_due is not None:
            self.due[function] = next_due  # at the end: the others come first next time
        if count:
            self._busy[function] += count
            self.busy_in[queue] += count

    def ended(self, function: str, queue: str) -> None:
        for busy, name in ((self._busy, function), (self.busy_in, queue)):
            busy[name] -= 1
            if not busy[name]:
                del busy[name]

    def next_due(self, now: float) -> float | None:
        """Return when the next call becomes due. What is due already waits for room, not for a time."""
        return min((due for due in self.due.values() if due > now), default=None)


@dataclass(eq=False)
class Backlog:
    """How many calls have not ended, and how many may be. Those being accepted count."""

    settings: AsyncSettings
    queue_of: Callable[[str], str]
    _open: Counter[str] = field(default_factory=Counter)
    _open_in: Counter[str] = field(default_factory=Counter)
    """The calls that have not ended, by queue; made anew by `recount`: functions may have gone over to another."""

    def reserve(self, function: str) -> None:
        """Take a place in the queue of *function*. :raises Overloaded: there is none"""
        settings = self.settings
        queue = self.queue_of(function)
        for count, limit, whose in (
            (self._open[function], settings.max_queue, f"the asynchronous queue of {function}"),
            (self._open_in[queue], settings.of_queue(queue).limit, f"the asynchronous queue {queue}"),
        ):
            if count >= limit:
                raise Overloaded(
                    f"{whose} is full: {limit} calls have not ended; send it again later", settings.retry_after_s
                )
        self.change(function, 1)
        self._open_in[queue] += 1

    def release(self, function: str) -> None:
        """A place in the queue is free again."""
        self.change(function, -1)
        self._open_in[self.queue_of(function)] -= 1

    def change(self, function: str, by: int) -> None:
        self._open[function] += by
        if not self._open[function]:
            del self._open[function]

    def recount(self) -> None:
        self._open_in = self.by_queue()

    def by_queue(self) -> Counter[str]:
        pending: Counter[str] = Counter()
        for function, count in self._open.items():
            pending[self.queue_of(function)] += count
        return pending

    def counts(self) -> dict[str, int]:
        """Return them by ``NAME.NAMESPACE``."""
        return dict(self._open)
