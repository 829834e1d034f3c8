"""How long loads and grants truly take in one simulation: by the cost model, the times of single calls, and noise."""

from __future__ import annotations

import math
from statistics import fmean

from gpufaas_core.cost import Truth
from gpufaas_core.model import FunctionId, Part, Seconds
from gpufaas_simulator.costs import Revisions
from gpufaas_simulator.nodes import Noise, SimulatedDeviceState
from gpufaas_simulator.workload import Workload


class TrueTimes:
    def __init__(self, revisions: Revisions, workload: Workload, noise: Noise) -> None:
        self._revisions = revisions
        self.given = workload.service_s
        self.noise = noise

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
        cost, host = self._revisions.of(function, device.kind).cost, device.host
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
            service_s = max(service_s, self._revisions.of(function, each.kind).service_s(len(calls), cap))
        if given is not None:
            cost_s = truth.cost.service_s
            if len(calls) == 1:
                service_s = service_s if math.isnan(given[calls[0]]) else given[calls[0]] * truth.share_factor(cap)
            elif not all(math.isnan(given[call]) for call in calls):
                own_s = fmean([cost_s if math.isnan(given[call]) else given[call] for call in calls])
                service_s = own_s * (truth.batch_s(len(calls)) / cost_s if cost_s else 1.0) * truth.share_factor(cap)
        return service_s if factors is None else service_s * fmean([factors[call] for call in calls])
