"""Grants: calls get a place on a worker, end there, or wait for one in the local queue of a device."""

from typing import Final

from msgspec.structs import replace

from gpufaas_cache_manager.residency import ANSWERED, NOT_ASKED
from gpufaas_core import messages as m
from gpufaas_core.model import CopyId, Seconds, copy_id, copy_of
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.batches import joining
from gpufaas_scheduler.handle.parking import parked_of
from gpufaas_scheduler.handle.parts import Place, hold_parts
from gpufaas_scheduler.handle.reserve import evictions, leave_for_others, reserve, reserve_parts
from gpufaas_scheduler.world.call import Call, GrantState
from gpufaas_scheduler.world.call_state import END, LOCAL, START
from gpufaas_scheduler.world.costs import Costs
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.world import World

TAKEN_OVER: Final = contract.Why("it ran already when this scheduler learnt of it")


def start(
    world: World,
    call: Call,
    device: DeviceState,
    copy: Copy | None,
    victims: tuple[Copy, ...],
    others: tuple[Call, ...] = (),
    places: tuple[Place, ...] = (),
    ahead: Seconds | None = None,
    share: int = 0,
) -> None:
    """
    Grant *call* a grant: a hit on *copy*, or a miss for which *victims* are evicted. The caller has checked it.

    :param others: calls of its function that run together with it, and were taken out of their queue like it
    :param places: of a new copy with several parts, which say the victims then
    :param ahead: they begin once the grant has ended that runs on *copy* now; if that takes longer than this, they come
        back, unless it is 0.0
    :param share: see `World.insert`
    """
    owner, before = call.owner, call.state
    local, after = before == LOCAL, START[before]
    now = world.now
    names: tuple[CopyId, ...] = ()
    if copy is None:
        if places:
            copy, victims = reserve_parts(world, owner, places)
            names = tuple([each.id for each in victims])
        else:
            copy, names = reserve(world, device, owner, victims, share)
        call.cold = True
        call.victims = tuple([copy_of(each) for each in names])  # parked copies, too
        device.misses += 1
    else:
        device.residency.touch(copy, now)
        device.hits += 1
    copy.running += 1
    if copy.limit != copy.memory and copy.running == 1:
        device.residency.hold(copy)
    call.state = after
    call.device = device
    call.copy = copy
    if not owner.marked:
        owner.mark()
    if not device.marked:
        device.mark()
    owner.waiting -= 1
    owner.running += 1
    world.calls.waiting -= 1
    call.grant = world.grant = world.grant + 1
    if owner.placed:
        _hold(world, call, device, copy, others, names, local, ahead is not None)
    else:
        device.direct[call.id] = call
        world.direct.append(call)
        if owner.ready is not None:
            owner.ready.moved(copy, copy.running - 1)
    _tell(world, call, device, copy, names, others, local, ahead or 0.0)


def _hold(
    world: World, call: Call, device: DeviceState, copy: Copy, others: tuple[Call, ...], names: tuple[CopyId, ...],
    local: bool, ahead: bool,
) -> None:  # fmt: skip
    """Make the grant of *call*, by which it holds compute of *device* as long as it should take."""
    owner, now = call.owner, world.now
    costs = owner.costs[device.kind]
    # `Costs.estimate_s` inlined for calls without a size: each call passes here.
    estimate_s = 0.0 if costs is None else costs.estimate_s(call.size) if call.size else costs.service_s
    call.estimate_s = estimate_s
    ready = copy.ready_at if copy.loading and copy.ready_at > now else now
    if device.idle_key is not None:
        world.withdraw(device)
    device.starts += 1
    world.starts.append((now, call, device.id, call.cold, names, local, call.why))
    compute = owner.whole
    if compute >= device.compute and not (ahead or copy.share or copy.split):
        # Nearly each call: it has the device to itself, which spares it all that `_start_beside` does.
        device.free_at = free_at = ready + estimate_s
        call.granted = grant = GrantState(call.grant, (call,), copy, compute, estimate_s, free_at, True)
        device.holding = [grant]
        device.reserved = compute
        device.busy_since = now
    else:
        _start_beside(world, call, device, copy, others, costs, ready, names, ahead)
    if device.local:
        world.overdue.note(device)


