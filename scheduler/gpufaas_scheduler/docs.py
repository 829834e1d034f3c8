"""
The engine's state as docs, for a takeover, and docs as state again (docs/adr/0022).

Ages in a doc count from `since`: the moment, on the reader's clock, at which the doc was made.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import inf
from typing import Final

from gpufaas_cache_manager.residency import NOT_ASKED
from gpufaas_core.model import Asked, Seconds
from gpufaas_core.snapshot import CallDoc, CostsDoc, DeviceDoc, EngineDoc, FunctionDoc, Holder, ResidentDoc
from gpufaas_scheduler.policy_contract import Stateful
from gpufaas_scheduler.world import finish
from gpufaas_scheduler.world.backoff import restored
from gpufaas_scheduler.world.batch_size import Room
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import WAITING
from gpufaas_scheduler.world.conditions import Conditions
from gpufaas_scheduler.world.costs import Costs
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.ready import ReadyCopies
from gpufaas_scheduler.world.world import World

WAITING_KEPT: Final = 1000
"""This many waiting calls are kept. Gateways send later ones again with their age; they come behind these."""

LOCAL_KEPT: Final = 100
"""This many calls of each local queue are kept."""


# --- state to docs ----------------------------------------------------------------------------------------------------


def call_doc(call: Call, now: Seconds) -> CallDoc:
    copy = call.copy
    return CallDoc(
        call=call.id,
        function=call.function,
        number=call.number,
        age_s=now - call.arrived_at,
        deadline_in_s=None if call.deadline is None else call.deadline - now,
        left=call.left,
        note=call.note,
        refusals=call.refusals,
        aborted=call.aborted,
        preempted=call.preempted,
        estimate_s=call.estimate_s if call.granted is None else call.granted.estimate_s,
        promised_in_s=None if call.promised_at is None else call.promised_at - now,
        patience_s=None if call.patience_s == inf else call.patience_s,
        copy=0 if copy is None else copy.number,
        cold=call.cold,
        victims=call.victims,
        size=call.size,
        grant=call.grant,
        compute=0 if call.granted is None else call.granted.compute,
        free_in_s=0.0 if call.granted is None else call.granted.free_at - now,
        neighbours=0 if call.granted is None else call.granted.neighbours,
        asked=call.asked,
        ahead=call.granted is not None and call.granted.ahead,
    )


def device_doc(device: DeviceState, now: Seconds) -> DeviceDoc:
    """
    Return the doc of a device. O(residents + local queue). Calls of direct functions are left out: their node knows all
    that matters of them.
    """
    grants = device.grants()
    calls = [call for each in grants for call in each.calls if call.granted is each and call.device is device]
    running = tuple(call_doc(call, now) for call in calls)
    local = [call_doc(call, now) for call, _ in zip(device.local, range(LOCAL_KEPT), strict=False)]
    return DeviceDoc(
        device=device.device,
        closed=device.closed,
        status="busy" if device.holding else "loading" if device.preload is not None else "idle",
        finish_s=finish.left_s(device, now),
        residents=tuple(
            ResidentDoc(
                function=each.owner.id,
                memory=each.memory,
                idle_s=now - each.last_used,
                copy=each.number,
                loading=each.loading,
                ready_in_s=each.ready_at - now,
                running=each.running,
                draining=each in each.owner.draining and not each.silent,  # its node tells of that
                limit=each.limit if each.limit != each.memory else 0,
                asked=each.asked != NOT_ASKED,
                share=each.share,
                reserve=each.reserve,
                slots=each.slots,
                batch=each.batch,
                parts=device.parts_of(each) if each.split else (),
            )
            for each in device.residency
        ),
        order=device.order,
        running=running,
        local=tuple(local),
        local_s=device.local_s,
        preload=None if device.preload is None else device.preload.id,
        free_in_s=device.free_at - now if device.busy else 0.0,
        busy_for_s=now - device.busy_since if device.busy else 0.0,
        busy_s=device.busy_s,
        starts=device.starts,
        served=device.served,
        hits=device.hits,
        misses=device.misses,
        evictions=device.evictions,
        at_s=now,
    )


def function_doc(owner: FunctionState, now: Seconds) -> FunctionDoc:
    """Return the doc of a function. O(copies + buckets of service times)."""
    return FunctionDoc(
        function=owner.declared,
        holders=_holders(owner.active.items()),
        next_copy=owner.number,
        draining=_holders(owner.draining.items()),
        ready=() if owner.ready is None else _holders((each, owner.active[each]) for each in owner.ready),
        called=owner.called,
        called_age_s=now - owner.called_at,
        desired=owner.desired,
        held_s=max(0.0, owner.held_until - now),
        eager=owner.eager,
        excess=owner.excess,
        costs={kind: costs_doc(each) for kind, each in owner.costs.known()},
        starved=owner.starved,
        backoff=None if owner.backoff is None else owner.backoff.doc(now),
        removed=owner.removed,
        waiting=owner.waiting,
        running=owner.running,
        at_s=now,
    )


def _holders(copies: Iterable[tuple[Copy, DeviceState]]) -> tuple[Holder, ...]:
    return tuple((device.id, copy.number) for copy, device in copies)


def engine_doc(world: World, now: Seconds) -> EngineDoc:
    """O(calls) until `WAITING_KEPT` waiting ones are found."""
    demand, clearing, agenda, policy = world.demand, world.clearing, world.agenda, world.policy
    return EngineDoc(
        policy=policy.name,
        grant=world.grant,
        next_number=world.queue.next_number,
        joined=world.joined,
        waiting=tuple(call_doc(each, now) for each in _first_waiting(world)),
        waiting_count=world.calls.waiting,
        reserved_in_s=world.reserved_until - now if now < world.reserved_until else None,
        cleared=None if clearing.device is None or clearing.call is None else (clearing.device.id, clearing.call.id),
        pauses_for_s=max(0.0, clearing.pauses_until - now),
        wakes=tuple((key, at - now) for key, at in agenda.wakes.items()),
        plan=agenda.plan,
        planned=agenda.planned,
        ordered=tuple(agenda.ordered.items()),
        orders=agenda.orders,
        unmet=tuple(agenda.unmet.items()),
        releasing=tuple(agenda.releasing.items()),
        declined=tuple(world.hosts.all_declined(now)),
        policy_state=policy.save() if isinstance(policy, Stateful) else None,
        first_call_age_s=None if demand.first_call_at is None else now - demand.first_call_at,
        offered_s=demand.offered_s,
        offered_age_s=now - demand.offered_at,
        homeless=tuple(world.homeless),
        short=tuple(world.short),
        surplus=tuple(world.surplus),
        orphaned=tuple(world.orphans),
        at_s=now,
    )


def _first_waiting(world: World) -> list[Call]:
    """Return up to `WAITING_KEPT` calls of the global queue and the FIFOs, by number."""
    never_left = (
        each
        for each in world.calls.by_id.values()
        if each.state == WAITING and (not each.left or not each.owner.placed)
    )
    found = [*world.queue.returned, *(islice(never_left, WAITING_KEPT) if world.calls.waiting else ())]
    found.sort(key=lambda call: call.number)
    return found[:WAITING_KEPT]


# --- docs to state ----------------------------------------------------------------------------------------------------


def restored_call(doc: CallDoc, owner: FunctionState, since: Seconds) -> Call:
    """Return the call of *doc*. The caller puts it into its queue or on its device."""
    deadline = None if doc.deadline_in_s is None else since + doc.deadline_in_s
    asked = doc.asked or (None if doc.goal_s is None else Asked(doc.goal_s))
    call = Call(doc.call, owner.id, owner, doc.number, since - doc.age_s, deadline, doc.size, asked=asked)
    call.left, call.note = doc.left, doc.note
    call.refusals = doc.refusals
    call.aborted, call.preempted = doc.aborted, doc.preempted
    call.estimate_s = doc.estimate_s
    call.promised_at = None if doc.promised_in_s is None else since + doc.promised_in_s
    call.patience_s = inf if doc.patience_s is None else doc.patience_s
    call.cold = doc.cold
    call.victims = doc.victims
    call.grant = doc.grant
    return call


def restore_function(owner: FunctionState, doc: FunctionDoc, since: Seconds) -> None:
    """Give *owner* what was learnt of it. Its copies come with their nodes."""
    owner.called = doc.called
    owner.called_at = since - doc.called_age_s
    owner.scale(doc.desired)
    owner.held_until = since + doc.held_s
    owner.eager = doc.eager
    owner.excess = doc.excess
    owner.number = max(owner.number, doc.next_copy)
    if owner.digest != doc.function.digest:
        return  # other code: the costs and failures of the old code do not apply
    for kind, each in doc.costs.items():
        costs = owner.costs[kind]
        if costs is not None:
            restore_costs(costs, each)
    owner.starved = doc.starved
    owner.backoff = None if doc.backoff is None else restored(doc.backoff, since)
    owner.fits_as_of = -1


def costs_doc(costs: Costs) -> CostsDoc:
    return CostsDoc(
        costs.disk_s, costs.service_s, max(costs.size, costs.least), costs.loaded, costs.served, costs.sized,
        costs.measured, costs.least, costs.times_doc(), costs.conditions.docs(),
        costs.batch, dict(costs.loads), costs.read_s,
        None if costs.room is None else (costs.room.calls, costs.room.good, costs.room.tries), costs.parked_bytes,
    )  # fmt: skip


def restore_costs(costs: Costs, doc: CostsDoc) -> None:
    costs.disk_s, costs.service_s = doc.load_s, doc.service_s
    costs.loads, costs.read_s = dict(doc.loads), doc.read_s
    costs.expect()
    costs.size, costs.least = doc.occupation, doc.least
    costs.occupation = max(costs.size, costs.least, costs.floor)
    costs.loaded, costs.served, costs.sized, costs.measured = doc.loaded, doc.served, doc.sized, doc.measured
    costs.restore_times(doc.times)
    costs.conditions = Conditions(doc.ratios)
    costs.batch = doc.batch
    costs.parked_bytes = doc.parked_bytes
    costs.room = None if doc.room is None else Room(*doc.room)


def restore_order(owner: FunctionState, doc: FunctionDoc) -> None:
    """Put its copies into the order of *doc*; copies that are not in it come last."""
    owner.active = _sorted(owner.active, doc.holders)
    owner.draining = _sorted(owner.draining, doc.draining)
    if owner.placed:
        owner.holders = {device.id: device for device in owner.active.values()}
    elif owner.ready is not None:
        owner.ready = ReadyCopies(each for each in _sorted(owner.active, doc.ready) if not each.loading)


def _sorted(copies: dict[Copy, DeviceState], order: tuple[Holder, ...]) -> dict[Copy, DeviceState]:
    rank = {(device, copy): at for at, (device, copy) in enumerate(order)}
    last = len(rank)
    return dict(sorted(copies.items(), key=lambda each: rank.get((each[1].id, each[0].number), last)))


def lost_copies(owner: FunctionState, doc: FunctionDoc) -> bool:
    """Return whether a copy in *doc* did not come back."""
    present = {(device.id, copy.number) for copy, device in owner.active.items()}
    return any(each not in present for each in doc.holders)


def restore_agenda(world: World, doc: EngineDoc, since: Seconds) -> None:
    """Give the engine what its predecessor's policy had asked for, and its own policy the state of that one."""
    agenda = world.agenda
    agenda.wakes = {key: since + in_s for key, in_s in doc.wakes}
    world.set_plan(doc.plan)
    agenda.planned = doc.planned
    agenda.ordered = dict(doc.ordered)
    agenda.orders, agenda.unmet = doc.orders, dict(doc.unmet)
    agenda.releasing = dict(doc.releasing)
    if doc.policy_state is not None and isinstance(world.policy, Stateful):
        world.policy.load(doc.policy_state)
        world.read_policy()


def restore_clearing(world: World, doc: EngineDoc, since: Seconds) -> None:
    """The device that was to be cleared takes no calls, if both it and the call are still there."""
    clearing = world.clearing
    clearing.pauses_until = since + doc.pauses_for_s
    if doc.cleared is not None:
        device, call = world.devices.get(doc.cleared[0]), world.calls.by_id.get(doc.cleared[1])
        if device is not None and call is not None and call.state == WAITING:
            clearing.device, clearing.call = device, call
            world.clears = world.rare = True
            world.shut(device, True)


ENGINE_KEY: Final = "engine"
