"""
The state of simulated nodes: devices, host memory, and running grants.

Functions that need a whole device occupy it: it does one thing at a time, a load without a call occupies it like any
load, and work that starts meanwhile begins after it. Calls of other functions wait only for their own load.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core import messages as m
from gpufaas_core.cost import Cost, Truth
from gpufaas_core.model import ALL_COMPUTE, Bytes, CallId, DeviceId, FunctionId, NodeId, Seconds, node_of
from gpufaas_simulator.workload import SimulatedDevice


@dataclass(frozen=True, slots=True)
class Noise:
    """Factors on true times: see `noise`."""

    service: array[float] | None = None
    """By call. None: service times as in the workload."""
    load: Callable[[FunctionId], float] | None = None
    """Returns the factor of the next load of a function. None: load times as in the costs."""


CopyKey: TypeAlias = tuple[FunctionId, int]
"""A copy: its function, and its number."""
Place: TypeAlias = tuple[DeviceId, FunctionId, int]
"""A copy on a device."""


class HostMemory:
    """
    The host tier of a node. What it keeps is decided as on a live node. A load from there copies the weights to the
    device, so it needs them no longer than it lasts. A parked copy has weights of its own there.
    """

    __slots__ = ("_coming", "_read_until", "node", "parks", "tier")

    def __init__(self, node: NodeId, size: Bytes, *, parks: bool = False) -> None:
        self.node = node
        """The name by which the engine knows it."""
        self.parks = parks
        self.tier: HostTier[FunctionId, Place] = HostTier(size)
        self._coming: set[FunctionId] = set()
        """What the engine asked for and is not read yet."""
        self._read_until: Seconds = 0.0
        """When all of it is: one after the other, beside loads."""

    def ask(self, function: FunctionId, cost: Cost, now: Seconds) -> bool:
        """Count that a load wants the weights of *function*. Return whether they are there."""
        if cost.host_load_s is None:
            return False
        self.tier.asked(function, now)
        return function in self.tier and function not in self._coming

    def keep(self, function: FunctionId, cost: Cost) -> list[m.Event]:
        """The weights of *function* were read: keep them, if they are worth it. Return what the engine is told."""
        if cost.host_load_s is None:
            return []
        self._coming.discard(function)
        size, new = cost.occupation, function not in self.tier
        facts = self._crowd_out(size) if new else []
        gone = self.tier.keep(function, size, cost.load_s - cost.host_load_s)
        if gone is None:
            return facts
        self._coming.difference_update(gone)
        facts += [m.Unstaged(self.node, each) for each in gone]
        return [*facts, m.Staged(self.node, function, size)] if new or gone else facts

    def bring(self, function: FunctionId, cost: Cost, now: Seconds) -> tuple[list[m.Event], Seconds]:
        """
        Make room for the weights of *function*, if they are worth it. Return what the engine is told at once, and when
        they are read; infinite: never.
        """
        saved_s = 0.0 if cost.host_load_s is None else cost.load_s - cost.host_load_s
        facts = [] if function in self.tier else self._crowd_out(cost.occupation)
        gone = None if function in self.tier else self.tier.keep(function, cost.occupation, saved_s)
        if gone is None:
            return [*facts, m.Unstaged(self.node, function, "other weights are worth more")], math.inf
        self._coming.difference_update(gone)
        self._coming.add(function)
        self._read_until = max(now, self._read_until) + saved_s
        return [*facts, *(m.Unstaged(self.node, each) for each in gone)], self._read_until

    def park(self, device: DeviceId, copy: CopyKey, size: Bytes) -> list[m.Event]:
        """Park a copy, which holds *size* bytes then, if there is room. Return what the engine is told at once."""
        if self.parks and self.tier.park((device, *copy), size):
            return []
        unparked: list[m.Event] = [m.Unparked(copy[0], device, copy[1], "there is no room for it")]
        return [*unparked, *self._crowd_out(size)]

    def unpark(self, device: DeviceId, copy: CopyKey) -> bool:
        """A copy wakes, or ends. Return whether it was parked."""
        place = device, *copy
        parked = place in self.tier.parked
        self.tier.unpark(place)
        return parked

    def leave(self, device: DeviceId) -> None:
        """The device is gone with its parked copies."""
        for place in [each for each in self.tier.parked if each[0] == device]:
            self.tier.unpark(place)

    def _crowd_out(self, size: Bytes) -> list[m.Event]:
        facts: list[m.Event] = []
        for place in self.tier.crowding(size):
            self.tier.unpark(place)
            device, function, copy = place
            facts.append(m.Unparked(function, device, copy, "its node needs the memory"))
        return facts

    def read(self, function: FunctionId, cost: Cost) -> list[m.Event]:
        """The weights of *function*, for which there is room, were read."""
        if function not in self._coming:
            return []  # they gave way meanwhile, or a load has read them
        self._coming.discard(function)
        return [m.Staged(self.node, function, cost.occupation)]


class SimulatedDeviceState:
    __slots__ = (
        "active", "busy_s", "compute", "demand", "device", "free_at", "host", "index", "itself", "joined_at",
        "kind", "known", "left_at", "ready_at", "running", "since", "used_s",
    )  # fmt: skip

    def __init__(self, device: SimulatedDevice, index: int, host: HostMemory | None, now: Seconds) -> None:
        self.device = device
        self.index = index
        self.kind = device.kind
        self.compute = device.compute
        self.host = host
        self.known = host is not None and device.node == node_of(device.id)
        """The engine can know what is in its host memory: its id says the node."""
        self.itself = (self,)
        self.free_at = 0.0
        """When the work that it has been given, of functions that need the whole device, is done."""
        self.ready_at: dict[CopyKey, Seconds] = {}
        """When the load of each copy ends that does not occupy the device."""
        self.busy_s = 0.0
        """The time of loads and services, including the work that it has been given."""
        self.joined_at = now
        self.left_at: Seconds | None = None
        # Where grants run beside each other:
        self.running: dict[Running, None] = {}
        """The grants that are served."""
        self.demand = 0
        """The compute that these would use at full speed, in per cent."""
        self.active = 0
        """Loads and grants under way."""
        self.since = now
        """When one of these two changed."""
        self.used_s = 0.0
        """Compute that was used, in seconds of the whole device."""

    def load(self, taken: int, now: Seconds) -> None:
        """From now on, what else runs on its node takes *taken* per cent of its compute."""
        self._count(now)
        self.compute = max(1, round(self.device.compute * (ALL_COMPUTE - taken) / ALL_COMPUTE))

    def enter(self, now: Seconds) -> None:
        """A load or a grant begins."""
        self._count(now)
        self.active += 1

    def leave(self, now: Seconds) -> None:
        self._count(now)
        self.active -= 1

    def demand_changed(self, demand: int, now: Seconds) -> None:
        self._count(now)
        self.demand = demand

    def _count(self, now: Seconds) -> None:
        if self.active:
            self.busy_s += now - self.since
        self.used_s += min(self.demand, self.compute) / ALL_COMPUTE * (now - self.since)
        self.since = now

    def close(self, now: Seconds) -> None:
        """Count the time until the end of the simulation, or until it leaves."""
        self._count(now)
        self.active = self.demand = 0


class Running(Struct, eq=False, gc=False):
    """A grant, from its start."""

    order: int
    """The place of its end among the events of one instant."""
    calls: tuple[CallId, ...]
    function: FunctionId
    copy: int
    place: DeviceId
    """The first of the devices."""
    devices: tuple[SimulatedDeviceState, ...]
    truth: Truth
    cap: int
    """The most of a device's compute that the copy may use, in per cent."""
    service_s: Seconds
    """At full speed; once it has ended, as it was."""
    begin: Seconds
    """When its service begins, at the earliest."""
    end: Seconds = 0.0
    version: int = 0
    """Grows with each change of its end. Entries of the calendar with another version do not count."""
    lost: bool = False
    since: Seconds = 0.0
    left_s: Seconds = 0.0
    """What was left at `since`, at full speed."""
    slow: float = 1.0
    """It takes so many times as long as at full speed."""

    @property
    def uses(self) -> int:
        return min(self.truth.uses, self.cap)