def _tell(
    world: World, call: Call, device: DeviceState, copy: Copy, names: tuple[CopyId, ...], others: tuple[Call, ...],
    local: bool, ahead_s: Seconds,
) -> None:  # fmt: skip
    """Tell node and gateway of the grant of *call*, for which the copies *names* go."""
    owner, now = call.owner, world.now
    said = m.Grant(
        world.epoch, call.grant, (call.id, *[each.id for each in others]) if others else (call.id,), owner.id,
        owner.digest, copy.parts or device.parts_of(copy), call.cold, names, local, copy.number,
        None if call.ends is None else call.ends - now, 0.0, (), ahead_s,
    )  # fmt: skip
    if names and world.parked.devices:
        said = replace(said, parked=parked_of(world, device, names))
        for each in (call, *others):
            each.parked = said.parked
    if not call.cold and (copy.loading or call.arrived_at < copy.ready_at):
        said = replace(said, load_s=-1.0 if copy.loading else copy.ready_at - call.arrived_at)
    world.out.append(m.StartCall(said))


def _start_beside(
    world: World,
    call: Call,
    device: DeviceState,
    copy: Copy,
    others: tuple[Call, ...],
    costs: Costs | None,
    ready: Seconds,
    names: tuple[CopyId, ...],
    ahead: bool,
) -> None:
    """Make the grant of a call that may have company: on the device, in the grant, or in the hold of its copy."""
    owner, estimate_s, now = call.owner, call.estimate_s, world.now
    compute = 0 if copy.share or ahead or (copy.running > 1 and owner.shared_hold) else copy.reserve or owner.reserves
    call.granted = grant = GrantState(world.grant, (call,), copy, compute, estimate_s, ready + estimate_s, ahead=ahead)
    if ahead and not others:
        device.free_at = grant.free_at = device.free_at + estimate_s  # it runs alone, after what runs
    elif device.reserved or others or copy.share:
        _in_company(grant, device, others, costs, ready)
    world.begin(device, grant, now)
    if others:
        _take_along(world, grant, device, others, names)
    world.offer(device)  # now that all starts are counted
    if copy.split:
        hold_parts(world, grant, now)


def _in_company(
    grant: GrantState, device: DeviceState, others: tuple[Call, ...], costs: Costs | None, ready: Seconds
) -> None:
    """*grant*, ready at *ready*, does not run alone: note with what, and estimate its time by that."""
    first = grant.calls[0]
    if others:
        grant.calls, grant.open = (first, *others), 1 + len(others)
    beside = [each for each in device.holding if each.copy is not grant.copy]
    own = 0 if grant.ahead else grant.copy.running - 1
    grant.neighbours = len(beside) + own
    if own:
        for each in (*device.holding, *device.beside):
            if each.copy is grant.copy and each.neighbours < grant.neighbours:
                each.neighbours = grant.neighbours
    for each in beside:
        each.neighbours = max(each.neighbours, sum(other.copy is not each.copy for other in device.holding) + 1)
    if costs is not None:
        first.estimate_s = grant.estimate_s = costs.grant_s(first.size, grant.condition)
        grant.free_at = ready + grant.estimate_s
    if grant.ahead:
        device.free_at = grant.free_at = device.free_at + grant.estimate_s


def _take_along(
    world: World, grant: GrantState, device: DeviceState, others: tuple[Call, ...], names: tuple[CopyId, ...]
) -> None:
    """Let *others* run together with the first call of *grant*."""
    first, owner = grant.calls[0], grant.copy.owner
    for call in others:
        local = call.state == LOCAL
        call.state = START[call.state]
        call.device, call.copy = device, grant.copy
        call.grant, call.granted = grant.number, grant
        call.cold, call.victims, call.estimate_s = first.cold, first.victims, first.estimate_s
        world.starts.append((world.now, call, device.id, call.cold, names, local, call.why))
    device.starts += len(others)
    if first.cold:
        device.misses += len(others)
    else:
        device.hits += len(others)
    owner.waiting -= len(others)
    owner.running += len(others)
    world.calls.waiting -= len(others)


