"""
A shell of the engine with simulated time: a calendar gives events to the engine, and its commands become later events.

The calendar has three sorted sources: work in progress (a heap), changes of the cluster, and arrivals. Events of one
instant come in this order; events of work in progress come in the order in which the work started, the others in the
order of the workload. The engine handles one event at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop
from typing import Final

from msgspec.structs import astuple

from gpufaas_core import messages as m
from gpufaas_core.errors import PlanConflict
from gpufaas_core.model import NO_ORDER, CallId, DeviceId, NodeId, OrderId, PlacementPlan, Replica, Seconds, name_of
from gpufaas_core.plans import Answer, Snapshot
from gpufaas_core.snapshot import StagedWeights
from gpufaas_planner.check import check
from gpufaas_planner.planner import Planner
from gpufaas_scheduler.engine import Engine
from gpufaas_simulator.calendar import Later, Loading
from gpufaas_simulator.fleet import Fleet
from gpufaas_simulator.nodes import HostMemory, Noise, Running, SimulatedDeviceState
from gpufaas_simulator.nodes_at_work import Nodes, numbers
from gpufaas_simulator.record import COMPLETED, FAILED, Record
from gpufaas_simulator.timeline import Left, Observer
from gpufaas_simulator.workload import (
    ANY_KIND,
    Change,
    DeviceJoins,
    DeviceLeaves,
    FunctionScaled,
    FunctionUpdated,
    HostLoad,
    KindLeaves,
    NodeLeaves,
    NodeOffer,
    OfferChanges,
    PlanComes,
    SimulatedDevice,
    Workload,
)

_LOOK_EVERY_S: Final[Seconds] = 1.0
_PROGRESS_EVERY: Final = 5_000
_VAIN_WAKES: Final = 1_000
"""After so many in a row without effect, with nothing else to come, the calls that wait are never served."""


class Simulation(Nodes):
    """
    One run of *workload* through *engine*, which must be new.

    `noise` multiplies load and service times; the engine knows neither the factors nor `Workload.service_s`.
    """

    def __init__(
        self,
        workload: Workload,
        engine: Engine,
        *,
        noise: Noise | None = None,
        observers: Sequence[Observer] = (),
        solve: Callable[[Snapshot], Answer] | None = None,
    ) -> None:
        super().__init__(workload, engine, noise, observers)
        self._solve = solve
        self._planner = None if workload.planner is None else Planner(workload.planner.solver, engine.snapshot)
        self._plan = PlacementPlan(0)
        """The plan in force."""
        self._told = _PROGRESS_EVERY
        """Of how many ended calls *progress* is told next."""
        self._next: tuple[int, int] | None = None
        """The next arrival and the next change, when *progress* was told last; None: it has not begun."""
        self._index = {each.name: index for index, each in enumerate(workload.functions)}
        self._timeouts = [each.timeout_s for each in workload.functions]
        self._hosts: dict[str, HostMemory] = {}
        self._taken: dict[str, int] = {}
        """The per cent of the compute that else runs on each node."""
        self._fleet = Fleet(workload.offers, workload.prices)
        self.record.nodes = self._fleet.stays

    def run(self, progress: Callable[[int], object] | None = None) -> Record:
        """
        Run to the end of all work. *progress* gets the number of ended calls from time to time, when what is pickled
        can go on. Exceptions of the engine and its policy are passed on.
        """
        if self._next is None:
            self._set_up()
        arrival, change = self._next or (0, 0)
        under_way, engine, times, changes = self._under_way, self.engine, self.workload.times, self.workload.changes
        arrivals, vain = len(times), 0
        arrives = times[arrival] if arrival < arrivals else math.inf
        changes_at = changes[change].at_s if change < len(changes) else math.inf
        while True:
            first = under_way[0][0] if under_way else math.inf
            wake_at = engine.wake_at
            if wake_at is not None and wake_at < first and wake_at < arrives and wake_at < changes_at:
                if self._ended == arrivals and first == changes_at == math.inf:
                    break
                self.now = max(self.now, wake_at)
                commands = engine.handle(m.Woken(), self.now)
                self._obey(commands)
                vain = 0 if commands or min(first, arrives, changes_at) < math.inf else vain + 1
                if vain > _VAIN_WAKES:
                    break
            elif first <= arrives and first <= changes_at:
                if first == math.inf:
                    break
                self._do_next()
            elif changes_at <= arrives:
                self.now = changes_at
                self._change(changes[change])
                change += 1
                changes_at = changes[change].at_s if change < len(changes) else math.inf
            else:
                self._call(arrival, arrives)
                arrival += 1
                arrives = times[arrival] if arrival < arrivals else math.inf
            if self._ended >= self._told and progress is not None:
                self._told, self._next = self._ended + _PROGRESS_EVERY, (arrival, change)
                progress(self._ended)
        self._close()
        if progress is not None:
            progress(arrivals)
        return self.record

    def _set_up(self) -> None:
        """The functions are deployed, and the nodes of the start join."""
        for known, revision in zip(self.workload.functions, self._revisions.current, strict=True):
            self._hear(m.FunctionDeployed(known.known_as(revision)))
        self._offer()
        for each in self.workload.devices:
            self._join(each)
        if self._planner is not None and self._solve is not None:
            self._look(self._planner, self._solve)

    def _do_next(self) -> None:
        """Do the first entry of the calendar, unless it is void."""
        at, _, version, work = heappop(self._under_way)
        kind = type(work)
        if kind is Running and version != work.version:  # type: ignore[union-attr]
            return
        if kind is Later and not work.devices and self._ended == len(self.workload.times):
            return  # a node that was procured joins when nothing is left to do
        self.now = at
        if work.lost:
            return
        if kind is Running:
            if self._mixed and not self._served(work):  # type: ignore[arg-type]
                return
            for call in work.calls:  # type: ignore[union-attr]
                number = int(call)
                self.record.ended[number] = at
                self.record.outcome[number] = COMPLETED
                self._ended += 1
                self._obey(self.engine.handle(m.Finished(call, work.place, work.service_s), at))  # type: ignore[union-attr]
        elif kind is Loading:
            self._loaded(work)  # type: ignore[arg-type]
        else:
            work.do()  # type: ignore[union-attr]

    def _call(self, number: int, at: Seconds) -> None:
        """A call of the workload arrives."""
        self.now = at
        function = self.workload.calls[number]
        timeout_s = self._timeouts[function]
        deadline = None if timeout_s is None else at + timeout_s
        commands = self.engine.handle(m.Arrived(CallId(str(number)), self._revisions.current[function], deadline), at)
        if commands:
            self._obey(commands)

    def _close(self) -> None:
        self.record.close(self.now)
        for state in self._devices.values():
            state.close(self.now)

    # --- nodes and functions that come and go -------------------------------------------------------------------------

    def _provide(self, command: m.ProcureNodes | m.ReleaseNode) -> None:
        if isinstance(command, m.ProcureNodes):
            offer, devices = self._fleet.procure(command.kind, self.now)
            self._calendar.last(self.now + offer.delay_s, partial(self._arrive, command.order, offer, devices))
            return
        for device in [each for each in self._devices if each.rpartition("/")[0] == command.node]:
            self._hosts.pop(self._devices[device].device.node, None)
            self._leave(device)

    def _arrive(self, order: OrderId, offer: NodeOffer, devices: Sequence[SimulatedDevice]) -> None:
        """A node that was procured joins."""
        if offer.host_memory:
            node = devices[0].node
            self._hosts[node] = HostMemory(NodeId(node), offer.host_memory)
        for each in devices:
            self._join(each, order)

    def _change(self, change: Change) -> None:
        match change:
            case DeviceJoins(_, device):
                self._join(device)
            case DeviceLeaves(_, device_id):
                if device_id in self._devices:
                    self._leave(device_id)
            case NodeLeaves(_, node):
                self._node_leaves(node)
            case KindLeaves(_, kind, down_s):
                self._kind_leaves(kind, down_s)
            case OfferChanges():
                self._fleet.change(change)
                self._offer()
            case HostLoad(_, node, taken):
                self._taken[node] = taken
                loaded = [each for each in self._devices.values() if each.device.node == node]
                for each in loaded:
                    each.load(taken, self.now)
                self._calendar.pace(loaded, self.now)
            case FunctionUpdated(_, function, costs):
                old, new, revision = self._revisions.update(self._index[function], costs)
                self._hear(m.FunctionDeployed(revision.known_as(new)))
                self.record.replaced(old, new, self.now)
                self._hear(m.FunctionRemoved(old))
            case FunctionScaled(_, function, copies):
                current = self._revisions.current[self._index[function]]
                self._hear(m.Scaled(current, copies))
            case PlanComes(_, replicas):
                self._put_in_force(tuple(Replica(*astuple(each)) for each in replicas))

    def _put_in_force(self, replicas: tuple[Replica, ...]) -> None:
        self._plan = PlacementPlan(self._plan.version + 1, replicas)
        self._hear(m.Planned(self._plan))

    def _look(self, planner: Planner, solve: Callable[[Snapshot], Answer]) -> None:
        """Have the solver plan if there is reason to, which takes its time; look again then, or else in a second."""
        asked = planner.due(self.now, self._plan)
        again = partial(self._look, planner, solve)
        if asked is None:
            if self.workload.times and self.now < self.workload.times[-1]:  # later, rates only fall
                self._calendar.last(self.now + _LOOK_EVERY_S, again)
            return
        answer = planner.judged(asked, solve(asked))
        assert self.workload.planner is not None
        answered = partial(self._answered, planner, asked, answer, again)
        self._calendar.last(self.now + self.workload.planner.solve_s, answered)

    def _answered(self, planner: Planner, asked: Snapshot, answer: Answer | None, again: Callable[[], None]) -> None:
        if asked.plan is not self._plan:
            planner.failed(PlanConflict(f"plan {self._plan.version} came in between"), self.now)
        else:
            if answer is not None:
                functions = {name_of(each.id): each for each in asked.functions}
                check(answer.replicas, functions, asked.devices, self._plan.replicas)
                self._put_in_force(answer.replicas)
            planner.succeeded(None if answer is None else self._plan.version)
        again()

    def _node_leaves(self, node: str) -> list[SimulatedDevice]:
        """Return the devices that it had."""
        left = [each.device for each in self._devices.values() if each.device.node == node]
        for each in left:
            self._leave(each.id)
        self._hosts.pop(node, None)
        return left

    def _kind_leaves(self, kind: str, down_s: Seconds | None) -> None:
        """The node that is in use fails, and is down for so long."""
        there = [each.device for each in self._devices.values() if kind in (ANY_KIND, each.kind)]
        if not there:
            return
        work = self._calendar.work()
        fails = max(there, key=lambda each: work[each.node])
        self._fleet.withheld[fails.kind] += down_s is not None
        left = self._node_leaves(fails.node)
        if down_s is not None:
            owned = [] if fails.node in self._fleet.procured else left
            self._calendar.last(self.now + down_s, partial(self._comes_back, fails.kind, owned))
            self._offer()

    def _comes_back(self, kind: str, devices: Sequence[SimulatedDevice]) -> None:
        """A node that failed, or another one of its kind, can be had again."""
        self._fleet.withheld[kind] -= 1
        for each in devices:
            if each.id not in self._devices:
                self._join(each)
        self._offer()

    def _offer(self) -> None:
        """The engine is told what can be procured now."""
        if self.workload.offers:
            self._hear(m.Offered(self._fleet.offers()))

    def _join(self, device: SimulatedDevice, order: OrderId = NO_ORDER) -> None:
        host = self._hosts.get(device.node)
        if host is None and (size := self.workload.host_memory.get(device.node, 0)):
            parks = device.node in self.workload.parks
            host = self._hosts[device.node] = HostMemory(NodeId(device.node), size, parks=parks)
        state = SimulatedDeviceState(device, len(self.record.devices), host, self.now)
        if device.node in self._taken:
            state.load(self._taken[device.node], self.now)
        self.record.devices.append((device, state))
        self._devices[device.id] = state
        price_per_h = self._fleet.joined(device, self.now)
        if host is None or not state.known:
            self._hear(m.DeviceJoined(device.known_as(price_per_h), order=order))
            return
        known = device.known_as(price_per_h, host.tier.budget, parks=host.parks)
        self._hear(m.DeviceJoined(known, None, tuple([StagedWeights(each) for each in host.tier]), order))

    def _leave(self, device: DeviceId) -> None:
        state = self._devices.pop(device)
        state.left_at = self.now
        for running in self._calendar.lose(state, self.now):
            for call in numbers(running.calls):
                self.record.outcome[call] = FAILED
                self._ended += 1
        if not self._mixed:
            state.busy_s -= max(0.0, state.free_at - self.now)
        state.close(self.now)
        if state.host is not None:
            state.host.leave(device)
        self.record.release_all(device, self.now)
        self._did(Left(self.now, device))
        self._hear(m.DeviceLeft(device, "left"))
        node = state.device.node
        if all(each.device.node != node for each in self._devices.values()) and self._fleet.left(node, self.now):
            self._hear(m.Offered(self._fleet.offers()))
