"""
Events of calls: a call arrives or finishes, its caller leaves, its node refuses it, or its deadline comes.
"""

from typing import Final

from gpufaas_core import messages as m
from gpufaas_core.model import Asked, CallId, Seconds, copy_id
from gpufaas_core.plausible import MAX_S
from gpufaas_core.units import format_bytes
from gpufaas_scheduler import contract
from gpufaas_scheduler.contract import NEVER
from gpufaas_scheduler.handle.ahead import send_ahead, send_ahead_to
from gpufaas_scheduler.handle.batches import adapt
from gpufaas_scheduler.handle.commit_calls import rejected, variant_for
from gpufaas_scheduler.handle.copies import balance, drop, forget_if_done, is_held_back, place_direct, serve_fifo, wake
from gpufaas_scheduler.handle.follow import follow
from gpufaas_scheduler.handle.grants import TAKEN_OVER, end, grant_again, next_local, start
from gpufaas_scheduler.handle.settle import run_policy, settle, start_as_planned, start_nested
from gpufaas_scheduler.handle.waiting import backs_off, give_up, join_queue, leave_stranded, place_again, refuse_failing
from gpufaas_scheduler.policy_contract import ARRIVAL
from gpufaas_scheduler.world import backoff
from gpufaas_scheduler.world.call import Call, GrantState
from gpufaas_scheduler.world.call_state import RUNNING
from gpufaas_scheduler.world.costs import Costs
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.kept import kept_out
from gpufaas_scheduler.world.world import World

MAX_RETRY_AFTER_S: Final = 60.0
APART_S: Final[Seconds] = 0.2
"""No call of a function goes ahead for so long after one has come back since the call before it took too long."""


def arrived(world: World, event: m.Arrived) -> None:
    owner = world.functions.get(event.function)
    age_s = event.age_s
    now = world.now
    if age_s and _came_again(world, event):
        return
    if event.call in world.calls.by_id:
        world.ignored["Arrived"] += 1
        return
    if owner is None or not owner.fits or owner.fits_as_of != world.fleet or owner.backoff is not None or owner.removed:
        refused = _why_not(world, owner, event)
        if refused is not None:
            world.out.append(refused)
            return
        assert owner is not None
    deadline = event.deadline
    outer = ends = None
    if event.outer is not None:
        outer, ends = _outer_of(world, event.outer, deadline)
        deadline = deadline if ends is None else ends
    if deadline is not None and deadline <= now:
        world.out.append(m.RejectCall(event.call, "deadline", "the deadline had passed when the call arrived"))
        return
    queue = world.queue
    asked = event.asked or (None if event.goal_s is None else Asked(event.goal_s))
    call = Call(event.call, owner.id, owner, queue.next_number, now, deadline, event.size, event.endless, asked)
    if owner.gated:
        if not _passes(world, call, age_s):
            return
        owner = call.owner
    if outer is not None:
        world.nests.add(call, outer, ends)
        outer.owner.nests = world.tangled = True
    if age_s:
        _back_date(world, call, age_s)
    else:
        queue.next_number += 1
    world.calls.wait(call)
    world.demand.note(owner, world.largest, now)
    if age_s:
        _wait_among_others(world, call)
    elif owner.placed:
        if owner.flow.head == NEVER:  # else that is noted already
            world.note_waiting(owner)
        queue.append(call)
        if outer is not None:
            start_nested(world)
        if world.freed:  # local queues went back: one scheduling run for all
            world.freed = False
            settle(world)
        elif world.idle_devices or world.agenda.watches & ARRIVAL:
            run_policy(world)
    else:
        place_direct(world, call)
    if call.state != RUNNING:
        _has_to_wait(world, call, age_s)


def _passes(world: World, call: Call, age_s: Seconds) -> bool:
    """Return whether *call* is admitted, perhaps as one of another function. A function scaled to zero is woken."""
    owner, admission = call.owner, world.admission
    if owner.asks_admission and admission is not None and not age_s:  # else it was admitted when it came
        action = admission.admit(world.view, call)
        if isinstance(action, contract.Reject):
            refused = rejected(action)
            if isinstance(refused, m.RejectCall):
                world.demand.note_further(owner, 1, world.now)  # a plan for all calls would admit it
                world.out.append(refused)
                return False
            world.refusals.append(contract.Refusal(action, refused))
        elif action is not None:
            chosen = variant_for(world, owner, action.function)
            if isinstance(chosen, str):
                world.refusals.append(contract.Refusal(action, chosen))
            else:
                owner, call.owner, call.function = chosen, chosen, chosen.id
    if owner.desired == 0:
        wake(world, owner)
    return True


