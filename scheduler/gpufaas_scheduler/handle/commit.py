"""The actions of a policy. Each is checked against the present state and done, or refused with a reason."""

from gpufaas_core.model import CopyId, Part, Seconds
from gpufaas_scheduler import contract
from gpufaas_scheduler.fit import Reason
from gpufaas_scheduler.handle.batches import batch_of, tell_held, with_held
from gpufaas_scheduler.handle.grants import obtain, start
from gpufaas_scheduler.handle.parking import order_load
from gpufaas_scheduler.handle.parts import Place, full_part, places_for, why_no_share
from gpufaas_scheduler.handle.reserve import reserve, reserve_parts
from gpufaas_scheduler.handle.staging import try_stage
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import WAITING
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.world import World


def try_start(world: World, action: contract.Start) -> str | None:
    """Do *action*, or return why not."""
    calls = action.calls
    call = world.calls.by_id.get(calls[0]) if calls else None
    if call is None or call.state != WAITING or not (owner := call.owner).placed:
        return f"call {calls[0]} does not wait in the global queue" if calls else "there is no call to start"
    others: tuple[Call, ...] = ()
    why = action.why
    if owner.batches or len(calls) > 1:
        batch = batch_of(world, action, call)
        if isinstance(batch, str):
            return batch
        others, why = batch[1:], with_held(world, call, why)
    victims: tuple[Copy, ...] = ()
    places: tuple[Place, ...] = ()
    share = 0
    name, copy = action.copy, None
    if name is not None:
        found = world.copies.get(name)
        if found is None or found[1].owner is not owner:
            return _no_copy(name, call)
        device, copy = found
        if copy.running or copy.share or copy.split or copy.silent or world.mixed:
            refused = _why_not_beside(world, owner, device, copy)
            if refused is not None:
                return refused
        elif device.reserved + owner.wanted > device.compute:  # nearly each hit: `has_compute`, as nothing is limited
            return _busy(device, owner)
    elif len(action.parts) > 1:
        found_places = places_for(world, owner, action.parts, action.victims)
        if isinstance(found_places, str):
            return found_places
        places, device = found_places, found_places[0].device
    else:
        found_place = _place_for(world, owner, action)
        if isinstance(found_place, str):
            return found_place
        device, victims = found_place
        share = action.parts[0].share
    world.queue.remove(call)
    call.why = why
    if others:
        for each in others:
            world.queue.remove(each)
            each.why = why
    if action.reserved_s:
        world.reserved_until = world.now + action.reserved_s
    start(world, call, device, copy, victims, others, places, share=share)
    if owner.batches:
        tell_held(world, call)
    return None


def _why_not_beside(world: World, owner: FunctionState, device: DeviceState, copy: Copy) -> str | None:
    """Return why a call cannot start on *copy*, which may have company; None: it can, and has the compute for it."""
    slots = copy.slots or owner.slots
    if copy.running >= slots:
        return f"all {slots} slots of copy {copy.id} are taken"
    if copy.silent:
        return f"copy {copy.id} gives no sign of life"
    if copy in owner.draining:
        return f"copy {copy.id} takes no new calls"
    if device.shut:
        return _busy(device, owner)
    if copy.share or (copy.running and owner.shared_hold):
        return None
    if device.preload is not None or not device.has_compute(owner):
        return _busy(device, owner)
    if copy.split and (full := full_part(world, copy)) is not None:
        return _busy(full, owner)
    if world.mixed and not obtain(world, device, owner):
        return _busy(device, owner)
    for other, _ in world.parts(copy) if copy.split else ():
        obtain(world, other, owner)
    return None


def try_promise(world: World, action: contract.Promise) -> str | None:
    """Do *action*, or return why not."""
    call = world.calls.by_id.get(action.call)
    if call is None or call.state != WAITING or not call.owner.placed:
        return f"call {action.call} does not wait in the global queue"
    call.promised_at = action.at
    return None


def try_assign(world: World, action: contract.Assign) -> str | None:
    """Do *action*, or return why not."""
    call = world.calls.by_id.get(action.call)
    if call is None or call.state != WAITING or not (owner := call.owner).placed:
        return f"call {action.call} does not wait in the global queue"
    found = world.copies.get(action.copy)
    if found is None or found[1].owner is not owner:
        return _no_copy(action.copy, call)
    device, copy = found
    if copy.split:
        return f"copy {action.copy} has several parts: its calls wait in the global queue"
    if not device.reserved:
        return f"device {device.id} is idle: nothing would end its local queue's wait"
    if copy not in owner.active:
        return f"copy {action.copy} takes no new calls"
    if world.mixed and (device.shut or world.clearing.call is call):
        return f"device {device.id} takes no new calls now, or another one is cleared for call {call.id}"
    if world.nested and world.nests.holds(device):
        return f"device {device.id} is held by a call that waits for a call"
    world.queue.remove(call)
    call.why = action.why
    costs = owner.costs[device.kind]
    # As in `grants.start`.
    call.estimate_s = 0.0 if costs is None else costs.estimate_s(call.size) if call.size else costs.service_s
    if owner.batches:
        call.estimate_s = _added_s(owner, device, copy)
    world.calls.enqueue(call, device)
    call.patience_s = action.patience_s
    world.push(device, call, copy)
    return None


