"""
The batches of one worker: the calls of a grant begin together once all of them are there.

Each call comes from its own gateway. A batch that is not complete begins without the calls that are late; these run by
themselves afterwards.
"""

from collections.abc import Callable
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.timers import Timers

LATE_S: Final[Seconds] = 0.25
"""A batch waits so long for the rest of its calls. They are on their way; only a gateway that died sends none."""


class _Gathering:
    """The calls of a grant until all are there."""

    __slots__ = ("expected", "there")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.there: list[Exchange] = []


class Batches:
    """
    See module.

    :param begin: called with the exchanges of a batch that can begin
    """

    def __init__(self, timers: Timers, begin: Callable[[list[Exchange]], None]) -> None:
        self._timers = timers
        self._begin = begin
        self._gathering: dict[int, _Gathering] = {}
        """The batches whose calls still come, by the number of the grant."""
        self._together: dict[Exchange, list[Exchange]] = {}
        """The calls that begin together with each call that waits for a slot."""

    def expect(self, number: int, calls: int) -> None:
        """Grant *number* was opened for so many calls."""
        self._gathering[number] = _Gathering(calls)

    def arrived(self, exchange: Exchange) -> None:
        """A call of a batch is there."""
        number = exchange.grant.number
        found = self._gathering.get(number)
        if found is None:
            self._begin([exchange])  # it is late
            return
        found.there.append(exchange)
        if len(found.there) >= found.expected:
            self._complete(number)
        elif len(found.there) == 1:
            self._timers.later(_timer(number), LATE_S, lambda: self._complete(number))

    def left(self, exchange: Exchange) -> None:
        """*exchange* has ended before it got a slot."""
        together = self._together.pop(exchange, None)
        if together is not None:
            together.remove(exchange)
        number = exchange.grant.number
        found = self._gathering.get(number)
        if found is None:
            return
        found.expected -= 1
        if exchange in found.there:
            found.there.remove(exchange)
        if len(found.there) >= found.expected:
            self._complete(number)

    def wait(self, exchanges: list[Exchange]) -> None:
        """Remember that *exchanges* begin together when a slot is free."""
        if len(exchanges) > 1:
            for each in exchanges:
                self._together[each] = exchanges

    def take(self, exchange: Exchange) -> list[Exchange] | None:
        """Return the calls that begin now with *exchange*, and itself; None: it begins alone."""
        together = self._together.get(exchange)
        if together is None:
            return None
        for each in together:
            del self._together[each]
        return together if len(together) > 1 else None

    def hand_over(self, to: "Batches") -> None:
        """The calls that wait for a slot are *to*'s from now on; those of a batch that is not complete stay."""
        to._together.update(self._together)
        self._together.clear()

    def hand_all_over(self, to: "Batches") -> None:
        """The calls of batches that are not complete begin without those that are late."""
        self.hand_over(to)
        for number in list(self._gathering):
            self._timers.cancel(_timer(number))
            if there := self._gathering.pop(number).there:
                to._begin(there)

    def clear(self) -> None:
        """The worker is gone."""
        self._gathering.clear()
        self._together.clear()

    def _complete(self, number: int) -> None:
        self._timers.cancel(_timer(number))
        found = self._gathering.pop(number)
        if found.there:
            self._begin(found.there)


def _timer(number: int) -> str:
    return f"batch {number}"
