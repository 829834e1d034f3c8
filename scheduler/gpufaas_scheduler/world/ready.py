"""Which copy of a direct function takes the next call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from gpufaas_cache_manager.residency import Copy

_Copy: TypeAlias = "Copy[Any]"


class ReadyCopies:
    """
    The loaded copies of a direct function that take calls, by the number of calls that they run. The next call goes to
    a copy with the fewest; of these, to the one that has had so few for longest. O(1), but `first` is O(slots).
    """

    __slots__ = ("_fewest", "_running")

    def __init__(self, copies: Iterable[_Copy]) -> None:
        self._running: list[dict[_Copy, None]] = []
        """By the number of running calls: the copies, in the order in which they reached that number."""
        self._fewest = 0
        """A lower bound of the running calls of a copy."""
        for copy in copies:
            self.add(copy)

    def __iter__(self) -> Iterator[_Copy]:
        """Yield the copies in the order in which they take calls."""
        return (copy for row in self._running for copy in row)

    def add(self, copy: _Copy) -> None:
        running = copy.running
        while len(self._running) <= running:
            self._running.append({})
        self._running[running][copy] = None
        if running < self._fewest:
            self._fewest = running

    def discard(self, copy: _Copy) -> None:
        if copy.running < len(self._running):
            self._running[copy.running].pop(copy, None)

    def moved(self, copy: _Copy, before: int) -> None:
        """*copy* ran *before* calls until now. No effect if it is not listed."""
        if before < len(self._running) and copy in (row := self._running[before]):
            del row[copy]
            self.add(copy)

    def first(self, slots: int) -> _Copy | None:
        """Return the copy for the next call; None: all run *slots* calls."""
        rows = self._running
        fewest, end = self._fewest, min(slots, len(rows))
        while fewest < end:
            if row := rows[fewest]:
                self._fewest = fewest
                return next(iter(row))
            fewest += 1
        self._fewest = fewest
        return None