def let_parts_go(world: World, grant: GrantState) -> None:
    """*grant* ends on the further devices of its copy."""
    for device, entry in world.parts(grant.copy):
        entry.running -= 1
        if not entry.running:
            device.residency.let_go(entry)
        if grant.compute:
            _give_back(world, grant, device, entry)
        else:
            world.let_go(device, grant)
        next_local(world, device)


def end(world: World, call: Call) -> bool:
    """*call* no longer uses its worker. Return whether other calls of its grant do."""
    device, owner, copy = call.device, call.owner, call.copy
    calls = world.calls
    call.state = END[call.state]
    assert device is not None
    assert copy is not None
    if not owner.marked:
        owner.mark()
    if not device.marked:
        device.mark()
    owner.running -= 1
    if calls.twins and calls.by_id.get(call.id) is not call:
        calls.twins.pop((call.id, device.id), None)
    else:
        del calls.by_id[call.id]
    grant = call.granted
    if grant is not None:
        call.granted = None  # they refer to each other
        if grant.open > 1:
            grant.open -= 1
            return True
    copy.running = runs = copy.running - 1
    if not runs:
        if copy.limit != copy.memory:
            device.residency.let_go(copy)
        if copy.asked == ANSWERED:
            copy.asked = NOT_ASKED
    if grant is None:
        del device.direct[call.id]
        if owner.ready is not None:
            owner.ready.moved(copy, runs + 1)
    elif grant.alone:
        device.holding = []
        device.reserved = 0
        device.busy_s += world.now - device.busy_since
    else:
        _end_beside(world, grant, device)
    return False


def _end_beside(world: World, grant: GrantState, device: DeviceState) -> None:
    """*grant* ends, which may have company. Its copy does not count it any more."""
    if grant.copy.split:
        let_parts_go(world, grant)
    if grant.compute:
        _give_back(world, grant, device, grant.copy)
    elif grant in device.beside:
        del device.beside[grant]
        world.ahead.pop(grant, None)
        if grant.ahead:
            world.judge(device)
    else:
        device.others.remove(grant)


def _give_back(world: World, grant: GrantState, device: DeviceState, copy: Copy) -> None:
    """*grant* ends, which holds compute of *device*, where its copy is *copy*: another grant takes it, or nobody."""
    if copy.running and _hand_on(world, grant, device):
        return
    world.let_go(device, grant)
    _begin_others(world, device)


def _begin_others(world: World, device: DeviceState) -> None:
    """Let the grants that wait for compute have what is spare."""
    while device.others and device.lacks(device.others[0].copy.owner) <= 0:
        following = device.others.pop(0)
        owner = following.copy.owner
        following.compute = owner.takes(device)
        costs = owner.costs[device.kind]
        if costs is not None:
            estimate(following, costs, world.now)
        world.begin(device, following, world.now)


def change_share(world: World, device: DeviceState, copy: Copy, share: int, reserve: int = 0) -> None:
    """
    *copy* holds *share* of the compute from now on, or else its grants hold *reserve*: those that run give back what
    they hold, or hold it as far as it is spare.
    """
    owner, before, after = copy.owner, (copy.share, copy.reserve), (share, reserve)
    device.residency.limit_compute(copy, share)
    copy.reserve = reserve
    device.mark()
    world.judge_limits(owner)
    if copy.kept is not None:
        world.crowded = world.rare = True
    if after != before and owner.placed and not copy.split:
        takes = owner.takes(device)
        for grant in [each for each in device.holding if each.copy is copy]:
            world.let_go(device, grant)
            grant.compute, grant.alone = min(takes, max(device.spare, grant.compute)), False
            world.begin(device, grant, world.now)
        if before[0] and not share:
            free = [each for each in device.beside if each.copy is copy and not each.ahead]
            for grant in free[:1] if owner.shared_hold else free:
                del device.beside[grant]
                device.others.append(grant)
            _begin_others(world, device)
        next_local(world, device)
    world.offer(device)
    world.withdraw_full(device)