def _has_to_wait(world: World, call: Call, age_s: Seconds) -> None:
    owner = call.owner
    if owner.placed and (owner.batches or world.takes_ahead):
        send_ahead(world, owner)
        if call.state == RUNNING:
            return
    if world.keeps:
        if owner.plan:
            start_as_planned(world, owner)
            if call.state == RUNNING:
                return
        # A call that waited elsewhere goes on waiting: after a takeover, not all devices have joined yet.
        if not age_s and (why := kept_out(world, owner)) is not None:
            give_up(world, call)
            world.out.append(m.RejectCall(call.id, "no_room", why))
            return
        if world.agenda.by_name:
            leave_stranded(world, owner)
    # A full queue refuses only calls that have to wait, which is known only here.
    if owner.waiting > owner.max_queue or world.calls.waiting > world.max_queue:
        _overloaded(world, call)
    elif call.deadline is not None:
        world.calls.watch(call)


def _outer_of(world: World, said: m.Outer, deadline: Seconds | None) -> tuple[Call | None, Seconds | None]:
    """Return the call that made this one, and its deadline if that comes before *deadline*."""
    outer, ends = world.nests.outer_of(said)
    return outer, ends if ends is not None and (deadline is None or ends < deadline) else None


def _wait_among_others(world: World, call: Call) -> None:
    """Let a call that has waited elsewhere wait here; the scheduling run after the event plans for all."""
    join_queue(world, call)
    world.freed = True
    if not call.owner.placed:
        serve_fifo(world, call.owner)


def _why_not(world: World, owner: FunctionState | None, event: m.Arrived) -> m.RejectCall | None:
    if owner is None:
        return m.RejectCall(event.call, "unknown_function", f"no function {event.function} is deployed")
    if backs_off(owner) and (owner.waiting or owner.loading or is_held_back(world, owner)):
        return refuse_failing(world, event.call, owner)  # the first call after the pause tries it
    if owner.removed:
        return m.RejectCall(event.call, "removed", f"function {owner.id} was removed")
    if not world.fits_somewhere(owner) and world.devices:
        return _no_device(world, event.call, owner)
    return None


def _came_again(world: World, event: m.Arrived) -> bool:
    """A gateway says that a call still waits. Return whether the call is known here, and has been dealt with."""
    call = world.calls.by_id.get(event.call)
    if call is None:
        return False
    if call.state != RUNNING:
        if event.deadline is not None and event.deadline != call.deadline:
            call.deadline = event.deadline
            world.calls.watch(call)
    elif call.why is TAKEN_OVER or call.aborted:
        assert call.device is not None
        runs = f"call {call.id} has begun on {call.device.id} already, and is not run twice"
        world.out.append(m.RejectCall(call.id, "refused", runs))
    else:
        assert call.device is not None
        assert call.copy is not None
        grant_again(world, call, call.device, call.copy)
    return True


def _back_date(world: World, call: Call, age_s: Seconds) -> None:
    """Give a call that waited elsewhere its old place, or one before the calls that arrived later."""
    remembered = world.older.remembered.pop(call.id, None)
    if remembered is not None:
        doc, since = remembered
        call.number = doc.number
        call.arrived_at = since - doc.age_s
        call.refusals = doc.refusals
        call.left, call.note = True, doc.note
        return
    call.arrived_at -= age_s
    number = world.queue.next_number
    for each in reversed(world.calls.by_id.values()):  # nearly in order of arrival
        if each.state != RUNNING:
            if each.arrived_at <= call.arrived_at:
                break
            number = min(number, each.number)
    call.number = number
    if number == world.queue.next_number:
        world.queue.next_number += 1
    else:
        call.left = True


def _no_device(world: World, call: CallId, owner: FunctionState) -> m.RejectCall:
    allowed = [each for each in world.devices.values() if owner.allows(each)]
    if not allowed:
        asked = ", ".join(map(str, owner.constraints))
        why = f"function {owner.id} may run on no device that is there now: none satisfies its constraints {asked}"
        return m.RejectCall(call, "no_device", why)
    most = max(each.compute for each in allowed)
    if (wanted := min(owner.takes(each) for each in allowed)) > most:
        why = f"needs {wanted} % of the compute of a device, and the most that a device has is {most} %"
        return m.RejectCall(call, "no_device", f"function {owner.id} {why}")
    largest = max(allowed, key=lambda each: each.device.memory)
    needs = []
    for kind, size in world.largest_for(owner).items():
        costs = owner.costs[kind]
        need = "cannot run" if costs is None else f"needs {format_bytes(costs.occupation)}"
        needs.append(f"{need} on {kind} (largest: {format_bytes(size)})")
    message = (
        f"function {owner.id} fits no device{' that it may run on' if owner.constraints else ''}: it "
        f"{', '.join(needs)}; the largest device is {largest.id} with "
        f"{format_bytes(largest.device.memory)}. Deploy a smaller model, or add a larger device"
    )
    return m.RejectCall(call, "no_device", message)


