"""Events of devices and functions: devices leave or are drained, functions are deployed and removed."""

from collections.abc import Iterable

from msgspec.structs import replace

from gpufaas_core import messages as m
from gpufaas_scheduler.handle.copies import balance, drop, forget_if_done, inherit, note_lack, send_off, serve_fifo
from gpufaas_scheduler.handle.grants import end, return_local
from gpufaas_scheduler.handle.parking import evicted
from gpufaas_scheduler.handle.waiting import give_up
from gpufaas_scheduler.world.costs import gains
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.world import World


def device_left(world: World, event: m.DeviceLeft) -> None:
    device = world.devices.get(event.device)
    if device is None:
        world.ignored["DeviceLeft"] += 1
        return
    forget_removed(world, leave(world, device))


def device_drained(world: World, event: m.DeviceDrained) -> None:
    device = world.devices.get(event.device)
    if device is None or device.closed == event.drain:
        world.ignored["DeviceDrained"] += 1
        return
    world.close(device, closed=event.drain)
    if not event.drain:
        return
    for call in list(device.local):
        return_local(world, device, call)
    for copy in list(device.residency):
        send_off(world, device, copy)
    world.out += evicted(device, world.parked.leave(device))


def leave(world: World, device: DeviceState) -> list[FunctionState]:
    """Remove *device*, and return the functions that it held: the removed ones may be done now."""
    owners = [copy.owner for copy in device.residency]
    split = [world.copies[copy.id] for copy in device.residency if copy.split]
    for call in list(device.local) if split else ():
        return_local(world, device, call)  # otherwise it would start when a part is free
    for call in device.runs():
        end(world, call)
        if call.device is not device:
            world.lost[call.id] = call  # it ran on several devices, and the first one is still there
    for copy in list(device.residency):
        drop(world, device, copy)
    world.leave(device)
    for first, copy in split:
        left = [each for each in (first, *(other for other, _ in world.parts(copy))) if each is not device]
        if left:
            world.out.append(m.EvictCopy(copy.owner.id, left[0].id, copy.number))
    return owners


def forget_removed(world: World, owners: Iterable[FunctionState]) -> None:
    """Forget those of *owners* that were removed, and of which no call waits or runs any more."""
    for owner in owners:
        if owner.removed:
            forget_if_done(world, owner)


def function_deployed(world: World, event: m.FunctionDeployed) -> None:
    world.hosts.gain = world.hosts.gain or any(map(gains, event.function.profiles.values()))
    function, owner = event.function, world.functions.get(event.function.id)
    if owner is not None:
        function, need = replace(function, constraints=owner.constraints), owner.declared.need
        if function.need != need and (need.compute or function.need.compute):
            # A gateway of another version reads its record differently. Compute is held, and calls wait, by the first
            # need; only the slots of a function without compute may change.
            world.ignored["FunctionDeployed"] += 1
            function = replace(function, need=need)
    owner = world.deploy(function)
    world.rare = True
    if not owner.placed:
        serve_fifo(world, owner)
    before = None if event.succeeds is None else world.functions.get(event.succeeds)
    if before is not None and not before.removed:
        # Its gateway sees in the status that copies are ready, or that there is no room, and removes one of the two.
        owner.before = before
        owner.ask(max(1, before.copies))
    balance(world, owner)


def function_removed(world: World, event: m.FunctionRemoved) -> None:
    owner = world.functions.get(event.function)
    if owner is None:
        world.ignored["FunctionRemoved"] += 1
        return
    world.remove(owner)
    note_lack(world, owner)
    if owner.before is not None and owner.before.after is owner:
        owner.before.after = None
        balance(world, owner.before)
    for each in world.functions.values():
        if each.before is owner:
            inherit(world, each)
    if not event.drain:
        for call in world.waits_of(owner):
            give_up(world, call)
            world.out.append(m.RejectCall(call.id, "removed", f"function {owner.id} was removed"))
        for call in [each for each in world.running() if each.owner is owner]:
            # A WebSocket has no end of its own, and the others have not begun.
            if (call.endless or (call.copy is not None and call.copy.loading)) and not call.aborted:
                world.out.append(m.Abort(call.id, world.calls.abort(call)))
    forget_if_done(world, owner)
