"""Grants: calls get a place on a worker, end there, or wait for one in the local queue of a device."""

from collections.abc import Iterable
from typing import Final

from gpufaas_cache_manager.residency import ANSWERED, NOT_ASKED
from gpufaas_core import messages as m
from gpufaas_core.model import CopyId, Part, copy_id
from gpufaas_scheduler import contract
from gpufaas_scheduler.world.call_state import END, LOCAL, START
from gpufaas_scheduler.world.state import Call, Copy, DeviceState, FunctionState
from gpufaas_scheduler.world.world import World

TAKEN_OVER: Final = contract.Why("it ran already when this scheduler learnt of it")


def start(world: World, call: Call, device: DeviceState, copy: Copy | None, victims: tuple[Copy, ...]) -> None:
    """Grant *call* a grant: a hit on *model*, or a miss for which *victims* are evicted. The caller has checked it."""
    cluster, calls, owner = world.cluster, world.calls, call.owner
    local, after = call.state == LOCAL, START[call.state]
    now = cluster.now
    names: tuple[CopyId, ...] = ()
    if copy is None:
        copy, names = reserve(world, device, owner, victims)
        call.cold = True
        call.victims = tuple([(each.owner.id, each.number) for each in victims])
        device.misses += 1
    else:
        device.residency.touch(copy, now)
        cluster.asked = None
        device.hits += 1
    copy.running += 1
    if copy.running == 1 and copy.limit != copy.memory:
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
    calls.waiting -= 1
    if owner.exclusive:
        costs = owner.costs[device.kind]
        ready = copy.ready_at if copy.loading and copy.ready_at > now else now
        device.run = call
        device.busy_since = now
        call.estimate_s = 0.0 if costs is None else costs.estimate_s(call.size)
        device.free_at = ready + call.estimate_s
        if device.local:
            world.overdue.note(device)
        device.starts += 1
        if device.idle_key is not None:
            cluster.set_busy(device)
        world.starts.append((now, call, device.id, call.cold, names, local, call.why))
    else:
        owner.runs[call] = None
        if owner.ready is not None:
            owner.ready.started(copy)
    call.grant = world.grant = number = world.grant + 1
    grant = m.Grant(
        world.epoch, number, (call.id,), owner.id, owner.digest, parts_of(copy, device), call.cold, names,
        local, copy.number, None if call.ends is None else call.ends - now,
    )  # fmt: skip
    world.out.append(m.StartCall(grant))


def reserve(
    world: World, device: DeviceState, owner: FunctionState, victims: tuple[Copy, ...]
) -> tuple[Copy, tuple[CopyId, ...]]:
    """Evict *victims* and charge the reservation of *owner*, whose load begins now."""
    leave_for_others(world, device, victims)
    costs = owner.costs[device.kind]
    assert costs is not None
    world.out += world.lending.take_back(device, costs.occupation)
    copy = world.cluster.insert(device, owner, costs.occupation, costs.load_s)
    if owner.copies >= owner.target:
        world.short.pop(owner.id, None)
    return copy, tuple([each.id for each in victims])


def parts_of(copy: Copy, device: DeviceState) -> tuple[Part, ...]:
    return (Part(device.id, copy.memory),)


def leave_for_others(world: World, device: DeviceState, victims: Iterable[Copy]) -> None:
    for victim in victims:
        world.cluster.evict(device, victim)
        owner = victim.owner
        if owner.copies < owner.target:
            owner.eager = False
            world.short[owner.id] = owner


def end(world: World, call: Call) -> None:
    """*call* no longer uses its worker."""
    copy, device, owner = call.copy, call.device, call.owner
    assert copy is not None
    assert device is not None
    calls = world.calls
    call.state = END[call.state]
    if not owner.marked:
        owner.mark()
    if not device.marked:
        device.mark()
    owner.running -= 1
    if calls.twins and calls.by_id.get(call.id) is not call:
        calls.twins.pop((call.id, device.id), None)
    else:
        del calls.by_id[call.id]
    copy.running -= 1
    if not copy.running:
        if copy.limit != copy.memory:
            device.residency.let_go(copy)
        if copy.asked == ANSWERED:
            copy.asked = NOT_ASKED
    if device.run is call:
        device.run = None
        device.busy_s += world.cluster.now - device.busy_since
        if device.others:
            _next_other(world, device)
    elif owner.exclusive:
        if call in device.others:
            device.others.remove(call)
    else:
        del owner.runs[call]
        if owner.ready is not None:
            owner.ready.ended(copy)


def _next_other(world: World, device: DeviceState) -> None:
    """Give *device* to the next one of several model functions' calls that gateways sent without a scheduler."""
    device.run = following = device.others.pop(0)
    costs = following.owner.costs[device.kind]
    following.estimate_s = 0.0 if costs is None else costs.estimate_s(following.size)
    device.busy_since = world.cluster.now
    device.free_at = world.cluster.now + following.estimate_s
    world.overdue.note(device)


def next_local(world: World, device: DeviceState) -> None:
    """Start the first call of the local queue of a device that became free; else the device is idle."""
    if device.run is not None or device.preload is not None or world.devices.get(device.id) is not device:
        return
    if device.local:
        call = device.local[0]
        copy = call.copy
        assert copy is not None
        take_local(world, device, call)
        start(world, call, device, copy, ())
    elif device.idle_key is None and not device.closed:
        world.cluster.set_idle(device)


def take_local(world: World, device: DeviceState, call: Call) -> None:
    local = device.local
    if local[0] is call:
        local.popleft()
        if device.busy:
            world.overdue.note(device)
    else:
        local.remove(call)
    # Of an empty queue it is exactly 0, whatever was rounded.
    device.local_s = device.local_s - call.estimate_s if local else 0.0
    if call.copy is not None:
        call.copy.queued -= 1


def return_local(world: World, device: DeviceState, call: Call) -> None:
    take_local(world, device, call)
    world.calls.back(call)
    world.queue.put_back(call)
    world.cluster.note_waiting(call.owner)


def grant_again(world: World, call: Call, device: DeviceState, copy: Copy) -> None:
    """Grant a call its grant again: it has its place, but its gateway has not heard of it."""
    call.grant = world.grant = number = world.grant + 1
    owner = call.owner
    victims = tuple(copy_id(*each) for each in call.victims)
    grant = m.Grant(
        world.epoch, number, (call.id,), owner.id, owner.digest, parts_of(copy, device), call.cold, victims,
        copy=copy.number, within_s=None if call.ends is None else call.ends - world.cluster.now,
    )  # fmt: skip
    world.out.append(m.StartCall(grant))
