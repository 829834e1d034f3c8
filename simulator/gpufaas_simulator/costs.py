"""
The true cost model of a simulation: how long loads and grants take on simulated nodes. The engine has its own, which
starts from what is planned (`SimulatedFunction.planned`) and may learn.
"""

from __future__ import annotations

from collections.abc import Collection

from gpufaas_core.cost import Truth, truth
from gpufaas_core.model import ALL_COMPUTE, FunctionId, Seconds
from gpufaas_simulator.workload import SimulatedFunction


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
            found = self._truths[key] = truth(known.name, known.need, cost)
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
