"""
The view of policies on the cluster. It changes nothing. `view_contract.View` says what the members mean; those that
only some of our policies ask for are in `roles.WaitsView` and `roles.PassesView`.

The contract speaks of calls, functions, devices and residents by protocols. A policy hands back the engine's own
objects, so the methods here name the types of these. `view_of` casts once; a cast in each method would cost a call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import exp, inf
from typing import cast

from gpufaas_cache_manager.eviction import evictable
from gpufaas_core.model import Bytes, CopyId, DeviceId, FunctionId, NodeId, Offer, OrderId, PlacementPlan, Seconds
from gpufaas_scheduler.contract import NEVER
from gpufaas_scheduler.fit import Fit, Reason
from gpufaas_scheduler.view_contract import View
from gpufaas_scheduler.world import finish
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.demand import DEMAND_S
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.places import can_start, idle_holder, is_loading
from gpufaas_scheduler.world.queue import Flow, GlobalQueue


class _Fleet:
    """`view_contract.FleetView`. The parts of the view are a chain: compiled classes have one base."""

    __slots__ = ("_cluster",)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def idle(self) -> Iterator[DeviceState]:
        cluster = self._cluster
        idle = cluster.idle_devices
        if not idle:
            return
        key = idle[0]
        if not cluster.constrained or self._wanted(key[2]):
            yield key[2]
        # Devices only drop out during a run, so the next one stands behind the last one.
        while idle and (at := bisect_right(idle, key)) < len(idle):
            key = idle[at]
            if not cluster.constrained or self._wanted(key[2]):
                yield key[2]

    def lacks(self, device: DeviceState, function: FunctionState) -> int:
        return device.lacks(function)

    def least_used(self, function: FunctionState, limit: int) -> Sequence[DeviceState]:
        cluster = self._cluster
        idle, mixed = cluster.idle_devices, cluster.mixed
        if not mixed and not function.bound:
            if limit == 1:
                return [idle[-1][2]] if idle else []
            tail = cluster.tail
            if tail is None or len(tail) != min(limit, len(idle)):
                cluster.tail = tail = [key[2] for key in idle[: -limit - 1 : -1]]
                cluster.tail_from = idle[-limit] if len(idle) >= limit else None
            return tail
        found: list[DeviceState] = []
        for key in reversed(idle):
            if len(found) == limit:
                break
            if self._can_load(key[2], function) if mixed else function.allows(key[2]):
                found.append(key[2])
        return found

    def _can_load(self, device: DeviceState, function: FunctionState) -> bool:
        return function.allows(device) and can_start(self._cluster, device, function)

    def places(self, function: FunctionState, limit: int) -> list[tuple[DeviceState, Bytes]]:
        found = []
        name, costs = function.id, function.costs
        for device in self.least_used(function, limit):
            residency = device.residency
            known = costs[device.kind]
            if known is not None and name not in device.copies and not device.closed:
                found.append((device, known.occupation - residency.free))
        if function.parked:
            found += self._parked_places(function, [each for each, _ in found])
        return found

    def _parked_places(self, function: FunctionState, known: list[DeviceState]) -> list[tuple[DeviceState, Bytes]]:
        """Return the idle devices with a parked copy that are not among *known*."""
        mixed, found = self._cluster.mixed, []
        for device in sorted([self._cluster.devices[each] for each in function.parked], key=lambda each: each.order):
            costs = function.costs[device.kind]
            able = device.idle_key is not None and function.allows(device)
            able = able and (not mixed or can_start(self._cluster, device, function))
            if able and costs is not None and device not in known:
                found.append((device, costs.occupation - device.residency.free))
        return found

    @property
    def moves(self) -> int:
        return self._cluster.moves

    def devices(self) -> Collection[DeviceState]:
        return self._cluster.devices.values()

    def device(self, name: DeviceId) -> DeviceState | None:
        return self._cluster.devices.get(name)

    @property
    def device_count(self) -> int:
        return len(self._cluster.devices)

    @property
    def idle_count(self) -> int:
        return len(self._cluster.idle_devices)

    @property
    def reserved(self) -> bool:
        return self._cluster.now < self._cluster.reserved_until

    def running(self, device: DeviceState) -> Collection[Call]:
        grants = device.grants()
        return [call for each in grants for call in each.calls if call.granted is each]

    def devices_of(self, node: NodeId) -> list[DeviceState]:
        return [each for each in self._cluster.devices.values() if each.device.node == node]

    def allows(self, device: DeviceState, call: Call) -> bool:
        return call.owner.allows(device) or device.id in call.owner.holders

    def _wanted(self, device: DeviceState) -> bool:
        """
        Whether a waiting call may run on *device*, and its compute is spare. O(waiting functions); used only if a
        function is `bound` or takes a part of a device's compute.
        """
        cluster = self._cluster
        return any(
            self.allows(device, call) and (not cluster.mixed or can_start(cluster, device, call.owner))
            for call in cluster.queue.firsts()
        )

    def can_start(self, device: DeviceState, call: Call) -> bool:
        return can_start(self._cluster, device, call.owner)


class _Residency(_Fleet):
    """`view_contract.ResidencyView`."""

    __slots__ = ()

    def holds(self, device: DeviceState, call: Call) -> bool:
        return call.function in device.copies

    def held(self, call: Call) -> bool:
        return bool(call.owner.holders)

    def holders(self, call: Call) -> Collection[DeviceState]:
        found, avoid = call.owner.holders.values(), call.avoid
        return [each for each in found if each.id not in avoid] if avoid else found

    def idle_holder(self, call: Call) -> DeviceState | None:
        return idle_holder(self._cluster, call)

    def idle_holders(self, call: Call, limit: int) -> list[DeviceState]:
        cluster, owner = self._cluster, call.owner
        if not cluster.hits.asked:
            cluster.hits.ask(cluster.functions.values(), cluster.idle_devices, cluster.queue)
        last = cluster.hits.last
        if last is not None and last.id in owner.holders:
            if not owner.idle_holders and not cluster.mixed:
                return [last]
            cluster.hits.list_all()
        found = owner.idle_holders
        if len(found) <= 1:
            ordered: Iterable[DeviceState] = found.values()
        elif len(cluster.idle_devices) <= len(owner.holders):
            ordered = (key[2] for key in cluster.idle_devices if key[2].id in found)
        else:
            ordered = (device for name, device in owner.holders.items() if name in found)
        if cluster.mixed:
            able = [each for each in ordered if can_start(cluster, each, owner)]
            ordered = [each for each in able if each.reserved < each.compute] or able
        if owner.loading and len(found) > 1:
            every = list(ordered)
            ordered = [each for each in every if not is_loading(each, owner)] or every
        return list(islice(ordered, limit))

    def copies_of(self, function: FunctionState) -> list[tuple[Copy, DeviceState]]:
        return list(function.active.items())

    def find(self, copy: CopyId) -> Copy | None:
        found = self._cluster.copies.get(copy)
        return None if found is None else found[1]

    def device_of(self, copy: CopyId) -> DeviceState | None:
        found = self._cluster.copies.get(copy)
        return None if found is None else found[0]

    def residents(self, device: DeviceState) -> Collection[Copy]:
        return device.residency.copies.values()

    def evictable(self, device: DeviceState) -> list[Copy]:
        found = []
        seen: dict[FunctionId, int] = {}
        for each in device.residency.copies.values():
            owner = each.owner
            if owner.placed:  # it has one copy per device
                if evictable(each):
                    found.append(each)
            elif evictable(each, others := seen.get(owner.id, 0)):
                seen[owner.id] = others + 1
                found.append(each)
        return found

    def free(self, device: DeviceState) -> Bytes:
        return device.residency.free

    def occupation(self, device: DeviceState, function: FunctionState) -> Bytes | None:
        need = function.need(device)
        return None if isinstance(need, Reason) else need

    def fits(self, device: DeviceState, call: Call) -> bool:
        return isinstance(self._cluster.fits(device, call.owner), Fit)

    def can_stage(self, device: DeviceState, function: FunctionState) -> bool:
        return device.host.refusal(function.id, self._cluster.now) is None


class _Costs(_Residency):
    """`view_contract.CostsView`."""

    __slots__ = ()

    def load_s(self, device: DeviceState, call: Call) -> Seconds:
        return call.owner.load_on(device)

    def estimate_s(self, call: Call, kind: str) -> Seconds:
        return call.owner.estimate_s(kind, call.size)

    def rate(self, function: FunctionState) -> float:
        now, demand = self._cluster.now, self._cluster.demand
        if now != demand.observed_at:
            demand.observe(now)
        return function.called * exp((function.called_at - now) / DEMAND_S) / demand.observed

    def faded(self, since: Seconds) -> float:
        return self._cluster.demand.faded(since, self._cluster.now)

    @property
    def utilisation(self) -> float:
        cluster = self._cluster
        return cluster.demand.utilisation(len(cluster.devices), cluster.now)

    def finish_s(self, device: DeviceState) -> Seconds:
        return finish.finish_s(device, self._cluster.now)

    def left_s(self, device: DeviceState) -> Seconds:
        return finish.left_s(device, self._cluster.now)

    def overrun_s(self, device: DeviceState) -> Seconds:
        return finish.overrun_s(device, self._cluster.now)

    def soonest_holder(self, call: Call, late_s: Seconds = inf) -> tuple[DeviceState, Seconds] | None:
        best: DeviceState | None = None
        best_s = inf
        now, mixed, owner = self._cluster.now, self._cluster.mixed, call.owner
        avoid = call.avoid
        # `finish_s` inlined: with hundreds of copies, this loop is the cost of the decision.
        for device in owner.holders.values():
            left = (finish.free_for(device, owner) if mixed else device.free_at) - now
            if left > best_s:
                continue  # its local queue makes it only later
            if not device.reserved or device.free_at + late_s <= now or (avoid and device.id in avoid):
                continue
            finish_s = (left if left > 0.0 else 0.0) + device.local_s
            if finish_s < best_s or (finish_s == best_s and best is not None and device.order < best.order):
                best, best_s = device, finish_s
        return None if best is None else (best, best_s)

    def unknown(self, function: FunctionState) -> bool:
        return self._cluster.learn and not any(costs.served for _, costs in function.costs.known())

    def soonest_left(self, call: Call) -> tuple[DeviceState, Seconds] | None:
        avoid = call.avoid
        busy = [each for each in call.owner.holders.values() if each.busy and each.id not in avoid]
        if not busy:
            return None
        left_s, _, best = min((finish.left_s(each, self._cluster.now), each.order, each) for each in busy)
        return best, left_s


class _Plans(_Costs):
    """`contract.AgendaView`."""

    __slots__ = ()

    @property
    def causes(self) -> int:
        return self._cluster.agenda.causes

    @property
    def woken(self) -> Collection[str]:
        return self._cluster.agenda.woken

    @property
    def wakes(self) -> Mapping[str, Seconds]:
        return self._cluster.agenda.wakes

    @property
    def placement(self) -> PlacementPlan | None:
        return self._cluster.agenda.plan

    @property
    def offers(self) -> Mapping[str, Offer]:
        return self._cluster.agenda.offers

    @property
    def ordered(self) -> Mapping[OrderId, str]:
        return self._cluster.agenda.ordered

    @property
    def unmet(self) -> Mapping[str, str]:
        return self._cluster.agenda.unmet


class ClusterView(_Plans):
    """`view_contract.View`."""

    __slots__ = ("queue",)

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.queue: GlobalQueue[Call] = cluster.queue

    @property
    def now(self) -> Seconds:
        return self._cluster.now

    def functions(self) -> list[FunctionState]:
        return [each for each in self._cluster.functions.values() if not each.removed]

    def function(self, name: FunctionId) -> FunctionState | None:
        return self._cluster.functions.get(name)

    def variants(self, task: str) -> Collection[FunctionState]:
        tasks = self._cluster.tasks
        if tasks is None:
            self._cluster.tasks = tasks = {}
            for each in self.functions():
                if each.declared.task:
                    tasks.setdefault(each.declared.task, []).append(each)
        return tasks.get(task, ())

    def first_hit(self, device: DeviceState) -> Call | None:
        if self._cluster.mixed:
            return self._first_possible_hit(device)
        best = NEVER
        found: Flow[Call] | None = None
        for flow in device.flows.values():
            if flow.head < best:
                best, found = flow.head, flow
        for call in self._cluster.queue.returned:
            if call.number > best:
                break
            if call.function in device.copies:
                return call
        return None if found is None else found.calls[0]

    def _first_possible_hit(self, device: DeviceState) -> Call | None:
        """Return `first_hit` where copies and their slots share the compute of *device*: not all can take a call."""
        cluster = self._cluster
        hits = [
            flow.calls[0]
            for name, flow in device.flows.items()
            if flow.head != NEVER and can_start(cluster, device, cluster.functions[name])
        ]
        back = (each for each in cluster.queue.returned if each.function in device.copies)
        hits += [each for each in back if can_start(cluster, device, each.owner)]
        return min(hits, key=lambda each: each.number, default=None)

    def oldest_hit(self, without: Collection[FunctionId]) -> Call | None:
        cluster = self._cluster
        if not cluster.hits.asked:
            cluster.hits.ask(cluster.functions.values(), cluster.idle_devices, cluster.queue)
        if cluster.mixed or cluster.queue.returned:
            cluster.hits.list_all()
        best = NEVER
        found: FunctionState | None = None
        for owner in cluster.hits.candidates():
            head = owner.flow.head
            if head < best and owner.id not in without and (not cluster.mixed or self._can_hit(owner)):
                best, found = head, owner
        last = cluster.hits.last
        if last is not None:
            for flow in last.flows.values():
                if flow.head < best:
                    owner = flow.calls[0].owner
                    if owner.id not in without and last.id in owner.holders:
                        best, found = flow.head, owner
        for call in cluster.queue.returned:
            if call.number > best:
                break
            if (
                call.owner.idle_holders
                and call.function not in without
                and (not cluster.mixed or self._can_hit(call.owner))
            ):
                return call
        return None if found is None else found.flow.calls[0]

    def _can_hit(self, owner: FunctionState) -> bool:
        return any(can_start(self._cluster, each, owner) for each in owner.idle_holders.values())

    def orphans(self, limit: int) -> list[Call]:
        return self._cluster.first_of_orphans(limit)


def view_of(cluster: Cluster) -> View:
    """Return the view of policies on *cluster*."""
    return cast(View, ClusterView(cluster))
