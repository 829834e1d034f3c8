"""
The calls of one worker that no slot has yet: those of a batch come together here, and wait in line with all others.

Each call of a batch comes from its own gateway. A batch that is not complete goes on without the calls that are late;
these run by themselves afterwards.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.timers import Timers

LATE_S: Final[Seconds] = 0.25
"""A batch waits so long for the rest of its calls. They are on their way; only a gateway that died sends none."""
Group = list[Exchange]
"""Calls that begin together: one, or a batch."""


class WaitingRoom:
    """
    See module.

    :param complete: called with the calls of a batch that has come together
    """

    def __init__(self, timers: Timers, complete: Callable[[Group], None]) -> None:
        self.line: deque[Group] = deque()
        """They wait until the worker is ready, or a slot is free."""
        self._timers = timers
        self._on_complete = complete
        self._gathering: dict[int, Group] = {}
        """What has come of batches whose calls still come, by the number of the grant."""
        self._missing: dict[int, int] = {}
        """How many of them still come."""

    def __iter__(self) -> Iterator[Exchange]:
        """Yield the calls in line."""
        return (each for group in self.line for each in group)

    def expect(self, number: int, calls: int) -> None:
        """Grant *number* was opened for so many calls."""
        self._gathering[number], self._missing[number] = [], calls

    def come(self, exchange: Exchange) -> None:
        """A call of a batch is there."""
        number = exchange.grant.number
        there = self._gathering.get(number)
        if there is None:
            self._on_complete([exchange])  # it is late
            return
        there.append(exchange)
        self._missing[number] -= 1
        if not self._missing[number]:
            self._complete(number)
        elif len(there) == 1:
            self._timers.later(_timer(number), LATE_S, lambda: self._complete(number))

    def leave(self, exchange: Exchange) -> None:
        """*exchange* has ended before it got a slot."""
        for group in self.line:
            if exchange in group:
                group.remove(exchange)
                if not group:
                    self.line.remove(group)
                break
        number = exchange.grant.number
        there = self._gathering.get(number)
        if there is None:
            return
        if exchange in there:
            there.remove(exchange)
        else:
            self._missing[number] -= 1
        if not self._missing[number]:
            self._complete(number)

    def take(self, exchange: Exchange) -> Group:
        """Take *exchange* out of the line, with those that begin together with it. Empty: it is not there."""
        for group in self.line:
            if exchange in group:
                self.line.remove(group)
                return group
        return []

    def hand_over(self, to: "WaitingRoom") -> None:
        """The calls in line are *to*'s from now on; those of a batch that is not complete stay."""
        to.line.extend(self.line)
        self.line.clear()

    def hand_all_over(self, to: "WaitingRoom") -> None:
        """The calls of batches that are not complete begin without those that are late."""
        self.hand_over(to)
        for number in list(self._gathering):
            self._complete(number, to)

    def clear(self) -> None:
        """The worker is gone."""
        self.line.clear()
        self._gathering.clear()
        self._missing.clear()

    def _complete(self, number: int, to: "WaitingRoom | None" = None) -> None:
        self._timers.cancel(_timer(number))
        del self._missing[number]
        if there := self._gathering.pop(number):
            (to or self)._on_complete(there)


def _timer(number: int) -> str:
    return f"batch {number}"
