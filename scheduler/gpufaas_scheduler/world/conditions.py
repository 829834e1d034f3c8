"""
How the service time of a grant depends on how it runs: on the number of its calls, on the share of the compute that its
copy holds, and on the grants that run beside it.

The time alone (one call, all of the compute, no neighbour) is that of `costs.Costs`. Other conditions are kept as
ratios to it, so that they follow it when it drifts. A condition that was not seen yet counts as the nearest one seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from gpufaas_core.model import RatioDoc

_MOST: Final = 64
"""Conditions that are kept for a function on a kind of device; the one that was seen least goes."""
_LARGEST: Final = 1e6
"""Above this, a ratio is taken for an error."""


class Condition(NamedTuple):
    """How a grant runs."""

    batch: int = 1
    """The number of its calls."""
    share: int = 0
    """What its copy holds of the compute, in per cent; 0: it is not capped."""
    neighbours: int = 0
    """The most grants that ran on the device beside it, those of its own copy included."""


ALONE: Final = Condition()


class Conditions:
    """The ratios of a function on one kind of device."""

    __slots__ = ("_seen",)

    def __init__(self, docs: Iterable[RatioDoc] = ()) -> None:
        self._seen: dict[Condition, tuple[float, int]] = {
            Condition(each.batch, each.share, each.neighbours): (each.ratio, each.grants)
            for each in docs
            if 0.0 < each.ratio <= _LARGEST and each.grants > 0 and (each.batch, each.share, each.neighbours) != ALONE
        }
        """Ratio and number of grants."""

    def add(self, condition: Condition, ratio: float, rate: float) -> None:
        """A grant took *ratio* times as long as one alone. :param rate: its weight, once there are enough"""
        if not 0.0 < ratio <= _LARGEST:
            return
        before, grants = self._seen.pop(condition, (ratio, 0))
        weight = max(rate, 1.0 / (grants + 1))
        self._seen[condition] = (before + weight * (ratio - before), grants + 1)
        if len(self._seen) > _MOST:
            del self._seen[min(self._seen, key=lambda each: self._seen[each][1])]

    def ratio(self, condition: Condition) -> float:
        """Return the expected time of a grant in that condition, in units of one alone. O(conditions seen)."""
        if condition in self._seen:
            return self._seen[condition][0]
        if condition == ALONE or not self._seen:
            return 1.0
        nearest = min([ALONE, *self._seen], key=lambda each: (_distance(each, condition), each))
        return 1.0 if nearest == ALONE else self._seen[nearest][0]

    def docs(self) -> tuple[RatioDoc, ...]:
        return tuple(RatioDoc(*condition, ratio, grants) for condition, (ratio, grants) in self._seen.items())


def _distance(one: Condition, other: Condition) -> tuple[int, int, int]:
    """Compare conditions: the batch weighs most, then the neighbours, then the share."""
    share = abs((one.share or 100) - (other.share or 100))
    return abs(one.batch - other.batch), abs(one.neighbours - other.neighbours), share
