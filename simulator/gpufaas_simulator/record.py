"""What came of a simulation, or of a replay, or what a journal recorded: the outcome of each call."""

from __future__ import annotations

import math
from array import array
from typing import Final

from gpufaas_core.explanation import Explanation
from gpufaas_core.model import CopyId, DeviceId, FunctionId, Seconds, copy_of
from gpufaas_simulator.fleet import NodeStay
from gpufaas_simulator.nodes import SimulatedDeviceState
from gpufaas_simulator.workload import SimulatedDevice, Workload

PENDING: Final = 0
"""The call waits or runs, or did so when the simulation ended."""
COMPLETED: Final = 1
FAILED: Final = 2
"""Its device left while the call ran."""
REJECTED: Final = 3

HIT: Final = 1
MISS: Final = 2
FALSE_MISS: Final = 3
"""Another device held the model when this device started to load it."""


class Record:
    """
    The outcome of each call, by its index in the workload, and of each device. Times are in seconds. What is counted is
    said where `Report` has a field of that name.
    """

    def __init__(self, workload: Workload) -> None:
        calls = len(workload)
        self.workload = workload
        self.started = array("d", [math.nan]) * calls
        self.ended = array("d", [math.nan]) * calls
        self.service_s = array("d", [0.0]) * calls
        """The time of the inference alone."""
        # Parts of the latency of single calls, where they are not 0: see `report.Segments`.
        self.held_s: dict[int, Seconds] = {}
        self.awaited_s: dict[int, Seconds] = {}
        """How long a hit waited for a load that was under way when it came."""
        self.slowed_s: dict[int, Seconds] = {}
        self.device = array("i", [-1]) * calls
        """Index into `devices`."""
        self.outcome = bytearray(calls)
        self.start = bytearray(calls)
        """How each call started: 0, `HIT`, `MISS` or `FALSE_MISS`."""
        self.starts = array("i")
        """Calls in the order in which they were started."""
        self.devices: list[tuple[SimulatedDevice, SimulatedDeviceState]] = []
        """In the order in which they joined. A device that left and came back has two entries."""
        self.prefetches = self.host_loads = self.wakes = self.staged = self.evictions = self.preempted = 0
        self.hottest_copy_s = 0.0
        """For how many device-seconds the most called function was resident."""
        self.explanation: Explanation | None = None
        """The explanation of the call that `simulate` was asked to explain. None: none, or it was never placed."""
        self.end_s = 0.0
        """The time of the last event."""
        self.mixed = False
        """Grants ran beside each other; devices have counted the compute that they used."""
        self.nodes: list[NodeStay] = []
        """The nodes that have a price, or were procured."""
        self.rejections: dict[str, int] = {}
        """The number of rejected calls, by code."""
        self.holders: dict[FunctionId, dict[int, tuple[DeviceId, int]]] = {}
        """
        The current copies of each function by number, from the start of their loads: the device, and the least number
        that was free among its copies there. Logs name a copy with the latter.
        """
        self._ordinals: dict[tuple[FunctionId, DeviceId], set[int]] = {}
        hottest = workload.hottest
        self._hottest = None if hottest is None else FunctionId(workload.functions[hottest].name)
        self._hottest_since: Seconds = 0.0

    def reject(self, call: int, code: str) -> None:
        self.outcome[call] = REJECTED
        self.rejections[code] = self.rejections.get(code, 0) + 1

    def hold(
        self, function: FunctionId, device: DeviceId, copy: int, victims: tuple[CopyId, ...], now: Seconds
    ) -> tuple[str, ...]:
        """
        Count a copy whose load begins now, and the eviction of *victims* for it. Return the names of these in logs: of
        the first copy on a device, the function; ``#1`` follows for the next, and so on.
        """
        names = tuple([self.release(*copy_of(victim), now) for victim in victims]) if victims else ()
        self.evictions += len(victims)
        if function == self._hottest:
            self._count_copies(now)
        holders = self.holders.setdefault(function, {})
        there = self._ordinals.setdefault((function, device), set())
        ordinal = 0
        while ordinal in there:
            ordinal += 1
        there.add(ordinal)
        holders[copy] = (device, ordinal)
        return names

    def release(self, function: FunctionId, copy: int, now: Seconds) -> str:
        """Count the copy as gone, if it was there. Return its name in logs."""
        if function == self._hottest:
            self._count_copies(now)
        held = self.holders.get(function, {}).pop(copy, None)
        if held is None:
            return function
        device, ordinal = held
        self._ordinals[function, device].remove(ordinal)
        return f"{function}#{ordinal}" if ordinal else function

    def release_all(self, device: DeviceId, now: Seconds) -> None:
        for function, holders in self.holders.items():
            for copy, (on, _) in list(holders.items()):
                if on == device:
                    self.release(function, copy, now)

    def replaced(self, old: FunctionId, new: FunctionId, now: Seconds) -> None:
        """Note that later calls are of the revision *new*."""
        if old == self._hottest:
            self._count_copies(now)
            self._hottest = new

    def close(self, now: Seconds) -> None:
        self._count_copies(now)
        self.end_s = now

    def _count_copies(self, now: Seconds) -> None:
        """Add up the time of the copies so far. Call it before their number changes, and at the end."""
        if self._hottest is not None:
            self.hottest_copy_s += len(self.holders.get(self._hottest, ())) * (now - self._hottest_since)
        self._hottest_since = now