def _overloaded(world: World, call: Call) -> None:
    owner = call.owner
    full = f"function {owner.id} has {owner.waiting - 1} calls waiting"
    if owner.waiting <= owner.max_queue:
        full = f"{world.calls.waiting - 1} calls wait on the platform"
    costs = next((owner.costs[kind] for kind in world.largest_for(owner)), None)
    if owner.waiting > owner.max_queue:
        calls, places = owner.waiting, max(1, owner.copies) * (1 if owner.placed else owner.slots)
    else:
        calls, places = world.calls.waiting, max(1, len(world.devices))
    drain_s = 1.0 * calls / places if costs is None else costs.drain_s(calls, places)
    give_up(world, call)
    world.out.append(m.RejectCall(call.id, "overloaded", full, min(MAX_RETRY_AFTER_S, max(0.1, drain_s))))


def finished(world: World, event: m.Finished) -> None:
    call = world.calls.by_id.get(event.call)
    if call is None or call.state != RUNNING or (device := call.device) is None or device.id != event.device:
        call = world.calls.twins.get((event.call, event.device))
        device = None if call is None else call.device
        if call is None or device is None:
            world.ignored["Finished"] += 1
            return
    owner, grant = call.owner, call.granted
    if world.nested and (call.copy in owner.draining or world.nests.has_made(call)):
        world.tangled = True  # a nested call may have its slot; another call has made what it was taken to have made
    device.served += 1
    if event.further > 0:
        device.served += event.further
        device.hits += event.further
        world.demand.note_further(owner, event.further, world.now)
    if event.ok:
        if owner.backoff is not None:
            _recovers(world, owner, owner.backoff, call.cold)
        costs = owner.costs[device.kind]
        if costs is not None and 0.0 <= event.service_s <= MAX_S:
            if grant is None:  # calls of direct functions are not estimated by size
                costs.learn_service(event.service_s, 0.0, world.rate)
            elif grant.alone or not (owner.batches or grant.neighbours or grant.copy.share or grant.size > 1):
                costs.learn_service(event.service_s, call.size, world.rate)
            else:
                _learn_beside(world, call, grant, device, costs, event.service_s)
            if not costs.noted and world.learn:
                costs.noted = True
                world.learnt[(owner.id, device.kind)] = None
    if owner.placed:
        if (
            not end(world, call)
            and not (device.ahead and _goes_on(device, grant))
            and (
                owner.waiting != world.queue.count  # nearly always where several functions wait
                or grant is None
                or not grant.alone
                or world.follows is None
                or not follow(world, device, grant.copy)
            )
        ):
            next_local(world, device)
            world.freed = True
        if owner.waiting and (owner.batches or device.ahead):
            send_ahead_to(world, device)
    else:
        _direct_ends(world, call, device)
    if owner.removed:
        forget_if_done(world, owner)


def _direct_ends(world: World, call: Call, device: DeviceState) -> None:
    """*call* of a direct function has ended on *device*: the next of its function begins there."""
    end(world, call)
    owner, copy = call.owner, call.copy
    waiting = owner.flow
    assert copy is not None
    if waiting.calls and copy in owner.active:
        if copy.running < owner.slots:
            following = waiting.calls[0]
            waiting.remove(following)
            following.started_at = world.now
            start(world, following, device, copy, ())
    elif copy.running == 0 and (
        # Others may wait for the memory of an idle copy. A next copy of *owner* does not, see `fits`.
        world.surplus or world.homeless or world.queue.count or world.nested
        or (world.short and len(world.short) > (owner.id in world.short))
    ):  # fmt: skip
        world.freed = True
    if device.local and not copy.running:
        next_local(world, device)  # the first of its local queue may need the share of this copy


def _goes_on(device: DeviceState, grant: GrantState | None) -> bool:
    """Whether what went ahead of *grant* runs now, so that nothing became free."""
    return grant is not None and bool(device.holding) and device.holding[0].early and grant.copy.running == 1


