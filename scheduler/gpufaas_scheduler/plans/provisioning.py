"""
What stands around a choice of hardware over time: the forecast, the patience before a switch, the batches of a split,
and how many containers are kept. Pure: each is told the time.

Source: PALDIA, IPDPS 2024 (forecast, hysteresis, batching, autoscaling).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from gpufaas_core._types import Seconds

HORIZON: Final[Seconds] = 4.0
"""How far ahead a plan looks: new hardware takes about as long."""
MISMATCHES: Final = 3
"""How often in a row another type must be preferred before a switch."""
KEEP_ALIVE: Final[Seconds] = 600.0

_T = TypeVar("_T")
_Groups = tuple[tuple[_T, ...], ...]


@dataclass(slots=True)
class Forecast:
    """Requests per second, by an exponentially weighted mean, with a trend if `beta` is above 0."""

    alpha: float = 0.3
    beta: float = 0.0
    rate: float | None = None
    """None before the first sample, which is taken as it is."""
    trend: float = 0.0

    def observe(self, rate: float) -> None:
        """Take in the *rate* of one interval."""
        if self.rate is None:
            self.rate = rate
            return
        before = self.rate
        self.rate = self.alpha * rate + (1 - self.alpha) * before
        self.trend = self.beta * (self.rate - before) + (1 - self.beta) * self.trend

    def ahead(self, horizon: Seconds = HORIZON) -> float:
        """Return the rate that is expected in *horizon*; 0 before the first sample."""
        return max(0.0, (self.rate or 0.0) + self.trend * horizon)


@dataclass(slots=True)
class Patience:
    """Lets a switch of hardware happen only when another type was preferred several times in a row."""

    current: str
    limit: int = MISMATCHES
    same_target: bool = False
    """Whether the preferred type must be the same one each time."""
    preferred: str | None = None
    mismatches: int = 0

    def prefers(self, choice: str) -> bool:
        """Take in one choice; return whether to switch to it now. The caller sets `current` when the switch is made."""
        if choice == self.current:
            self.preferred, self.mismatches = None, 0
            return False
        if self.same_target and choice != self.preferred:
            self.mismatches = 0
        self.preferred = choice
        self.mismatches += 1
        if self.mismatches < self.limit:
            return False
        self.mismatches = 0
        return True


def form_batches(waiting: Sequence[_T], y: int, batch: int) -> tuple[_Groups[_T], _Groups[_T]]:
    """
    Return the batches of *waiting*, oldest first: those that run at once, and those of the newest *y*, which wait for
    their turn.

    FormedBatches of one kind differ by at most one in size, and none is larger than *batch*.
    """
    first = len(waiting) - y
    return _even(waiting[:first], batch), _even(waiting[first:], batch)


def _even(requests: Sequence[_T], batch: int) -> _Groups[_T]:
    count = math.ceil(len(requests) / batch)
    if not count:
        return ()
    size, larger = divmod(len(requests), count)
    ends = itertools.accumulate((size + (index < larger) for index in range(count)), initial=0)
    return tuple(tuple(requests[start:end]) for start, end in itertools.pairwise(ends))


@dataclass(slots=True)
class Containers:
    """How many containers of a function a node keeps. One is stopped when it was surplus for `keep_alive`."""

    keep_alive: Seconds = KEEP_ALIVE
    least: int = 0
    most: int | None = None
    """By memory, or by how many processes the driver lets share a device."""
    _surplus_since: dict[str, Seconds] = field(default_factory=dict)

    def wanted(self, at_once: int, batch: int, queued: bool = False) -> int:
        """Return how many are wanted for *at_once* requests; those that wait use a container that is warm by then."""
        wanted = max(math.ceil(at_once / batch), int(queued), self.least)
        return wanted if self.most is None else min(wanted, self.most)

    def missing(self, alive: int, wanted: int, forecast: int = 0) -> int:
        """Return how many to start: for what is there, or for what is forecast."""
        return max(0, wanted - alive, forecast - alive)

    def to_stop(self, idle: Sequence[str], busy: int, wanted: int, forecast: int, now: Seconds) -> tuple[str, ...]:
        """
        Return which of *idle* to stop, the least recently used first (the order of *idle*). A busy one is never
        stopped.

        One that was needed in the meantime starts anew.
        """
        surplus = max(0, len(idle) + busy - max(wanted, forecast))
        over = idle[: min(surplus, len(idle))]
        self._surplus_since = {each: self._surplus_since.get(each, now) for each in over}
        ended = tuple(each for each in over if now - self._surplus_since[each] >= self.keep_alive)
        for each in ended:
            del self._surplus_since[each]
        return ended
