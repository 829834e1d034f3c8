"""
What is under way on the nodes, by time: loads, and grants that run beside each other.

Grants that begin or end change the speed, and so the end, of those beside them (`gpufaas_core.processor_sharing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heappush
from typing import Final, TypeAlias

from msgspec import Struct

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, FunctionId, Seconds
from gpufaas_core.processor_sharing import begin, demand_of, paced, recap
from gpufaas_simulator.nodes import Running, SimulatedDeviceState

_LAST: Final = 1 << 60
"""Above the orders of all grants and loads."""


class Loading(Struct, eq=False, gc=False):
    """A load, and the grant that waits for it, if there is one."""

    loaded: m.Loaded
    devices: tuple[SimulatedDeviceState, ...]
    running: Running | None = None
    lost: bool = False


class Later(Struct, eq=False):
    """Something to do then, unless one of the devices has left."""

    do: Callable[[], None]
    devices: tuple[SimulatedDeviceState, ...] = ()
    lost: bool = False


Work: TypeAlias = Running | Loading | Later


class Calendar:
    """A heap of (time, order, version, work). Orders follow the numbers of grants and loads, which are unique."""

    def __init__(self) -> None:
        self.entries: list[tuple[Seconds, int, int, Work]] = []
        self._orders = 0
        """The number of things that came after all grants and loads of their instant."""

    def push(self, time: Seconds, order: int, work: Work, version: int = 0) -> None:
        heappush(self.entries, (time, order, version, work))

    def last(self, time: Seconds, do: Callable[[], None], devices: tuple[SimulatedDeviceState, ...] = ()) -> None:
        """Call *do* at *time*, after what grants and loads do at that instant."""
        self._orders += 1
        heappush(self.entries, (time, _LAST + self._orders, 0, Later(do, devices)))

    def at(
        self, time: Seconds, now: Seconds, order: int, devices: tuple[SimulatedDeviceState, ...], do: Callable[[], None]
    ) -> None:
        """Call *do* at *time*: at once if that is *now*, or later if *devices* are still busy."""
        if time <= now:
            do()
        else:
            heappush(self.entries, (time, order, 0, Later(do, devices)))

    def lose(self, device: SimulatedDeviceState, now: Seconds) -> Iterator[Running]:
        """The device has left: strike out what is under way on it, and yield each grant that is lost."""
        for _, _, _, work in list(self.entries):
            running = work.running if type(work) is Loading else work
            if type(running) is Running and not running.lost and device in running.devices:
                running.lost = True
                self._leave(running, now)
                yield running
            work.lost = work.lost or device in work.devices

    def work(self) -> Counter[str]:
        """Return the number of grants and loads under way, by node."""
        return Counter(
            node
            for _, _, version, work in self.entries
            if not (work.lost or type(work) is Later or (type(work) is Running and version != work.version))
            for node in {each.device.node for each in work.devices}
        )

    def running(self, call: CallId) -> Running | None:
        """Return the grant of *call*; None: it has ended. O(work under way)."""
        for _, _, version, work in self.entries:
            running = work.running if type(work) is Loading else work
            if type(running) is Running and call in running.calls and (running is not work or version == work.version):
                return running
        return None

    def stop(self, running: Running, now: Seconds) -> bool:
        """End a grant early. Return whether it waits for its load, which goes on."""
        loads = False
        for _, _, _, work in self.entries:
            if type(work) is Loading and work.running is running:
                work.running = None
                loads = True
        begun = running.version > 0
        running.version += 1
        for device in running.devices:
            if running.truth.whole and device.free_at == running.end:
                device.free_at = max(now, running.begin)
        if begun:
            self._leave(running, now)
        return loads

    def cap(
        self, function: FunctionId, copy: int, devices: Iterable[SimulatedDeviceState], cap: int, now: Seconds
    ) -> None:
        """The copy may use so much compute from now on."""
        for device in devices:
            recap(device, function, copy, cap, now)
        self.pace(devices, now)

    # --- grants beside each other ---

    def serve(self, running: Running, now: Seconds) -> None:
        """The grant's copy is ready: its service begins."""
        running.begin = now
        running.version = 1
        begin(running, running.service_s, now)
        self.push(running.end, running.order, running, 1)
        for device in running.devices:
            device.running[running] = None
        self.pace(running.devices, now)

    def ended(self, running: Running, now: Seconds) -> None:
        if running.version > 1:
            running.service_s = now - running.begin
        self._leave(running, now)

    def _leave(self, running: Running, now: Seconds) -> None:
        if not running.version:  # it does not serve yet, or runs alone
            return
        for device in running.devices:
            device.running.pop(running, None)
        self.pace(running.devices, now)

    def pace(self, devices: Iterable[SimulatedDeviceState], now: Seconds) -> None:
        """Compute the speeds anew on *devices*, on which a grant began or ended, or which have another compute now."""
        for device in devices:
            device.demand_changed(demand_of(device.running), now)
        for device in devices:
            for each in paced(device, now):
                assert type(each) is Running
                each.version += 1
                self.push(each.end, each.order, each, each.version)
            for each in device.running:
                if each.truth.whole and each.truth.single:
                    device.free_at = each.end
