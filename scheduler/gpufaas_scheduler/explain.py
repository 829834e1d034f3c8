"""Answers for people: the status of the engine, and why a call is where it is."""

from collections.abc import Collection, Iterable
from typing import Final

from msgspec.structs import astuple, replace

from gpufaas_core.explanation import Considered, Explanation, ServiceEstimate
from gpufaas_core.model import (
    CallId,
    DeviceId,
    DeviceStatus,
    EngineStatus,
    Failing,
    Function,
    FunctionId,
    ParkedStatus,
    PlannedCopy,
    PlanStatus,
    Replica,
    ResidentStatus,
    Seconds,
    copy_id,
    name_of,
)
from gpufaas_core.plans import Snapshot
from gpufaas_core.taken import why_stale
from gpufaas_scheduler import contract
from gpufaas_scheduler.check import Holding
from gpufaas_scheduler.fit import Reason
from gpufaas_scheduler.policy_contract import Executing, Explaining
from gpufaas_scheduler.world import finish
from gpufaas_scheduler.world.agenda import batch_key
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import LOCAL, RUNNING, WAITING
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.kept import kept_out
from gpufaas_scheduler.world.parked import ParkedCopies
from gpufaas_scheduler.world.places import is_loading
from gpufaas_scheduler.world.world import World

_DEVICES: Final = 3
"""This many devices are named that have no room."""

_NAMED: Final = 20
"""This many calls that were passed over are named; all are counted."""


def explain(world: World, call: CallId, now: Seconds) -> Explanation | None:
    """
    Return why a call waits, or why it was started on its device if that is remembered; else None.
    O(starts remembered + waiting calls).

    *call* may be the part of the id before ``#``, which a caller may have sent; then the newest such call counts.
    """
    known, sent = world.calls.by_id.get(call), f"{call}#"
    if known is None:
        named = [each for each in world.calls.by_id.values() if each.id.startswith(sent) and each.state != RUNNING]
        known = named[-1] if named else None
    if known is not None and known.state != RUNNING:
        return _explain_wait(world, known, now)

    def is_meant(started: Call) -> bool:
        return started is known if known is not None else started.id == call or started.id.startswith(sent)

    for index in range(len(world.starts) - 1, -1, -1):
        if is_meant(world.starts[index][1]):
            return _explain_start(world, index)
    found = next((each for each in reversed(world.direct) if is_meant(each)), None)
    return None if found is None else _explain_direct(world, found)


def _explain_wait(world: World, waiting: Call, now: Seconds) -> Explanation:
    world.now = now
    why = waiting.why
    if waiting.state == WAITING:
        why = _why_it_waits(world, waiting)
    before = [each.id for at, each, *_ in world.starts if each.number > waiting.number and at >= waiting.arrived_at]
    return Explanation(
        call=waiting.id,
        function=waiting.function,
        policy=world.policy.name,
        state="waiting" if waiting.state == WAITING else "local",
        at=now,
        waited_s=now - waiting.arrived_at,
        device=None if waiting.device is None else waiting.device.id,
        rule="" if why is None else why.rule,
        options=_options(why),
        overtaken_by=tuple(before[:_NAMED]),
        overtaken_by_count=len(before),
        service=_service(world, waiting, waiting.device),
    )


def _explain_direct(world: World, call: Call) -> Explanation | None:
    device = call.device
    if device is None:
        return None
    at = call.arrived_at if call.started_at is None else call.started_at
    where = "the copy with the fewest calls"
    if call.cold:
        where = "a new copy, since no other one had a free slot"
    elif at > call.arrived_at:
        where = "the first copy that had a free slot"
    return Explanation(
        call=call.id,
        function=call.function,
        policy=world.policy.name,
        state="running" if world.calls.by_id.get(call.id) is call else "ended",
        at=at,
        waited_s=at - call.arrived_at,
        device=device.id,
        hit=not call.cold,
        tier=_tier(call),
        victims=tuple(name for each in call.victims if (name := copy_id(*each)) not in call.parked),
        rule=f"it started without the policy, on {where}",
        service=call.owner.service_estimate(device.kind, 0.0),
        parked=call.parked,
    )


def _tier(call: Call) -> str:
    return call.copy.tier if call.cold and call.copy is not None else ""


def _why_it_waits(world: World, call: Call) -> contract.Why:
    clearing, owner = world.clearing, call.owner
    if clearing.call is call and clearing.device is not None:
        return contract.Why(f"smaller calls kept it waiting, so {clearing.device.id} takes no others until it has room")
    if not owner.placed:
        waits = "once a copy has a free slot" if owner.active else f"but no device has room: {_no_room(world, owner)}"
        return contract.Why(f"it starts without the policy, {waits}")
    why = world.policy.weigh(world.view, call) if isinstance(world.policy, Explaining) else None
    why = why or contract.Why("the policy has not placed it")
    gathers_until = world.agenda.wakes.get(batch_key(call.function))
    if gathers_until is None:
        return why
    left_s = max(0.0, gathers_until - world.now)
    return contract.Why(f"an idle device waits up to {left_s:.3f} s for more calls of its batch", why.options)


