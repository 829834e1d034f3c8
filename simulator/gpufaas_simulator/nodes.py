"""
Simulated nodes: what a lease or a load takes, from true costs instead of processes.

A device does one thing after the other: a load without a call keeps it busy like any load, and what is started
meanwhile begins when that is over. CPU functions (slots) do not occupy a device; they only wait for their own load.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpufaas_core.model import Bytes, CopyId, FunctionId, Seconds
from gpufaas_simulator.workload import Cost, SimulatedDevice, SimulatedFunction


@dataclass(frozen=True, slots=True)
class Noise:
    """Factors on true times: see `noise`."""

    service: array[float] | None = None
    """By call; None: services take what the workload says."""
    load: Callable[[FunctionId], float] | None = None
    """Gives the factor of the next load of a function; None: loads take what the profile says."""


class HostMemory:
    """The weights that a node keeps in host memory, least recently loaded first. All operations are O(1) amortised."""

    __slots__ = ("free", "size", "staged")

    def __init__(self, size: Bytes) -> None:
        self.size = self.free = size
        self.staged: dict[FunctionId, Bytes] = {}

    def take(self, function: FunctionId, size: Bytes) -> bool:
        """Return whether *function* is staged; from now on it is, if it fits, and the most recent."""
        staged = self.staged
        if function in staged:
            staged[function] = staged.pop(function)
            return True
        if size <= self.size:
            while self.free < size:
                self.free += staged.pop(next(iter(staged)))
            staged[function] = size
            self.free -= size
        return False


class SimulatedDeviceState:
    __slots__ = ("busy_s", "free_at", "gone", "host", "index", "joined_at", "kind", "left_at", "ready_at")

    def __init__(self, device: SimulatedDevice, index: int, host: HostMemory | None, now: Seconds) -> None:
        self.index = index
        self.kind = device.kind
        self.host = host
        self.free_at = 0.0
        """When it has done all that it was told so far."""
        self.ready_at: dict[CopyId, Seconds] = {}
        """Of CPU functions: when their load is over."""
        self.busy_s = 0.0
        """How long it loads or serves, with what it was told already."""
        self.gone = False
        """It left: what was going on there comes to no end."""
        self.joined_at = now
        self.left_at: Seconds | None = None


class Revisions:
    """Which revision of each function is called now, and what each revision costs."""

    def __init__(self, functions: Sequence[SimulatedFunction]) -> None:
        self.current: list[FunctionId] = []
        """By the function's index in the workload."""
        self._known: dict[FunctionId, SimulatedFunction] = {}
        self._costs: dict[tuple[FunctionId, str], Cost] = {}
        self._count = [1] * len(functions)
        for each in functions:
            function = FunctionId(each.name)
            self.current.append(function)
            self._known[function] = each

    def update(self, index: int, costs: Mapping[str, Cost] | None) -> tuple[FunctionId, FunctionId, SimulatedFunction]:
        """Begin a new revision; return the old one, the new one, and what the new one is."""
        old = self.current[index]
        before = self._known[old]
        self._count[index] += 1
        new = FunctionId(f"{before.name}@{self._count[index]}")
        after = SimulatedFunction(
            before.name, costs or before.costs, before.namespace, before.slots, before.min_copies, before.max_queue,
            before.timeout_s,
        )  # fmt: skip
        self.current[index] = new
        self._known[new] = after
        return old, new, after

    def shared(self, function: FunctionId) -> bool:
        return self._known[function].slots is not None

    def cost(self, function: FunctionId, kind: str) -> Cost:
        """:raises KeyError: the engine placed it on a device that it has no costs for"""
        key = (function, kind)
        found = self._costs.get(key)
        if found is None:
            found = self._known[function].cost(kind)
            if found is None:
                raise KeyError(key)
            self._costs[key] = found
        return found