def _added_s(owner: FunctionState, device: DeviceState, copy: Copy) -> Seconds:
    """Return what one more call adds to the time of a local queue whose calls of *owner* run in batches."""
    calls = copy.queued % owner.batch_size(device.kind)
    before_s = owner.serve_s(device.kind, calls) if calls else 0.0
    return max(0.0, owner.serve_s(device.kind, calls + 1) - before_s)


def try_load(world: World, action: contract.Load) -> str | None:
    """Do *action*, or return why not."""
    owner = world.functions.get(action.function)
    if owner is None or owner.removed or not owner.placed:
        return f"no model function {action.function} is deployed"
    if action.tier not in (contract.DEVICE, contract.HOST):
        return f"there is no tier {action.tier}"
    if owner.backoff is not None and (not owner.plan or owner.retry_at > world.now):
        return f"the last load of {owner.id} failed: a call has to try it first"
    if action.tier == contract.HOST:
        return try_stage(world, owner, action)
    if owner.max_copies and owner.copies >= owner.max_copies:
        return f"{owner.id} has {owner.copies} copies, and may have {owner.max_copies}"
    if action.beside:
        return _try_load_beside(world, owner, action)
    if len(action.parts) > 1:
        places = places_for(world, owner, action.parts, action.victims)
        if isinstance(places, str):
            return places
        device = places[0].device
        copy, victims = reserve_parts(world, owner, places)
        names = tuple([each.id for each in victims])
    else:
        one = _place_for(world, owner, action)
        if isinstance(one, str):
            return one
        device, victims = one
        copy, names = reserve(world, device, owner, victims, action.parts[0].share)
    if not (copy.share or copy.kept is not None) or copy.split:
        for each, entry in ((device, copy), *world.parts(copy)):
            world.preload(each, entry, world.now, copy.ready_at)
    order_load(world, device, copy, names)
    return None


def _try_load_beside(world: World, owner: FunctionState, action: contract.Load) -> str | None:
    """Do *action*, a load that holds no compute, or return why not."""
    device = _device_of(world, owner, action.parts)
    if isinstance(device, str):
        return device
    if owner.id in device.copies:
        return f"device {device.id} holds {owner.id} already"
    if any(each.loading for each in device.residency):
        return f"device {device.id} is busy with a load"
    share = action.parts[0].share
    found = world.fits(device, owner, (), starts=False, share=share)
    if isinstance(found, Reason):
        return found.say(owner.id, device.id, device.kind)
    copy, names = reserve(world, device, owner, (), share)
    order_load(world, device, copy, names, beside=True)
    return None


def _place_for(
    world: World, owner: FunctionState, action: contract.Start | contract.Load
) -> tuple[DeviceState, tuple[Copy, ...]] | str:
    """Return the device for a copy with one part, and the copies to evict there; or why there is none."""
    device = _device_of(world, owner, action.parts)
    if isinstance(device, str):
        return device
    share = action.parts[0].share
    beside = (share > 0 or (owner.bound and device.id in owner.plan)) and isinstance(action, contract.Load)
    if beside and any(each.loading for each in device.residency):
        return f"device {device.id} is busy with a load"
    # A copy with a share or a plan needs no compute while it loads, beside its share: calls run there meanwhile.
    if device.preload is not None or not (beside or share or device.has_compute(owner)):
        return _busy(device, owner)
    if owner.id in device.copies:
        return f"device {device.id} holds {owner.id} already: as copy {device.copies[owner.id]}"
    found = world.fits(device, owner, action.victims, starts=not beside, share=share)
    return found.say(owner.id, device.id, device.kind) if isinstance(found, Reason) else (device, found.victims)


def _device_of(world: World, owner: FunctionState, parts: tuple[Part, ...]) -> DeviceState | str:
    """Return the device of *parts*, those of a new copy that has one; or why it cannot be there."""
    if len(parts) != 1:
        return f"a copy has one part, not {len(parts)}"
    part, device = parts[0], world.devices.get(parts[0].device)
    if device is None:
        return f"there is no device {part.device}"
    if part.memory:
        return f"a copy with one part has its profile's memory: do not say it for {device.id}"
    return (why_no_share(owner, part, device) if part.share else None) or device


def _no_copy(copy: CopyId, call: Call) -> str:
    return f"there is no copy {copy} of {call.function}"


def _busy(device: DeviceState, owner: FunctionState) -> str:
    if device.shut:
        return f"device {device.id} takes no new calls now"
    if device.preload is not None:
        return f"device {device.id} is busy with a load"
    calls = ", ".join(call.id for each in device.holding for call in each.calls)
    if device.reserved < device.compute:
        spare = device.compute - device.reserved
        return f"{owner.id} needs {owner.takes(device)} % of the compute of {device.id}, and {calls} leave {spare} %"
    return f"device {device.id} is busy with call {calls}"
