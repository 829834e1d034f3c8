"""
Workloads and results from the journal of a platform (``gpufaas serve --journal``).

A replay of the journal through an engine gives every decision as it was made. The journal has the times of calls and
loads. A simulation then shows what other devices or another policy do with the same arrivals. If all devices are of one
kind, each answered call takes the time that it took then; otherwise the mean of its function.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from gpufaas_core import messages as m
from gpufaas_core.cost import Cost
from gpufaas_core.json_errors import UNREADABLE
from gpufaas_core.model import ALL_COMPUTE, CallId, DeviceId, Function, FunctionId, Profile, Seconds
from gpufaas_scheduler.journal import Header, read
from gpufaas_simulator.nodes import SimulatedDeviceState
from gpufaas_simulator.record import COMPLETED, FAILED, FALSE_MISS, HIT, MISS, PENDING, Record
from gpufaas_simulator.workload import (
    DEFAULT_NAMESPACE,
    BadWorkload,
    Change,
    DeviceJoins,
    DeviceLeaves,
    FunctionScaled,
    SimulatedDevice,
    SimulatedFunction,
    Workload,
)

_HEADER_LINES: Final = 1


@dataclass(frozen=True, slots=True)
class Recorded:
    header: Header
    """The options of the engine."""
    workload: Workload
    """Arrivals, devices and true times. Costs are measured means, or declared costs where nothing was measured."""
    record: Record
    """The outcomes that the journal has."""
    calls: tuple[CallId, ...]
    """In the order of the workload."""


def read_journal(path: Path) -> Recorded:
    """
    :raises BadWorkload: the file is missing, is no journal, or has no call; the message names file and line
    :raises InvalidSpec: not a journal of this version, or its policy is not installed here
    """
    try:
        header, events = read(path)
    except OSError as exc:
        raise BadWorkload(f"{path}: it cannot be read ({exc.strerror}): name a journal of 'gpufaas serve'") from exc
    told = list(_numbered(path, events))
    if not any(isinstance(event, m.Arrived) for event, _ in told):
        raise BadWorkload(f"{path}:1: no call is recorded in it: name a journal of a platform that was called")
    return _JournalReader(header, told).recorded(path.stem)


def _numbered(path: Path, events: Iterator[tuple[m.Event, Seconds]]) -> Iterator[tuple[m.Event, Seconds]]:
    line = _HEADER_LINES + 1
    try:
        for event in events:
            yield event
            line += 1
    except UNREADABLE as exc:
        raise BadWorkload(f"{path}:{line}: this is no event of a journal: cut the file there") from exc


class _JournalReader:
    """Reads in two passes: first devices, functions and arrivals, then the outcomes (`_Outcomes`)."""

    def __init__(self, header: Header, told: list[tuple[m.Event, Seconds]]) -> None:
        self.header = header
        self.began = told[0][1]
        self.told = [(event, now - self.began) for event, now in told]
        self.functions: dict[FunctionId, Function] = {}
        self.profiles: dict[FunctionId, dict[str, Profile]] = {}
        self.kinds: dict[DeviceId, str] = {}
        self.service_s: dict[tuple[FunctionId, str], list[Seconds]] = defaultdict(list)
        self.load_s: dict[tuple[FunctionId, str], list[Seconds]] = defaultdict(list)
        self.timeout_s: dict[FunctionId, Seconds] = {}
        self.called: dict[CallId, FunctionId] = {}
        self.times = array("d")

    def recorded(self, name: str) -> Recorded:
        devices: list[SimulatedDevice] = []
        changes: list[Change] = []
        for event, now in self.told:
            match event:
                case m.FunctionDeployed(deployed):
                    self.functions[deployed.id] = deployed
                    self.profiles[deployed.id] = dict(deployed.profiles)
                case m.DeviceJoined(device):
                    self.kinds[device.id] = device.kind
                    joined = SimulatedDevice(device.id, device.memory, device.kind, device.node, device.compute)
                    if self.times:
                        changes.append(DeviceJoins(now, joined))
                    else:
                        devices.append(joined)
                case m.DeviceLeft(device_id):
                    if self.times:
                        changes.append(DeviceLeaves(now, device_id))
                    else:
                        devices = [each for each in devices if each.id != device_id]
                case m.Arrived(call, function, deadline):
                    if call not in self.called and function in self.functions:
                        self.called[call] = function
                        self.times.append(now)
                        if deadline is not None:
                            left_s = deadline - self.began - now
                            self.timeout_s[function] = max(left_s, self.timeout_s.get(function, 0.0))
                case m.Loaded(function, device_id, load_s):
                    self.load_s[function, self.kinds.get(device_id, "")].append(load_s)
                case m.Finished(call, device_id, service_s, ok) if ok and call in self.called:
                    self.service_s[self.called[call], self.kinds.get(device_id, "")].append(service_s)
                case m.Scaled(function, copies):
                    changes.append(FunctionScaled(now, function, copies))
        engine = self.header.engine()
        replayed = [(event, now, engine.handle(event, now + self.began)) for event, now in self.told]
        for learnt in engine.take_learnt():
            self.profiles[learnt.function][learnt.kind] = learnt.profile
        functions = [self._function(each) for each in self.functions.values()]
        index = {function: at for at, function in enumerate(self.functions)}
        calls = array("i", [index[function] for function in self.called.values()])
        workload = Workload(devices, functions, self.times, calls, changes, name=name, service_s=self._true_times())
        outcomes = _Outcomes(workload, self.functions, self.called)
        for event, now, commands in replayed:
            outcomes.happened(event, now)
            for command in commands:
                outcomes.commanded(command, now)
        outcomes.record.close(self.told[-1][1])
        return Recorded(self.header, workload, outcomes.record, tuple(self.called))

    def _function(self, function: Function) -> SimulatedFunction:
        """Costs are means, not medians: means add up to the load of the devices."""
        costs = {}
        declared = self.profiles[function.id]
        measured = {kind for name, kind in [*self.service_s, *self.load_s] if name == function.id}
        for kind in [*declared, *sorted(measured - set(declared))]:
            known = declared.get(kind) or declared.get("*") or next(iter(declared.values()))
            loads, services = self.load_s.get((function.id, kind)), self.service_s.get((function.id, kind))
            costs[kind] = Cost(
                known.occupation,
                fmean(loads) if loads else known.load_s,
                fmean(services) if services else known.service_s,
            )
        return SimulatedFunction(
            function.id,
            costs,
            function.id.partition("@")[0].rpartition(".")[2] or DEFAULT_NAMESPACE,
            function.need,
            function.min_copies,
            function.max_queue,
            self.timeout_s.get(function.id),
        )

    def _true_times(self) -> array[float] | None:
        """None if there are several kinds of devices: the time of a call on another kind is not known."""
        if len(set(self.kinds.values())) > 1:
            return None
        took = {event.call: event.service_s for event, _ in self.told if isinstance(event, m.Finished) and event.ok}
        return array("d", [took.get(call, math.nan) for call in self.called])


class _Outcomes:
    """Fills a `Record` from the events of a journal and the commands of the engine after each."""

    def __init__(self, workload: Workload, functions: dict[FunctionId, Function], called: Iterable[CallId]) -> None:
        self.record = Record(workload)
        self.functions = functions
        self.number = {call: at for at, call in enumerate(called)}
        self.devices: dict[DeviceId, SimulatedDeviceState] = {}
        self.running: dict[CallId, tuple[m.Grant, Seconds]] = {}

    def happened(self, event: m.Event, now: Seconds) -> None:
        match event:
            case m.DeviceJoined(device):
                simulated = SimulatedDevice(device.id, device.memory, device.kind, device.node, device.compute)
                state = SimulatedDeviceState(simulated, len(self.record.devices), None, now)
                self.record.devices.append((simulated, state))
                self.devices[device.id] = state
            case m.DeviceLeft(device_id):
                self.devices[device_id].left_at = now
                self.record.release_all(device_id, now)
                self._lose(now, device_id)
            case m.WorkerExited(function, on, copy=copy) | m.CopyFailed(function, on, copy=copy):
                self.record.release(function, copy, now)
                self._lose(now, on, (function, copy))
            case m.Finished(call, _, service_s, ok):
                if call in self.running:
                    self._end(call, now, COMPLETED if ok else FAILED)
                    self.record.ended[self.number[call]] = now
                    self.record.service_s[self.number[call]] = service_s
            case m.NodeRefused(call, _):
                if (ran := self.running.pop(call, None)) is not None and ran[0].cold:
                    self.record.release(ran[0].function, ran[0].copy, now)
            case m.CallerLeft(call):
                if call in self.number and call not in self.running:
                    self.record.outcome[self.number[call]] = FAILED

    def commanded(self, command: m.Command, now: Seconds) -> None:
        record = self.record
        match command:
            case m.StartCall(grant):
                calls = [call for call in grant.calls if call in self.number]
                start, held = HIT, bool(record.holders.get(grant.function))
                if grant.cold and calls:
                    start = FALSE_MISS if held else MISS
                    record.hold(grant.function, grant.device, grant.copy, grant.victims, now)
                for call in calls:
                    at = self.number[call]
                    record.outcome[at] = PENDING
                    record.start[at] = start
                    record.started[at] = now
                    record.held_s[at] = min(grant.held_s, now - record.workload.times[at])
                    record.device[at] = self.devices[grant.device].index
                    record.starts.append(at)
                    self.running[call] = (grant, now)
            case m.LoadCopy(function=function, victims=victims, copy=copy):
                record.prefetches += 1
                record.hold(function, command.device, copy, victims, now)
            case m.EvictCopy(function, copy=copy):
                record.evictions += 1
                record.release(function, copy, now)
            case m.RejectCall(call, code) if call in self.number:
                record.reject(self.number[call], code)

    def _lose(self, now: Seconds, device: DeviceId, worker: tuple[FunctionId, int] | None = None) -> None:
        """Calls that ran there have failed. A call that its node had not taken yet starts again later."""
        for call, (grant, _) in list(self.running.items()):
            if grant.device == device and worker in (None, (grant.function, grant.copy)):
                self._end(call, now, FAILED)

    def _end(self, call: CallId, now: Seconds, outcome: int) -> None:
        grant, since = self.running.pop(call)
        self.record.outcome[self.number[call]] = outcome
        need = self.functions[grant.function].need
        if call == grant.call and need.compute:
            self.devices[grant.device].busy_s += (now - since) * (need.compute / ALL_COMPUTE)
