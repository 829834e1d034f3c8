"""
What functions truly cost on devices whose time is modelled: simulated ones, and emulated ones of a live node.

Two things slow grants that run on one device at the same time. *Compute is shared*: if they use more together than the
device has, each runs at the same fraction of its speed, so that the device is used in full; `Cost.power` slows more.
*Neighbours* disturb (caches, memory bandwidth): the factors of `Cost.beside` multiply, and `Cost.near` slows by what
the neighbours use. `processor_sharing` applies all of it while grants run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from statistics import fmean
from typing import Final

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.model import ALL_COMPUTE, Need, RatioDoc

ANY: Final = "*"
"""Any other function, in `Cost.beside`."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of one function on one kind of device. Those after `wake_s` are of true costs only."""

    occupation: Bytes
    load_s: Seconds
    service_s: Seconds
    host_load_s: Seconds | None = None
    """Load time while the node has the weights in host memory. None: the node never keeps them there."""
    wake_s: Seconds | None = None
    """The time in which a parked copy wakes. None: see `wakes_in_s`."""
    uses: int | tuple[tuple[int, int], ...] | None = None
    """
    The compute that a grant really uses while it runs, in per cent; or that, by the calls of the grant. None: what the
    function needs.
    """
    batch: tuple[tuple[int, Seconds], ...] = ()
    """Service times of batches, by their calls. Empty: calls of a batch take their times one after another."""
    share: tuple[tuple[int, float], ...] = ()
    """Factors on the service time under a cap, by the cap in per cent. Empty: as much longer as compute is cut."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """Factors on the service time while a grant of a function of this name runs on the device; `ANY` for others."""
    near: float = 0.0
    """How much slower a grant is for each per cent of the device that its neighbours use, until it is used in full."""
    power: float = 1.0
    """The exponent of the slowdown where grants want more compute than there is. Above 1, sharing costs more time."""
    start_s: Seconds = 0.0
    """The time from a grant to the begin of its service on a loaded copy."""

    @property
    def wakes_in_s(self) -> Seconds | None:
        """
        `wake_s`, or half of `host_load_s`: a load from host memory makes a process and moves the weights, a wake moves
        them. None: its weights cannot be in host memory.
        """
        if self.host_load_s is None:
            return None
        return self.host_load_s / 2 if self.wake_s is None else self.wake_s


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of one revision on one kind of device."""

    name: str
    """The name of the function, the same for all its revisions."""
    cost: Cost
    whole: bool
    """A grant has the device to itself, and so has a load."""
    single: bool
    """A copy runs one grant at a time."""
    uses: int
    """The compute that a grant uses without a cap; where that depends on its calls, of one call: see `of`."""
    cap: int
    """The compute that a copy may use, in per cent, if the policy sets no limit."""

    def service_s(self, batch: int = 1, share: int = ALL_COMPUTE) -> Seconds:
        """Return how long a grant of *batch* calls takes alone under a cap of *share* per cent."""
        return self.batch_s(batch) * self.of(batch).share_factor(share)

    def of(self, batch: int) -> Truth:
        """Return what is true of a grant of *batch* calls."""
        table = self.cost.uses
        return replace(self, uses=_uses(table, batch)) if isinstance(table, tuple) else self

    def disturbed(self, neighbours: Collection[Truth]) -> float:
        """Return the factor by which *neighbours* slow a grant, beside the compute that they use."""
        beside = self.cost.beside
        if not beside:
            return 1.0
        others = beside.get(ANY, 1.0)
        return prod(beside.get(each.name, others) for each in neighbours)

    def batch_s(self, batch: int) -> Seconds:
        """Linear between the sizes that are given; beyond the largest, as many calls per second as with that."""
        cost = self.cost
        if batch == 1:
            return cost.service_s
        points = [(1, cost.service_s), *cost.batch]
        last, last_s = points[-1]
        return last_s * batch / last if batch > last else _between(points, batch)

    def share_factor(self, share: int) -> float:
        """Linear between the caps that are given; below the least, in inverse proportion."""
        points = self.cost.share
        if share >= ALL_COMPUTE:
            return 1.0
        if not points:
            return max(1.0, self.uses / share)
        least, factor = points[0]
        return factor * least / share if share < least else _between([*points, (ALL_COMPUTE, 1.0)], share)


def _between(points: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolate *points*, which are sorted and lie on both sides of *at*."""
    for (low, below), (high, above) in pairwise(points):
        if low <= at <= high:
            return below if at == low else below + (above - below) * (at - low) / (high - low)
    raise ValueError(f"{at} is not between {points[0][0]} and {points[-1][0]}")


def _uses(uses: int | tuple[tuple[int, int], ...], batch: int) -> int:
    """Linear between the sizes that are given; beyond them, as with the next one."""
    if isinstance(uses, int):
        return uses
    (least, low), (most, high) = uses[0], uses[-1]
    return low if batch <= least else high if batch >= most else round(_between(uses, batch))


def truth(name: str, need: Need, cost: Cost) -> Truth:
    """Return what is true of function *name*, with *need*, where it has *cost*."""
    uses = need.compute if cost.uses is None else _uses(cost.uses, 1)
    whole = need.reserved >= ALL_COMPUTE and need.sharing != "auto"
    return Truth(name, cost, whole, need.slots == 1, uses, need.held or ALL_COMPUTE)


_NEIGHBOURS: Final = 8
"""How many grants beside each other a profile of planned costs tells of; more count as so many."""
_CONDITIONS: Final = 64
"""How many conditions a profile has, about: of more sizes of batches, it has the planned ones and powers of two."""
_SURE: Final = 1 << 20
"""A planned ratio weighs as much as one that was seen in so many grants: without learning it stays."""


def ratios(planned: Truth, batch_max: int) -> tuple[RatioDoc, ...]:
    """
    Return what a profile says of *planned*: how times depend on calls, caps and neighbours, as far as the cost says.

    A profile knows the number of the neighbours, not who they are: they use what the function itself uses, and disturb
    as those of `Cost.beside` do on average.
    """
    cost = planned.cost
    sizes: Sequence[int] = range(1, batch_max + 1 if cost.batch else 2)
    caps = (0, *(cap for cap, _ in cost.share))
    beside = fmean(cost.beside.values()) if cost.beside else 1.0
    most = 1 if cost.uses is None and not cost.beside else _NEIGHBOURS
    if len(sizes) * len(caps) * most > _CONDITIONS:
        kept = {1, batch_max, *(size for size, _ in cost.batch), *(1 << each for each in range(batch_max.bit_length()))}
        sizes = sorted(kept.intersection(sizes))
    found = []
    for size, cap, others in product(sizes, caps, range(most)):
        if not cost.service_s or (size, cap, others) == (1, 0, 0):
            continue
        known = planned.of(size)
        uses = 0 if cost.uses is None else min(known.uses, cap or ALL_COMPUTE)
        slow = max(1.0, uses * (others + 1) / ALL_COMPUTE) * beside**others
        ratio = known.service_s(size, cap or ALL_COMPUTE) / cost.service_s * slow
        found.append(RatioDoc(size, cap, others, ratio, _SURE))
    return tuple(found)
