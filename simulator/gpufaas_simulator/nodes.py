"""
The state of simulated nodes: devices, host memory, and revisions of functions with their true costs.

A device does one thing at a time: a load without a call occupies it like any load, and work that starts meanwhile
begins after it. CPU functions (slots) do not occupy a device; their calls wait only for their own load.
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
    """By call. None: service times as in the workload."""
    load: Callable[[FunctionId], float] | None = None
    """Returns the factor of the next load of a function. None: load times as in the costs."""


class HostMemory:
    """The weights in the host memory of a node, least recently loaded first. All operations are O(1) amortised."""

    __slots__ = ("free", "size", "staged")

    def __init__(self, size: Bytes) -> None:
        self.size = self.free = size
        self.staged: dict[FunctionId, Bytes] = {}

    def take(self, function: FunctionId, size: Bytes) -> bool:
        """Return whether the weights of *function* are there; then keep them, if they fit, as the most recent."""
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
        """When the work that it has been given is done."""
        self.ready_at: dict[CopyId, Seconds] = {}
        """When the load of each copy of a CPU function ends."""
        self.busy_s = 0.0
        """The time of loads and services, including the work that it has been given."""
        self.gone = False
        """The device left; its work never ends."""
        self.joined_at = now
        self.left_at: Seconds | None = None


class Revisions:
    """The current revision of each function, and the costs of all revisions."""

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
        """Start a new revision; return the old id, the new id, and the new function."""
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
        """:raises KeyError: *function* has no costs for devices of *kind*: the engine placed it wrongly"""
        key = (function, kind)
        found = self._costs.get(key)
        if found is None:
            found = self._known[function].cost(kind)
            if found is None:
                raise KeyError(key)
            self._costs[key] = found
        return found
