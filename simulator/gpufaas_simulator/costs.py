"""
The true cost model of a simulation: how long loads and grants take on simulated nodes. The engine has its own, which
starts from what is planned (`SimulatedFunction.planned`) and may learn.

Two things slow grants that run on one device at the same time. *Compute is shared*: if they use more together than the
device has, each runs at the same fraction of its speed, so that the device is used in full. *Neighbours* disturb
(caches, memory bandwidth): the factors of `Cost.beside` multiply.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from gpufaas_core.model import ALL_COMPUTE, FunctionId, Seconds
from gpufaas_simulator.workload import ANY, Cost, SimulatedFunction


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of one revision on one kind of device."""

    name: str
    """Of the function, the same for all its revisions."""
    cost: Cost
    whole: bool
    """A grant has the device to itself, and so has a load."""
    single: bool
    """A copy runs one grant at a time."""
    uses: int
    """The compute that a grant uses without a cap."""
    cap: int
    """The compute that a copy may use, in per cent, if the policy sets no limit."""

    def service_s(self, batch: int = 1, share: int = ALL_COMPUTE, neighbours: Collection[Truth] = ()) -> Seconds:
        """
        Return how long a grant of *batch* calls takes under a cap of *share* per cent beside *neighbours*, if all run
        from its begin to its end on a device of full compute.
        """
        service_s = self.batch_s(batch) * self.share_factor(share)
        if not neighbours:
            return service_s
        used = min(self.uses, share) + sum(each.uses for each in neighbours)
        return service_s * max(1.0, used / ALL_COMPUTE) * self.disturbed(neighbours)

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


def truth(function: SimulatedFunction, cost: Cost) -> Truth:
    need = function.need
    uses = need.compute if cost.uses is None else cost.uses
    whole = need.reserved >= ALL_COMPUTE
    return Truth(function.name, cost, whole, need.slots == 1, uses, need.held or ALL_COMPUTE)


def mixes(function: SimulatedFunction) -> bool:
    """Return whether grants of *function* can slow others, or be slowed by others."""
    need = function.need
    return (
        need.held > 0
        or 0 < need.reserved < ALL_COMPUTE
        or (need.reserved > 0 and need.slots > 1)
        or need.sharing == "auto"
        or any(cost.uses is not None or cost.beside for cost in function.costs.values())
    )


class CostModel:
    """The true costs of all revisions."""

    def __init__(self) -> None:
        self._known: dict[FunctionId, SimulatedFunction] = {}
        self._truths: dict[tuple[FunctionId, str], Truth] = {}

    def add(self, revision: FunctionId, function: SimulatedFunction) -> None:
        self._known[revision] = function

    def function(self, revision: FunctionId) -> SimulatedFunction:
        return self._known[revision]

    def of(self, function: FunctionId, kind: str) -> Truth:
        """:raises KeyError: *function* has no costs for devices of *kind*: the engine placed it wrongly"""
        key = (function, kind)
        found = self._truths.get(key)
        if found is None:
            known = self._known[function]
            cost = known.cost(kind)
            if cost is None:
                raise KeyError(key)
            found = self._truths[key] = truth(known, cost)
        return found

    def service_s(
        self, function: FunctionId, kind: str, batch: int = 1, share: int = ALL_COMPUTE,
        neighbours: Collection[FunctionId] = (),
    ) -> Seconds:  # fmt: skip
        """Return how long *batch* calls take together: see `Truth.service_s`."""
        return self.of(function, kind).service_s(batch, share, [self.of(each, kind) for each in neighbours])

    def load_s(self, function: FunctionId, kind: str, *, from_host: bool = False) -> Seconds:
        cost = self.of(function, kind).cost
        return cost.load_s if cost.host_load_s is None or not from_host else cost.host_load_s
