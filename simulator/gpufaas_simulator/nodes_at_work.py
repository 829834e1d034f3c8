"""
What the nodes of a simulation do: they obey the engine's commands, and tell it what comes of them.

A grant or load puts its end into the calendar when it begins. `simulation` takes the entries out in order of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappush

from gpufaas_core import messages as m
from gpufaas_core.cost import Truth
from gpufaas_core.model import ALL_COMPUTE, CallId, CopyId, DeviceId, FunctionId, Part, Seconds, copy_id, copy_of
from gpufaas_scheduler.engine import Engine
from gpufaas_simulator.calendar import Calendar, Loading
from gpufaas_simulator.costs import Revisions, TrueTimes, mixes
from gpufaas_simulator.nodes import CopyKey, HostMemory, Noise, Running, SimulatedDeviceState
from gpufaas_simulator.record import FAILED, FALSE_MISS, HIT, MISS, Record
from gpufaas_simulator.timeline import Done, Evicted, LoadBegun, Observer, Started
from gpufaas_simulator.workload import FunctionUpdated, HostLoad, PlanComes, SimulatedFunction, Workload


class Nodes:
    """All nodes of one simulation, and what they are busy with. The parameters are those of `Simulation`."""

    def __init__(self, workload: Workload, engine: Engine, noise: Noise | None, observers: Sequence[Observer]) -> None:
        self.workload = workload
        self.engine = engine
        self.now: Seconds = 0.0
        self.record = Record(workload)
        self._observers = observers
        plans = workload.planner is not None or any(isinstance(each, PlanComes) for each in workload.changes)
        self._revisions = Revisions(workload.functions, plans=plans)
        self._times = TrueTimes(self._revisions, workload.service_s, noise or Noise())
        self._devices: dict[DeviceId, SimulatedDeviceState] = {}
        self._calendar = Calendar()
        self._under_way = self._calendar.entries
        busy = any(isinstance(each, HostLoad) for each in workload.changes)
        self._mixed = self.record.mixed = busy or any(map(mixes, _all_functions(workload)))
        """Grants may run beside others that slow them. False: the end of each is known when it starts."""
        self._as_costs = not self._mixed and self._times.as_costs
        """Calls take the service times of their functions."""
        self._caps: dict[tuple[FunctionId, int], int] = {}
        """The share of the compute that each copy may use, as the policy has set it."""
        self._ended = 0
        """The number of calls that have ended."""

    def _hear(self, event: m.Event) -> None:
        """The engine is told *event*, and obeyed."""
        self._obey(self.engine.handle(event, self.now))

    def _obey(self, commands: list[m.Command]) -> None:
        for command in commands:
            kind = type(command)
            if kind is m.StartCall:
                self._start(command.grant)  # type: ignore[union-attr]
            elif isinstance(command, m.LoadCopy):
                self._load(command)
            elif isinstance(command, m.EvictCopy):
                self._evict(command)
            elif isinstance(command, m.RejectCall):
                self.record.reject(int(command.call), command.code)
                self._ended += 1
            elif isinstance(command, m.Abort):
                self._abort(command)
            elif isinstance(command, m.Stage):
                self._stage(command)
            elif isinstance(command, m.SetLimit):
                self._limit(command)
            elif isinstance(command, m.ProcureNodes | m.ReleaseNode):
                self._provide(command)
            # No memory is measured, so none is resized; and loads have no times of fetching.

    def _did(self, done: Done) -> None:
        for tell in self._observers:
            tell(done)

    def _provide(self, command: m.ProcureNodes | m.ReleaseNode) -> None:
        """A node is procured, or given back."""
        raise NotImplementedError

    def _start(self, grant: m.Grant) -> None:
        """Nearly all grants are of one call, and run alone on one device: this is written out for them."""
        record, now, cold, parts, calls, tier = self.record, self.now, grant.cold, grant.parts, grant.calls, ""
        place, function, order = parts[0].device, grant.function, grant.number * 3
        device = self._devices[place]
        devices = device.itself if len(parts) == 1 else tuple([self._devices[each.device] for each in parts])
        truth = self._revisions.of(function, device.kind)
        if len(calls) > 1:
            truth = truth.of(len(calls))
        cap = parts[0].share or truth.cap
        if self._caps:
            cap = self._caps.get((function, grant.copy), cap)
        if truth.whole and len(parts) == 1:
            begin = device.free_at if device.free_at > now else now
            if device.ready_at and not cold:  # it may be loaded beside other calls
                begin = max(begin, device.ready_at.get((function, grant.copy), begin))
        else:
            begin = self._begins(truth, devices, None if cold else (function, grant.copy))
        ready, start, victims = begin, HIT, grant.victims
        if cold:
            start = FALSE_MISS if record.holders.get(function) else MISS
            victims = record.hold(function, place, grant.copy, victims, now)
            load_s, tier = self._loads(function, grant.copy, devices, parts)
            if grant.parked:
                self._park(device, grant.parked)
            ready = begin + load_s
        if self._as_costs and len(calls) == 1 and cap == ALL_COMPUTE:
            service_s = truth.cost.service_s
        else:
            service_s = self._times.serves(numbers(calls), function, truth, devices, cap)
        if grant.held_s or grant.load_s:
            self._waited(grant, begin)
        if truth.cost.start_s and not cold:
            ready = begin = max(begin, now + truth.cost.start_s)
        for call in map(int, calls):
            record.start[call] = start
            record.started[call] = begin
            record.service_s[call] = service_s
            record.device[call] = device.index
            record.starts.append(call)
        running = Running(order + 2, calls, function, grant.copy, place, devices, truth, cap, service_s, ready)
        if cold:
            loaded = m.Loaded(function, place, ready - begin, 0, grant.copy, tier)
            heappush(self._under_way, (ready, order + 1, 0, Loading(loaded, devices, running)))
        if self._mixed:
            self._runs_beside(running, begin, ready if cold else None)
        else:
            end = running.end = ready + service_s
            heappush(self._under_way, (end, order + 2, 0, running))
            if truth.whole and len(parts) == 1:
                device.free_at = end
                device.busy_s += end - begin
            elif cold or truth.whole:
                self._occupy(truth, devices, (function, grant.copy), begin, end if truth.whole else ready)
        if self._observers:
            done = Started(begin, function, place, victims, numbers(calls), not cold, grant.local)
            self._calendar.at(begin, self.now, order, devices, partial(self._did, done))

    def _waited(self, grant: m.Grant, begin: Seconds) -> None:
        """Note for how long the calls of a grant waited for others, and for the load of their copy."""
        record, times = self.record, self.workload.times
        ready = begin if grant.load_s < 0.0 else times[int(grant.calls[0])] + grant.load_s
        for call in numbers(grant.calls):
            awaited_s = max(0.0, ready - times[call]) if grant.load_s else 0.0
            record.awaited_s[call] = awaited_s
            record.held_s[call] = max(0.0, min(grant.held_s, self.now - times[call] - awaited_s))

    def _runs_beside(self, running: Running, begin: Seconds, ready: Seconds | None) -> None:
        """A grant starts that may run beside others. Its service begins at *begin*; on a miss, when it is loaded."""
        for each in running.devices:
            each.enter(self.now)
        if ready is None:
            heappush(self._under_way, (begin, running.order - 1, 0, running))
        else:
            self._occupy(running.truth, running.devices, (running.function, running.copy), begin, ready)

    def _load(self, command: m.LoadCopy) -> None:
        parts, function, order = command.parts, command.function, command.number * 3
        devices = tuple([self._devices[each.device] for each in parts])
        truth = self._revisions.of(function, devices[0].kind)
        begin = self.now if command.beside else self._begins(truth, devices, None)
        victims = self.record.hold(function, command.device, command.copy, command.victims, self.now)
        load_s, tier = self._loads(function, command.copy, devices, parts)
        if command.parked:
            self._park(devices[0], command.parked)
        ready = begin + load_s
        if command.beside:
            devices[0].ready_at[function, command.copy] = ready
        else:
            self._occupy(truth, devices, (function, command.copy), begin, ready)
        if self._mixed:
            for each in devices:
                each.enter(self.now)
        self.record.prefetches += 1
        loaded = m.Loaded(function, command.device, ready - begin, 0, command.copy, tier)
        heappush(self._under_way, (ready, order + 1, 0, Loading(loaded, devices)))
        if self._observers:
            done = LoadBegun(begin, function, command.device, victims)
            self._calendar.at(begin, self.now, order, devices, partial(self._did, done))

    def _begins(self, truth: Truth, devices: tuple[SimulatedDeviceState, ...], hit: CopyKey | None) -> Seconds:
        """
        Return when a load or a grant begins: of a function that needs whole devices, once all of them are free; a hit
        of another one, once its copy is loaded.
        """
        if truth.whole:
            return max(self.now, *[each.free_at for each in devices])
        return self.now if hit is None else max(self.now, devices[0].ready_at.get(hit, self.now))

    def _occupy(
        self, truth: Truth, devices: tuple[SimulatedDeviceState, ...], copy: CopyKey, begin: Seconds, end: Seconds
    ) -> None:
        """The copy loads, and perhaps serves alone on its devices, from *begin* to *end*."""
        if not truth.whole:
            devices[0].ready_at[copy] = end
            return
        for device in devices:
            device.free_at = end
            if not self._mixed:
                device.busy_s += end - begin

    def _abort(self, command: m.Abort) -> None:
        running = self._calendar.running(command.call)
        if running is None:  # it ends at this instant
            return
        running.calls = tuple([each for each in running.calls if each != command.call])
        if not running.calls:
            free_at = [each.free_at for each in running.devices]
            loads = self._calendar.stop(running, self.now)
            for device, before in zip(running.devices, free_at, strict=True):
                if not self._mixed:
                    device.busy_s -= before - device.free_at
                elif not loads:
                    device.leave(self.now)
        if command.take_back:
            self.record.preempted += 1
            answer: m.Event = m.NodeRefused(command.call, running.place, command.reason, opened=True)
        else:
            self.record.outcome[int(command.call)] = FAILED
            self._ended += 1
            answer = m.Finished(command.call, running.place, max(0.0, self.now - running.begin), ok=False)
        self._calendar.last(self.now, partial(self._hear, answer), running.devices)

    def _limit(self, command: m.SetLimit) -> None:
        function, copy = command.function, command.copy
        device = self._devices[command.device]
        cap = command.share or self._revisions.of(function, device.kind).cap
        self._caps[function, copy] = cap
        self._calendar.cap(function, copy, device.itself, cap, self.now)

    # --- what ends ----------------------------------------------------------------------------------------------------

    def _loaded(self, loading: Loading) -> None:
        if self._mixed:
            if loading.running is not None:
                self._calendar.serve(loading.running, self.now)
            else:
                for device in loading.devices:
                    device.leave(self.now)
        self._hear(loading.loaded)
        for device in loading.devices if loading.loaded.tier == "disk" else ():
            if device.host is not None:
                self._keep(device.host, device, loading.loaded.function)

    def _served(self, running: Running) -> bool:
        """Return whether a grant that may run beside others has ended. If not, its service begins now."""
        if not running.version:
            self._calendar.serve(running, self.now)
            return False
        self._calendar.ended(running, self.now)
        for device in running.devices:
            device.leave(self.now)
        for call in numbers(running.calls):
            if running.service_s != self.record.service_s[call]:
                self.record.slowed_s[call] = running.service_s - self.record.service_s[call]
                self.record.service_s[call] = running.service_s
        return True

    def _loads(
        self, function: FunctionId, copy: int, devices: tuple[SimulatedDeviceState, ...], parts: tuple[Part, ...]
    ) -> tuple[Seconds, str]:
        """Return how long a load takes, or the wake of a parked copy, and where its weights come from."""
        device = devices[0]
        cost = self._revisions.of(function, device.kind).cost
        wake_s = cost.wakes_in_s
        if device.host is not None and wake_s is not None and device.host.unpark(device.device.id, (function, copy)):
            device.host.ask(function, cost, self.now)
            self.record.wakes += 1
            return wake_s, "parked"
        load_s, staged = self._times.loads(function, devices, parts, self.now)
        self.record.host_loads += staged
        return load_s, "host" if staged else "disk"

    def _park(self, device: SimulatedDeviceState, names: Iterable[CopyId]) -> None:
        """Copies of *device* that were evicted are parked, as far as its host memory has room."""
        facts: list[m.Event] = []
        for name in names:
            copy = copy_of(name)
            if device.host is not None:
                size = self._revisions.of(copy[0], device.kind).cost.occupation
                facts += device.host.park(device.device.id, copy, size)
        if facts:
            self._calendar.last(self.now, partial(self._tell, device, facts), (device,))

    def _evict(self, command: m.EvictCopy) -> None:
        device = self._devices[command.device]
        if device.host is not None and device.host.unpark(command.device, (command.function, command.copy)):
            return
        self.record.release(command.function, command.copy, self.now)
        self.record.evictions += 1
        self._caps.pop((command.function, command.copy), None)
        if command.to == "host" and device.host is not None:
            device.host.ask(command.function, self._revisions.of(command.function, device.kind).cost, self.now)
            self._keep(device.host, device, command.function)
            if device.host.parks:
                self._park(device, (copy_id(command.function, command.copy),))
        self._did(Evicted(self.now, command.function, command.device))

    # --- host memory --------------------------------------------------------------------------------------------------

    def _keep(self, host: HostMemory, device: SimulatedDeviceState, function: FunctionId) -> None:
        """The weights of *function* were read on the node of *device*: its host memory keeps them, or does not."""
        self._tell(device, host.keep(function, self._revisions.of(function, device.kind).cost))

    def _stage(self, command: m.Stage) -> None:
        """The weights are read beside all that the devices do, after what else was asked for."""
        function = command.function
        device = next(each for each in self._devices.values() if each.known and each.device.node == command.node)
        cost, host = self._revisions.of(function, device.kind).cost, device.host
        assert host is not None
        self.record.staged += 1
        facts, at = host.bring(function, cost, self.now)
        self._calendar.last(self.now, partial(self._tell, device, facts), (device,))
        if at < math.inf:
            self._calendar.last(at, partial(self._staged, device, host, function), (device,))

    def _staged(self, device: SimulatedDeviceState, host: HostMemory, function: FunctionId) -> None:
        self._tell(device, host.read(function, self._revisions.of(function, device.kind).cost))

    def _tell(self, device: SimulatedDeviceState, facts: list[m.Event]) -> None:
        """The node of *device* tells the engine of its host memory."""
        for fact in facts if device.known else ():
            self._hear(fact)


def numbers(calls: Iterable[CallId]) -> tuple[int, ...]:
    """Return the indices of calls in the workload, which are their names."""
    return tuple([int(each) for each in calls])


def _all_functions(workload: Workload) -> Iterator[SimulatedFunction]:
    """The functions at the start, and those that updates make of them."""
    yield from workload.functions
    known = {each.name: each for each in workload.functions}
    for change in workload.changes:
        if isinstance(change, FunctionUpdated) and change.costs is not None:
            yield replace(known[change.function], costs=change.costs)
