"""
The true cost model of a simulation: how long loads and grants take on simulated nodes. The engine has its own, which
starts from what is planned (`SimulatedFunction.planned`) and may learn.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from gpufaas_core.cost import Cost, Truth, truth
from gpufaas_core.model import ALL_COMPUTE, FunctionId, Part, Seconds
from gpufaas_simulator.nodes import Noise, SimulatedDeviceState
from gpufaas_simulator.workload import SimulatedFunction


def mixes(function: SimulatedFunction) -> bool:
    """Return whether grants of *function* can slow others, or be slowed by others."""
    need = function.need
    return (
        need.held > 0
        or 0 < need.reserved < ALL_COMPUTE
        or (need.reserved > 0 and need.slots > 1)
        or need.sharing == "auto"
        or any(cost.uses is not None or cost.beside or cost.near for cost in function.costs.values())
    )


class Revisions:
    """The current revision of each function, and the true costs of all revisions."""

    def __init__(self, functions: Sequence[SimulatedFunction], *, plans: bool = False) -> None:
        """:param plans: there may be one: without any, a grant of an `auto` function has its device to itself"""
        self._plans = plans
        self.current = [FunctionId(each.name) for each in functions]
        """By the function's index in the workload."""
        self._count = [1] * len(functions)
        self._known = dict(zip(self.current, functions, strict=True))
        self._truths: dict[tuple[FunctionId, str], Truth] = {}

    def update(self, index: int, costs: Mapping[str, Cost] | None) -> tuple[FunctionId, FunctionId, SimulatedFunction]:
        """Start a new revision; return the old id, the new id, and the new function."""
        old = self.current[index]
        before = self._known[old]
        self._count[index] += 1
        new = self.current[index] = FunctionId(f"{before.name}@{self._count[index]}")
        after = self._known[new] = before if costs is None else replace(before, costs=costs, planned={})
        return old, new, after

    def of(self, function: FunctionId, kind: str) -> Truth:
        """:raises KeyError: *function* has no costs for devices of *kind*: the engine placed it wrongly"""
        key = (function, kind)
        found = self._truths.get(key)
        if found is None:
            known = self._known[function]
            cost = known.cost(kind)
            if cost is None:
                raise KeyError(key)
            found = truth(known.name, known.need, cost)
            if known.need.sharing == "auto" and not self._plans:
                found = replace(found, whole=known.need.reserved >= ALL_COMPUTE)
            self._truths[key] = found
        return found


@dataclass(slots=True)
class TrueTimes:
    """How long loads and grants take in one simulation: by their costs, the times of single calls, and noise."""

    revisions: Revisions
    given: array[float] | None
    """See `Workload.service_s`."""
    noise: Noise

    @property
    def as_costs(self) -> bool:
        """Calls take the service times of their functions."""
        return self.given is None and self.noise.service is None

    def loads(
        self, function: FunctionId, devices: tuple[SimulatedDeviceState, ...], parts: tuple[Part, ...], now: Seconds
    ) -> tuple[Seconds, bool]:
        """
        Return the time of a load, and whether its weights are in host memory. Each device loads its part of the
        weights; the longest of these loads counts.
        """
        if len(parts) == 1:
            load_s, staged = self._part_s(function, devices[0], now)
        else:
            whole = sum([each.memory for each in parts])
            loads = [
                (load_s * (part.memory / whole), here)
                for device, part in zip(devices, parts, strict=True)
                for load_s, here in [self._part_s(function, device, now)]
            ]
            load_s, staged = max([each for each, _ in loads]), all(here for _, here in loads)
        return load_s if self.noise.load is None else load_s * self.noise.load(function), staged

    def _part_s(self, function: FunctionId, device: SimulatedDeviceState, now: Seconds) -> tuple[Seconds, bool]:
        """Return the time of a load of all weights on *device*, and whether they are in the host memory there."""
        cost, host = self.revisions.of(function, device.kind).cost, device.host
        if host is not None and host.ask(function, cost, now):
            assert cost.host_load_s is not None
            return cost.host_load_s, True
        return cost.load_s, False

    def serves(
        self, calls: tuple[int, ...], function: FunctionId, truth: Truth, devices: tuple[SimulatedDeviceState, ...],
        cap: int,
    ) -> Seconds:  # fmt: skip
        """Return how long a grant takes alone: on the slowest of its devices, with the mean of its calls' own times."""
        given, factors = self.given, self.noise.service
        service_s = truth.service_s(len(calls), cap)
        for each in devices[1:]:
            service_s = max(service_s, self.revisions.of(function, each.kind).service_s(len(calls), cap))
        if given is not None:
            cost_s = truth.cost.service_s
            if len(calls) == 1:
                service_s = service_s if math.isnan(given[calls[0]]) else given[calls[0]] * truth.share_factor(cap)
            elif not all(math.isnan(given[call]) for call in calls):
                own_s = fmean([cost_s if math.isnan(given[call]) else given[call] for call in calls])
                service_s = own_s * (truth.batch_s(len(calls)) / cost_s if cost_s else 1.0) * truth.share_factor(cap)
        return service_s if factors is None else service_s * fmean([factors[call] for call in calls])
