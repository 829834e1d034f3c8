"""
What functions truly cost on devices whose time is modelled: simulated ones, and emulated ones of a live node.

Two things slow grants that run on one device at the same time. *Compute is shared*: if they use more together than the
device has, each runs at the same fraction of its speed, so that the device is used in full. *Neighbours* disturb
(caches, memory bandwidth): the factors of `Cost.beside` multiply. `processor_sharing` applies both while grants run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Final

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.model import ALL_COMPUTE, Need

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
    uses: int | None = None
    """The compute that a grant really uses while it runs, in per cent. None: what the function needs."""
    batch: tuple[tuple[int, Seconds], ...] = ()
    """Service times of batches, by their calls. Empty: calls of a batch take their times one after another."""
    share: tuple[tuple[int, float], ...] = ()
    """Factors on the service time under a cap, by the cap in per cent. Empty: as much longer as compute is cut."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """Factors on the service time while a grant of a function of this name runs on the device; `ANY` for others."""

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
    """The compute that a grant uses without a cap."""
    cap: int
    """The compute that a copy may use, in per cent, if the policy sets no limit."""

    def service_s(self, batch: int = 1, share: int = ALL_COMPUTE) -> Seconds:
        """Return how long a grant of *batch* calls takes alone under a cap of *share* per cent."""
        return self.batch_s(batch) * self.share_factor(share)

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


def truth(name: str, need: Need, cost: Cost) -> Truth:
    """Return what is true of function *name*, with *need*, where it has *cost*."""
    uses = need.compute if cost.uses is None else cost.uses
    whole = need.reserved >= ALL_COMPUTE
    return Truth(name, cost, whole, need.slots == 1, uses, need.held or ALL_COMPUTE)