def _service(world: World, call: Call, device: DeviceState | None) -> ServiceEstimate | None:
    owner = call.owner
    if device is not None:
        # In a local queue, its estimate is what it adds to that of its batch.
        estimate_s = None if call.state == LOCAL and owner.batch_max > 1 else call.estimate_s
        return owner.service_estimate(device.kind, call.size, estimate_s)
    return next((owner.service_estimate(kind, call.size) for kind in world.largest_for(owner)), None)


def _explain_start(world: World, index: int) -> Explanation:
    at, call, device, cold, victims, local, why = world.starts[index]
    starts = list(world.starts)
    batch = [each.id for _, each, *_ in starts if each.grant == call.grant and each is not call]
    passed = [each for _, each, *_ in starts[index + 1 :] if each.number < call.number]
    passed += [
        each
        for each in world.calls.by_id.values()
        if each.state != RUNNING and each.owner.placed and each.number < call.number
    ]
    passed.sort(key=lambda each: each.number)
    before = [each.id for then, each, *_ in starts[:index] if each.number > call.number and then >= call.arrived_at]
    return Explanation(
        call=call.id,
        function=call.function,
        policy=world.policy.name,
        state="running" if world.calls.by_id.get(call.id) is call else "ended",
        at=at,
        waited_s=at - call.arrived_at,
        device=device,
        hit=not cold,
        tier=_tier(call),
        via="local" if local else "global",
        victims=tuple(each for each in victims if each not in call.parked),
        rule="" if why is None else why.rule,
        options=_options(why),
        passed_over=tuple(each.id for each in passed[:_NAMED]),
        passed_over_count=len(passed),
        overtaken_by=tuple(before[:_NAMED]),
        overtaken_by_count=len(before),
        batch=tuple(batch),
        service=_service(world, call, world.devices.get(device)),
        parked=call.parked,
    )


def _options(why: contract.Why | None) -> tuple[Considered, ...]:
    return () if why is None else tuple(Considered(*each) for each in why.options)


def status(world: World, now: Seconds) -> EngineStatus:
    """O(devices, residents, functions)."""
    return EngineStatus(
        policy=world.policy.name,
        devices=tuple(_device_status(each, world.parked, now) for each in world.devices.values()),
        queued={each.id: each.waiting for each in world.functions.values() if each.waiting},
        running={each.id: each.running for each in world.functions.values() if each.running},
        desired={each.id: each.target for each in world.functions.values() if each.desired is not None},
        failing={
            each.id: Failing(failing.reason, failing.failures, now - failing.since, failing.left_s(now))
            for each in world.functions.values()
            if (failing := each.backoff) is not None and failing.reason is not None
        },
        lacking={
            each.id: _no_room(world, each)
            for each in world.short.values()
            if not each.loading and each.backoff is None and not (each.before is not None and each.staging)
        },
        kept_out=_kept_out(world),
        rolling=tuple(each.after.id for each in world.functions.values() if each.after is not None and each.draining),
        plan=_plan_status(world),
        held=tuple(each.id for each in world.functions.values() if each.desired is not None and each.held_until > now),
        ordered=dict(world.agenda.ordered),
        unmet=dict(world.agenda.unmet),
        offers=tuple(world.agenda.offers.values()),
    )


def snapshot(world: World, now: Seconds, profiled: bool) -> Snapshot:
    """Return what plans are made from, but the plan. *profiled*: with what was learnt. O(functions x kinds)."""
    world.now = now
    devices = tuple(each.device for each in world.devices.values() if not each.closed)
    kinds = dict.fromkeys(each.kind for each in devices) if profiled else {}
    succeeded = {each.before for each in world.functions.values() if each.before is not None}
    functions: list[Function] = []
    rates: dict[str, float] = {}
    for owner in world.functions.values():
        name = name_of(owner.id)
        rates[name] = rates.get(name, 0.0) + world.view.rate(owner)
        if owner.removed or owner in succeeded:
            continue
        learnt = {kind: costs.profile() for kind in kinds if (costs := owner.costs[kind]) is not None}
        for kind, each in learnt.items():
            if each.taken is not None and why_stale(each.taken, [one for one in devices if one.kind == kind]):
                learnt[kind] = replace(each, taken=None)
        declared = owner.declared
        functions.append(replace(declared, profiles={**declared.profiles, **learnt}) if learnt else declared)
    return Snapshot(tuple(functions), devices, rates)


