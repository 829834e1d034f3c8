"""
The true cost model of a simulation: how long loads and grants take on simulated nodes. The engine has its own, which
starts from what is planned (`SimulatedFunction.planned`) and may learn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpufaas_core.cost import Cost, Truth, truth
from gpufaas_core.model import ALL_COMPUTE, FunctionId
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


class Revisions:
    """The current revision of each function, and the true costs of all revisions."""

    def __init__(self, functions: Sequence[SimulatedFunction]) -> None:
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
            found = self._truths[key] = truth(known.name, known.need, cost)
        return found
