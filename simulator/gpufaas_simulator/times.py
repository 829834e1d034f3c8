"""How long loads and grants truly take in one simulation: by the cost model, the times of single calls, and noise."""

from __future__ import annotations

import math
from statistics import fmean

from gpufaas_core.cost import Truth
from gpufaas_core.model import Bytes, FunctionId, Part, Seconds
from gpufaas_simulator.costs import CostModel
from gpufaas_simulator.nodes import Noise, SimulatedDeviceState
from gpufaas_simulator.workload import Workload


class TrueTimes:
    def __init__(self, costs: CostModel, workload: Workload, noise: Noise) -> None:
        self._costs = costs
        self.given = workload.service_s
        self.noise = noise

    @property
    def as_costs(self) -> bool:
        """Calls take the service times of their functions."""
        return self.given is None and self.noise.service is None

    def loads(
        self, function: FunctionId, devices: tuple[SimulatedDeviceState, ...], parts: tuple[Part, ...]
    ) -> Seconds:
        """Return the time of a load. Each device loads its part of the weights; the longest of these loads counts."""
        if len(parts) == 1:
            load_s = self._part_s(function, devices[0], None)
        else:
            whole = sum([each.memory for each in parts])
            load_s = max([
                self._part_s(function, device, part.memory) * (part.memory / whole)
                for device, part in zip(devices, parts, strict=True)
            ])  # fmt: skip
        return load_s if self.noise.load is None else load_s * self.noise.load(function)

    def _part_s(self, function: FunctionId, device: SimulatedDeviceState, size: Bytes | None) -> Seconds:
        """Return the time of a load on *device*, of all weights; it keeps *size* of them in host memory, or all."""
        cost, host = self._costs.of(function, device.kind).cost, device.host
        from_host = False
        if host is not None and cost.host_load_s is not None:
            from_host = host.take(function, cost.occupation if size is None else size)
        return self._costs.load_s(function, device.kind, from_host=from_host)

    def serves(
        self, calls: tuple[int, ...], function: FunctionId, truth: Truth, devices: tuple[SimulatedDeviceState, ...],
        cap: int,
    ) -> Seconds:  # fmt: skip
        """Return how long a grant takes alone: on the slowest of its devices, with the mean of its calls' own times."""
        given, factors = self.given, self.noise.service
        service_s = truth.service_s(len(calls), cap)
        for each in devices[1:]:
            service_s = max(service_s, self._costs.service_s(function, each.kind, len(calls), cap))
        if given is not None:
            cost_s = truth.cost.service_s
            if len(calls) == 1:
                service_s = service_s if math.isnan(given[calls[0]]) else given[calls[0]] * truth.share_factor(cap)
            elif not all(math.isnan(given[call]) for call in calls):
                own_s = fmean([cost_s if math.isnan(given[call]) else given[call] for call in calls])
                service_s = own_s * (truth.batch_s(len(calls)) / cost_s if cost_s else 1.0) * truth.share_factor(cap)
        return service_s if factors is None else service_s * fmean([factors[call] for call in calls])
