"""
A shell of the engine with simulated time: a calendar gives events to the engine, and its commands become later events.

The calendar has three sorted sources: work in progress (a heap), changes of the cluster, and arrivals. Events of one
instant come in this order; events of work in progress come in the order in which the work started, the others in the
order of the workload. The engine handles one event at a time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, Protocol

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, CopyId, DeviceId, Explanation, FunctionId, Seconds, copy_id
from gpufaas_scheduler.engine import Engine
from gpufaas_simulator.nodes import HostMemory, Noise, Revisions, SimulatedDeviceState
from gpufaas_simulator.workload import (
    Change,
    Cost,
    DeviceJoins,
    DeviceLeaves,
    FunctionScaled,
    FunctionUpdated,
    NodeLeaves,
    SimulatedDevice,
    Workload,
)

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

_PROGRESS_EVERY: Final = 5_000


class Observer(Protocol):
    """Gets what the nodes do, in order of time. Functions have the names of their revisions: ``f``, ``f@2``."""

    def started(
        self, t: Seconds, call: int, function: str, device: str, hit: bool, victims: tuple[str, ...], local: bool
    ) -> None: ...

    def loading(self, t: Seconds, function: str, device: str, victims: tuple[str, ...]) -> None:
        """A load without a call."""

    def evicted(self, t: Seconds, function: str, device: str) -> None:
        """An eviction that is not for a load: a revision was removed, or there was one copy too many."""

    def left(self, t: Seconds, device: str) -> None: ...


class Record:
    """The outcome of each call, by its index in the workload, and of each device. Times are in seconds."""

    def __init__(self, workload: Workload) -> None:
        calls = len(workload)
        self.workload = workload
        self.started = array("d", [math.nan]) * calls
        self.ended = array("d", [math.nan]) * calls
        self.service_s = array("d", [0.0]) * calls
        """Inference alone."""
        self.device = array("i", [-1]) * calls
        """Index into `devices`."""
        self.outcome = bytearray(calls)
        self.start = bytearray(calls)
        """0, `HIT`, `MISS` or `FALSE_MISS`."""
        self.starts = array("i")
        """Calls in the order in which they were started."""
        self.devices: list[tuple[SimulatedDevice, SimulatedDeviceState]] = []
        """In the order in which they joined. A device that left and came back has two entries."""
        self.prefetches = 0
        """Loads without a call."""
        self.evictions = 0
        self.hottest_copy_s = 0.0
        """For how many device-seconds the most called function was resident."""
        self.explanation: Explanation | None = None
        """Of the call that `simulate` was asked to explain. None: none, or it was never placed."""
        self.end_s = 0.0
        """The time of the last event."""
        self.rejections: dict[str, int] = {}
        """By code."""
        self.holders: dict[FunctionId, dict[int, tuple[DeviceId, int]]] = {}
        """
        The current copies of each function by number, from the start of their loads: the device, and the least number
        that was free among its copies there. Logs name a copy with the latter.
        """
        self._ordinals: dict[tuple[FunctionId, DeviceId], set[int]] = {}
        hottest = workload.hottest
        self._hottest = None if hottest is None else FunctionId(workload.functions[hottest].name)
        self._hottest_since: Seconds = 0.0

    def hold(
        self, function: FunctionId, device: DeviceId, copy: int, victims: tuple[CopyId, ...], now: Seconds
    ) -> tuple[str, ...]:
        """
        Count a copy whose load begins now, and the eviction of *victims* for it. Return the names of these in logs: of
        the first copy on a device, the function; ``#1`` follows for the next, and so on.
        """
        names = tuple([self.release(*_copy(victim), now) for victim in victims]) if victims else ()
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


def _copy(victim: CopyId) -> tuple[FunctionId, int]:
    """Return function and number of the copy *victim*: the inverse of `copy_id`."""
    function, _, copy = victim.rpartition("#")
    return FunctionId(function), int(copy)


class Simulation:
    """
    One run of *workload* through *engine*, which must be new.

    `noise` multiplies load and service times; the engine knows neither the factors nor `Workload.service_s`. `progress`
    gets the number of ended calls from time to time.
    """

    def __init__(
        self,
        workload: Workload,
        engine: Engine,
        *,
        noise: Noise | None = None,
        observer: Observer | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.workload = workload
        self.engine = engine
        self.now: Seconds = 0.0
        self.record = Record(workload)
        self._noise = noise or Noise()
        self._observer = observer
        self._progress = progress
        self._revisions = Revisions(workload.functions)
        self._index = {each.name: index for index, each in enumerate(workload.functions)}
        self._devices: dict[DeviceId, SimulatedDeviceState] = {}
        self._node_of: dict[DeviceId, str] = {}
        self._hosts: dict[str, HostMemory] = {}
        self._under_way: list[tuple[Seconds, int, SimulatedDeviceState, m.Event | Callable[[], None]]] = []
        self._ended = 0

    def run(self) -> Record:
        """Run to the end of all work. Exceptions of the engine and its policy are passed on."""
        handle = self.engine.handle
        for known, revision in zip(self.workload.functions, self._revisions.current, strict=True):
            self._obey(handle(m.FunctionDeployed(known.known_as(revision)), 0.0))
        for each in self.workload.devices:
            self._join(each)
        under_way, engine, obey = self._under_way, self.engine, self._obey
        times, calls, current = self.workload.times, self.workload.calls, self._revisions.current
        timeouts = [each.timeout_s for each in self.workload.functions]
        changes, change = self.workload.changes, 0
        arrivals, arrival = len(times), 0
        arrives = times[0] if arrivals else math.inf
        changes_at = changes[0].at_s if changes else math.inf
        told = _PROGRESS_EVERY
        while True:
            first = under_way[0][0] if under_way else math.inf
            wake_at = engine.wake_at
            if wake_at is not None and wake_at < first and wake_at < arrives and wake_at < changes_at:
                self.now = max(self.now, wake_at)
                obey(handle(m.Woken(), self.now))
            elif first <= arrives and first <= changes_at:
                if first == math.inf:
                    break
                self.now, _, device, event = heappop(under_way)
                if device.gone:
                    continue
                if isinstance(event, m.Finished):
                    call = int(event.call)
                    self.record.ended[call] = self.now
                    self.record.outcome[call] = COMPLETED
                    self._ended += 1
                    obey(handle(event, self.now))
                elif isinstance(event, m.Loaded):
                    obey(handle(event, self.now))
                else:
                    assert callable(event)
                    event()
            elif changes_at <= arrives:
                self.now = changes_at
                self._change(changes[change])
                change += 1
                changes_at = changes[change].at_s if change < len(changes) else math.inf
            else:
                self.now = arrives
                function = calls[arrival]
                timeout_s = timeouts[function]
                deadline = None if timeout_s is None else arrives + timeout_s
                commands = handle(m.Arrived(CallId(str(arrival)), current[function], deadline), arrives)
                if commands:
                    obey(commands)
                arrival += 1
                arrives = times[arrival] if arrival < arrivals else math.inf
            if self._ended >= told and self._progress is not None:
                self._progress(self._ended)
                told = self._ended + _PROGRESS_EVERY
        self.record.close(self.now)
        if self._progress is not None:
            self._progress(arrivals)
        return self.record

    # --- commands -----------------------------------------------------------------------------------------------------

    def _obey(self, commands: list[m.Command]) -> None:
        for command in commands:
            kind = type(command)
            if kind is m.StartCall:
                self._start(command.grant)  # type: ignore[union-attr]
            elif isinstance(command, m.LoadCopy):
                self._load(command)
            elif isinstance(command, m.Evict):
                self._evict(command)
            elif isinstance(command, m.Reject):
                self._reject(command)
            # The engine sends no other commands here: no caller leaves, and no memory is measured.

    def _start(self, grant: m.Grant) -> None:
        record, now = self.record, self.now
        device = self._devices[grant.device]
        function = grant.function
        call = int(grant.call)
        cost = self._revisions.cost(function, device.kind)
        shared = self._revisions.shared(function)
        if shared:
            begin = now if grant.cold else max(now, device.ready_at.get(copy_id(function, grant.copy), now))
        else:
            begin = device.free_at if device.free_at > now else now
        number = grant.number * 3
        ready = begin
        victims: tuple[str, ...] = ()
        if grant.cold:
            record.start[call] = FALSE_MISS if record.holders.get(function) else MISS
            victims = record.hold(function, grant.device, grant.copy, grant.victims, now)
            ready = begin + self._loads(function, device, cost)
            if shared:
                device.ready_at[copy_id(function, grant.copy)] = ready
            loaded = m.Loaded(function, grant.device, ready - begin, 0, grant.copy)
            heappush(self._under_way, (ready, number + 1, device, loaded))
        else:
            record.start[call] = HIT
        service_s = self._serves(call, cost)
        end = ready + service_s
        if not shared:
            device.free_at = end
            device.busy_s += end - begin
        record.started[call] = begin
        record.service_s[call] = service_s
        record.device[call] = device.index
        record.starts.append(call)
        heappush(self._under_way, (end, number + 2, device, m.Finished(grant.call, grant.device, service_s)))
        observer = self._observer
        if observer is None:
            return

        def tell() -> None:
            observer.started(begin, call, function, grant.device, not grant.cold, victims, grant.local)

        self._at(begin, number, device, tell)

    def _load(self, command: m.LoadCopy) -> None:
        device = self._devices[command.device]
        function = command.function
        cost = self._revisions.cost(function, device.kind)
        shared = self._revisions.shared(function)
        begin = self.now if shared or device.free_at <= self.now else device.free_at
        victims = self.record.hold(function, command.device, command.copy, command.victims, self.now)
        ready = begin + self._loads(function, device, cost)
        if shared:
            device.ready_at[copy_id(function, command.copy)] = ready
        else:
            device.free_at = ready
            device.busy_s += ready - begin
        self.record.prefetches += 1
        number = command.number * 3
        loaded = m.Loaded(function, command.device, ready - begin, 0, command.copy)
        heappush(self._under_way, (ready, number + 1, device, loaded))
        observer = self._observer
        if observer is not None:
            self._at(begin, number, device, lambda: observer.loading(begin, function, command.device, victims))

    def _at(self, time: Seconds, number: int, device: SimulatedDeviceState, tell: Callable[[], None]) -> None:
        """Call *tell* at *time*: now, or later if the device is still busy."""
        if time <= self.now:
            tell()
        else:
            heappush(self._under_way, (time, number, device, tell))

    def _loads(self, function: FunctionId, device: SimulatedDeviceState, cost: Cost) -> Seconds:
        load_s = cost.load_s
        if cost.host_load_s is not None and device.host is not None and device.host.take(function, cost.occupation):
            load_s = cost.host_load_s
        return load_s if self._noise.load is None else load_s * self._noise.load(function)

    def _serves(self, call: int, cost: Cost) -> Seconds:
        given, factors = self.workload.service_s, self._noise.service
        service_s = cost.service_s if given is None or math.isnan(given[call]) else given[call]
        return service_s if factors is None else service_s * factors[call]

    def _evict(self, command: m.Evict) -> None:
        self.record.release(command.function, command.copy, self.now)
        self.record.evictions += 1
        if self._observer is not None:
            self._observer.evicted(self.now, command.function, command.device)

    def _reject(self, command: m.Reject) -> None:
        self.record.outcome[int(command.call)] = REJECTED
        self.record.rejections[command.code] = self.record.rejections.get(command.code, 0) + 1
        self._ended += 1

    # --- changes ------------------------------------------------------------------------------------------------------

    def _change(self, change: Change) -> None:
        match change:
            case DeviceJoins(_, device):
                self._join(device)
            case DeviceLeaves(_, device_id):
                self._leave(device_id)
            case NodeLeaves(_, node):
                for device_id in [each for each in self._devices if self._node_of[each] == node]:
                    self._leave(device_id)
                self._hosts.pop(node, None)
            case FunctionUpdated(_, function, costs):
                old, new, revision = self._revisions.update(self._index[function], costs)
                self._obey(self.engine.handle(m.FunctionDeployed(revision.known_as(new)), self.now))
                self.record.replaced(old, new, self.now)
                self._obey(self.engine.handle(m.FunctionRemoved(old), self.now))
            case FunctionScaled(_, function, copies):
                current = self._revisions.current[self._index[function]]
                self._obey(self.engine.handle(m.Scaled(current, copies), self.now))

    def _join(self, device: SimulatedDevice) -> None:
        host = self._hosts.get(device.node)
        if host is None and (size := self.workload.host_memory.get(device.node, 0)):
            host = self._hosts[device.node] = HostMemory(size)
        state = SimulatedDeviceState(device, len(self.record.devices), host, self.now)
        self.record.devices.append((device, state))
        self._devices[device.id] = state
        self._node_of[device.id] = device.node
        self._obey(self.engine.handle(m.DeviceJoined(device.known_as()), self.now))

    def _leave(self, device: DeviceId) -> None:
        state = self._devices.pop(device)
        state.gone = True
        state.left_at = self.now
        for _, _, on, event in self._under_way:
            if on is state and isinstance(event, m.Finished):
                self.record.outcome[int(event.call)] = FAILED
                self._ended += 1
        state.busy_s -= max(0.0, state.free_at - self.now)
        self.record.release_all(device, self.now)
        if self._observer is not None:
            self._observer.left(self.now, device)
        self._obey(self.engine.handle(m.DeviceLeft(device, "left"), self.now))