def _hand_on(world: World, grant: GrantState, device: DeviceState) -> bool:
    """Another grant of the same copy, which runs or went ahead, holds the compute from now on. False: there is none."""
    copy = grant.copy
    for heir in device.beside:
        if heir.copy is copy:
            break
    else:
        return False
    device.holding.remove(grant)
    del device.beside[heir]
    heir.compute = grant.compute
    if heir.ahead:
        heir.ahead, heir.free_at = False, world.now + heir.estimate_s
        world.ahead.pop(heir, None)
        heir.alone = heir.size == 1 and heir.copy.owner.whole >= device.compute
    device.holding.append(heir)
    world.judge(device)
    return True


def estimate(grant: GrantState, costs: Costs, now: Seconds) -> None:
    """Estimate the end of *grant*, which begins to run *now*."""
    call = grant.calls[0] if grant.alone else next(each for each in grant.calls if each.granted is grant)
    estimate_s = costs.estimate_s(call.size) if grant.alone else costs.grant_s(call.size, grant.condition)
    call.estimate_s = grant.estimate_s = estimate_s
    grant.free_at = now + estimate_s


def next_local(world: World, device: DeviceState) -> None:
    """
    Start the first calls of the local queue of a device that has spare compute, or where they can join others; if there
    is none, the policy may use the device.

    A local queue goes back if copies that stay there hold the compute of its first call: no end of a grant starts it.
    """
    mixed = world.mixed
    if (device.reserved >= device.compute and not (mixed and device.open)) or device.preload is not None or device.gone:
        return
    while device.local:
        call = device.local[0]
        copy = call.copy
        assert copy is not None
        if copy.running and copy.running >= (copy.slots or call.owner.slots):
            return  # another copy's call has ended: this copy's calls have their slots yet
        if (mixed or device.reserved) and not copy.share:
            joins = copy.running and call.owner.shared_hold
            if not joins and (device.reserved >= device.compute or not obtain(world, device, call.owner)):
                if not device.reserved:
                    return_all(world, device)
                return
        others = _take_joining(world, device, call, copy) if call.owner.batches else ()
        world.pull(device, call)
        start(world, call, device, copy, (), others)
        if device.reserved >= device.compute and not (call.owner.shared_hold and device.open):
            return
    world.offer(device)


def _take_joining(world: World, device: DeviceState, call: Call, copy: Copy) -> tuple[Call, ...]:
    """Take the calls out of their queues that start with *call*, the first of the local queue of *device*."""
    others = tuple(joining(world, device, call, copy))
    for each in others:
        take_from_queue(world, device, each)
    return others


def take_from_queue(world: World, device: DeviceState, call: Call) -> None:
    """Take *call* out of the local queue of *device*, or out of the global queue."""
    if call.state == LOCAL:
        world.pull(device, call)
    else:
        world.queue.remove(call)


def obtain(world: World, device: DeviceState, owner: FunctionState) -> bool:
    """
    Return whether *device* has the compute for a call of *owner* on a copy that is there. Idle copies that hold
    shares are evicted for it.
    """
    leaving = None if device.shut else world.leaving(device, owner)
    if leaving is None:
        return False
    commands = evictions(world, device, leaving)
    leave_for_others(world, device, leaving)
    world.out += commands
    return True


def return_local(world: World, device: DeviceState, call: Call) -> None:
    world.pull(device, call)
    world.calls.back(call)
    world.queue.put_back(call)
    world.note_waiting(call.owner)
    world.offer(device)
    world.freed = True


def return_all(world: World, device: DeviceState) -> None:
    """The local queue of *device* goes back to the global queue, and a run plans for its calls."""
    for call in reversed(list(device.local)):
        return_local(world, device, call)


def grant_again(world: World, call: Call, device: DeviceState, copy: Copy) -> None:
    """Grant a call its grant again: it has its place, but its gateway has not heard of it."""
    world.grant = number = world.grant + 1
    owner = call.owner
    if owner.placed:  # else its node may refuse it by its first number
        call.grant = number
    victims = tuple(copy_id(*each) for each in call.victims)
    grant = m.Grant(
        world.epoch, number, (call.id,), owner.id, owner.digest, device.parts_of(copy), call.cold, victims,
        copy=copy.number, within_s=None if call.ends is None else call.ends - world.now,
    )  # fmt: skip
    world.out.append(m.StartCall(grant))