def _learn_beside(
    world: World, call: Call, grant: GrantState, device: DeviceState, costs: Costs, service_s: Seconds
) -> None:
    """*call* of *grant*, which may have had company, took *service_s*."""
    first = grant.open == grant.size  # each call of a batch says the same
    if not (grant.neighbours or grant.copy.share or grant.size > 1):
        costs.learn_service(service_s, call.size, world.rate)  # one call with all of the compute
    elif first:
        costs.learn_beside(service_s, grant.calls[0].size, grant.condition, world.rate)
    if first and call.owner.batches:
        adapt(world, grant, device, costs, service_s)


def _recovers(world: World, owner: FunctionState, failing: backoff.Backoff, cold: bool) -> None:
    """A call succeeded of a function whose loads failed recently."""
    if failing.served(world.now, cold):
        owner.backoff = None
        owner.mark()
        balance(world, owner)


def cancelled(world: World, event: m.CallerLeft) -> None:
    call = world.calls.by_id.get(event.call)
    if call is None or call.aborted:
        if world.lost.pop(event.call, None) is None:
            world.ignored["Cancelled"] += 1
    elif call.state == RUNNING:
        world.out.append(m.Abort(call.id, world.calls.abort(call)))
    else:
        give_up(world, call)


def refused_call(world: World, event: m.NodeRefused) -> Call | None:
    """
    Return the call that gets another grant because of *event*; None: it is of an older grant than the call has now.

    A node may refuse a grant twice: a miss, for example, when the command comes and when the call comes.
    """
    lost = world.lost.get(event.call)
    if lost is not None and lost.device is not None and lost.device.id == event.device:
        return lost
    call = world.calls.by_id.get(event.call)
    if call is None or call.state != RUNNING or call.device is None or call.device.id != event.device:
        return None
    grant = call.granted
    number = call.grant if grant is None else 0 if grant.adopted else grant.number
    older = event.number and number and (event.epoch, event.number) < (world.epoch, number)
    return None if older else call


def refused(world: World, event: m.NodeRefused) -> None:
    call, lost = refused_call(world, event), world.lost.pop(event.call, None)
    if call is None:
        world.ignored["Refused"] += 1
        return
    preempted, call.preempted = call.preempted, False
    if event.blameless or preempted or (call.granted is not None and call.granted.early):
        call.refusals -= 1
    if call is lost:
        place_again(world, call, event.reason)
        if not call.owner.placed:
            serve_fifo(world, call.owner)
        world.freed = True
        return
    device, copy, owner, grant = call.device, call.copy, call.owner, call.granted
    assert device is not None
    assert copy is not None
    end(world, call)
    if grant is not None and grant.early:
        device.hits -= 1
        if not grant.taken_back:
            owner.ahead_after = world.now + APART_S
    elif preempted:
        pass  # it had begun
    elif not call.cold:
        device.hits -= 1
    elif not event.opened:
        device.misses -= 1
        if copy.loading and device.residency.copies.get(copy.id) is copy:
            drop(world, device, copy)
            # The node may not have evicted the victims yet, and their memory is promised: evict them now. Nor has it
            # woken the copy, if that was parked there.
            maybe_parked = ((owner.id, copy.number),) if device.device.parks else ()
            for function, number in (*call.victims, *maybe_parked):
                if copy_id(function, number) not in device.residency.copies:
                    parked = world.parked.find(device, function)
                    to = "host" if parked is not None and parked.number == number else "none"
                    world.out.append(m.EvictCopy(function, device.id, number, to))
    place_again(world, call, event.reason)
    if not owner.placed:
        serve_fifo(world, owner)
    if owner.placed or device.local:
        next_local(world, device)
    if owner.removed:
        forget_if_done(world, owner)
    world.freed = True


def woken(world: World, _event: m.Woken) -> None:
    now = world.now
    if world.agenda.wake(now):
        world.freed = True
    if world.held_back:
        # By name, since they may be due at one moment, and a successor does not know which was held back first.
        for _, owner in sorted(world.held_back.items()):
            if not is_held_back(world, owner):
                balance(world, owner)
    for call in world.calls.overdue(now):
        where = "in the queue"
        if call.device is not None:
            where = f"in the local queue of {call.device.id}"
        waited = f"the call waited {now - call.arrived_at:.3f} s {where}, until its deadline"
        give_up(world, call)
        world.out.append(m.RejectCall(call.id, "deadline", waited))