def _plan_status(world: World) -> PlanStatus | None:
    """Return what became of the plan in force. O(replicas, functions)."""
    plan, owners = world.agenda.plan, dict[str, list[FunctionState]]()
    if plan is None or not plan.replicas:
        return None
    for each in world.functions.values():
        owners.setdefault(name_of(each.id), []).extend(() if each.removed else (each,))
    copies = [
        PlannedCopy(*astuple(each), *_became(world, each, owners.get(each.function, []))) for each in plan.replicas
    ]
    return PlanStatus(plan.version, tuple(copies))


def _became(world: World, replica: Replica, owners: list[FunctionState]) -> tuple[str, ...]:
    """Return the state of *replica*, of which *owners* are the revisions, and the reason."""
    device = world.devices.get(replica.device)
    if device is None or device.closed:
        return "away", f"device {replica.device} is {'drained' if device else 'not there'}"
    for owner in owners:
        if device.id in owner.holders:
            return "loading" if is_loading(device, owner) else "resident", _refused(world, owner, device)
    return "absent", _why_absent(world, owners[-1], device) if owners else "it is not deployed"


def _why_absent(world: World, owner: FunctionState, device: DeviceState) -> str:
    if not owner.placed:
        return "it is a CPU function, or holds a share with each copy: a plan has no part in its copies"
    if owner.id in device.copies:
        return "the copy that is there takes no more calls, and goes when these have ended"
    if owner.backoff is not None:
        return owner.starved or owner.backoff.reason or "its last load failed: a call has to try the next one"
    found = world.fits(device, owner, starts=False)
    if isinstance(found, Reason):
        return found.say(owner.id, device.id, device.kind)
    return _refused(world, owner, device) or "it is not loaded yet"


def _refused(world: World, owner: FunctionState, device: DeviceState) -> str:
    """Return why the policy was refused what it last tried for the copy there, as its plan says; empty: it was not."""
    policy = world.policy
    return policy.reasons.get((owner.id, device.id), "") if isinstance(policy, Executing) else ""


def _kept_out(world: World) -> dict[FunctionId, str]:
    if not world.keeps:
        return {}
    found = {each.id: kept_out(world, each) for each in world.functions.values() if not each.removed}
    return {function: why for function, why in found.items() if why is not None}


def _no_room(world: World, owner: FunctionState) -> str:
    """Return why no device takes another copy of *owner*. O(devices x residents)."""
    if owner.placed and owner.copies >= len(world.devices):
        return "a device holds one copy of a model function, and each has one"
    reasons: list[str] = []
    for device in [world.devices[each] for each in owner.plan] or world.devices.values():
        found = world.fits(device, owner, starts=False)
        if isinstance(found, Reason):
            reasons.append(found.say(owner.id, device.id, device.kind))
    more = f"; and {len(reasons) - _DEVICES} more" if len(reasons) > _DEVICES else ""
    return "; ".join(reasons[:_DEVICES]) + more if reasons else "other functions keep their copies"


def _running(device: DeviceState, copy: Copy) -> int:
    """Return the calls that run on *copy*, which counts a batch once."""
    if copy.owner.batch_max < 2:
        return copy.running
    return sum(each.open for each in device.grants() if each.copy.id == copy.id)


def _device_status(device: DeviceState, parked: ParkedCopies, now: Seconds) -> DeviceStatus:
    return DeviceStatus(
        device=device.device,
        used=device.device.memory - device.residency.free - device.residency.held,
        busy=device.busy,
        resident=tuple(
            ResidentStatus(
                function=each.owner.id,
                memory=each.memory,
                running=_running(device, each),
                loading=each.loading,
                pinned=each.pinned or each.owner.copies <= each.owner.min_copies,
                last_used=each.last_used,
                draining=each in each.owner.draining,
                copy=each.number,
                limit=each.limit,
                share=each.share,
                tier=each.tier,
                silent=each.silent,
            )
            for each in device.residency
        ),
        local_queue=len(device.local),
        served=device.served,
        hits=device.hits,
        misses=device.misses,
        evictions=device.evictions,
        estimated_finish_s=finish.left_s(device, now),
        busy_s=device.busy_s + (now - device.busy_since if device.busy else 0.0),
        reserved=device.reserved + device.residency.shares,
        parked=tuple(ParkedStatus(each.owner.id, each.number, each.memory) for each in parked.on(device)),
    )


def holdings(world: World, devices: Iterable[DeviceId], among: Collection[CallId] | None) -> dict[DeviceId, Holding]:
    """See `Engine.holdings`."""
    here = [world.devices[each] for each in devices if each in world.devices]
    parked = world.parked
    found = {
        each.id: Holding(
            dict(each.residency.copies), {call.id for call in each.runs()}, {copy.id for copy in parked.on(each)}
        )
        for each in here
    }
    if among is not None:
        for holding in found.values():
            holding.calls.intersection_update(among)
    return found
