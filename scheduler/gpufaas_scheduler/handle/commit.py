"""The actions of a policy: each is checked against what is so now, and done, or refused with a reason."""

from gpufaas_core import messages as m
from gpufaas_core.model import CopyId
from gpufaas_core.units import format_bytes
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.grants import reserve, start
from gpufaas_scheduler.state import LOCAL, WAITING, DeviceState, FunctionState, Model
from gpufaas_scheduler.world.world import World


def try_start(world: World, action: contract.Start) -> str | None:
    """Do it, or return why not."""
    call = world.calls.get(action.call)
    if call is None or call.state != WAITING or not call.owner.exclusive:
        return f"call {action.call} does not wait in the global queue"
    device = world.devices.get(action.device)
    if device is None:
        return f"there is no device {action.device}"
    if device.busy:
        return _busy(device)
    model = device.models.models.get(call.function)
    victims: tuple[Model, ...] = ()
    if model is None:
        chosen = _chosen(world, device, call.owner, action.victims)
        if isinstance(chosen, str):
            return chosen
        victims = chosen
    world.queue.remove(call)
    call.why = action.why
    if action.reserved_s:
        world.cluster.reserved_until = world.cluster.now + action.reserved_s
    start(world, call, device, model, victims)
    return None


def try_promise(world: World, action: contract.Promise) -> str | None:
    """Do it, or return why not."""
    call = world.calls.get(action.call)
    if call is None or call.state != WAITING or not call.owner.exclusive:
        return f"call {action.call} does not wait in the global queue"
    call.promised_at = action.at
    return None


def try_enqueue(world: World, action: contract.EnqueueLocal) -> str | None:
    """Do it, or return why not."""
    call = world.calls.get(action.call)
    if call is None or call.state != WAITING or not call.owner.exclusive:
        return f"call {action.call} does not wait in the global queue"
    device = world.devices.get(action.device)
    if device is None:
        return f"there is no device {action.device}"
    if not device.busy:
        return f"device {device.id} is idle: nothing would end its local queue's wait"
    model = device.models.models.get(call.function)
    if model is None or device.id not in call.owner.holders:
        return f"device {device.id} does not hold {call.function}, or not for new calls"
    if world.nested and world.nests.holds(device):
        return f"device {device.id} is held by a call that waits for a call"
    world.queue.remove(call)
    call.why = action.why
    costs = call.owner.costs(device.kind)
    call.estimate_s = 0.0 if costs is None else costs.estimate_s(call.size)
    call.state = LOCAL
    call.device = device
    call.patience_s = action.patience_s
    device.local.append(call)
    device.local_s += call.estimate_s
    if device.local[0] is call:
        world.overdue.note(device)
    model.queued += 1
    world.touch(device)
    world.cluster.asked = None
    return None


def try_load(world: World, action: contract.Load) -> str | None:
    """Do it, or return why not."""
    owner = world.functions.get(action.function)
    if owner is None or owner.removed or not owner.exclusive:
        return f"no model function {action.function} is deployed"
    device = world.devices.get(action.device)
    if device is None:
        return f"there is no device {action.device}"
    if device.busy:
        return _busy(device)
    if owner.backoff is not None:
        return f"the last load of {owner.id} failed: a call has to try it first"
    if owner.id in device.models.models:
        return f"device {device.id} holds {owner.id} already"
    if owner.max_copies and owner.copies >= owner.max_copies:
        return f"{owner.id} has {owner.copies} copies, and may have {owner.max_copies}"
    victims = _chosen(world, device, owner, action.victims)
    if isinstance(victims, str):
        return victims
    model, names = reserve(world, device, owner, victims)
    device.preload = model
    device.busy_since = world.cluster.now
    device.free_at = model.ready_at
    world.cluster.set_busy(device)
    world.lease = number = world.lease + 1
    world.out.append(m.Load(world.epoch, number, owner.id, owner.digest, device.id, model.memory, names))
    return None


def _chosen(
    world: World, device: DeviceState, owner: FunctionState, names: tuple[CopyId, ...] | None
) -> tuple[Model, ...] | str:
    """Return the models to be evicted for *owner*: those of *names*, or of the replacement order; or why not."""
    if names is None:
        chosen = world.cluster.victims(device, owner)
        return _why_no_room(owner, device) if chosen is None else chosen
    costs = owner.costs(device.kind)
    if costs is None or not owner.allows(device):
        return _why_no_room(owner, device)
    free = device.models.free
    victims: list[Model] = []
    for name in dict.fromkeys(names):
        model = device.models.models.get(name)
        if model is None:
            return f"{name} cannot be evicted: {device.id} does not hold it"
        if not world.cluster.evictable(model, [each.owner for each in victims].count(model.owner)):
            return f"{name} cannot be evicted from {device.id}: it is pinned, or within its minimum of copies"
        victims.append(model)
        free += model.memory
    if free < costs.occupation:
        need, after = format_bytes(costs.occupation), format_bytes(free)
        return f"{owner.id} needs {need}, device {device.id} has {after} free once {len(victims)} are evicted"
    return tuple(victims)


def _why_no_room(owner: FunctionState, device: DeviceState) -> str:
    if not owner.allows(device):
        return f"device {device.id} does not satisfy the constraints of {owner.id}"
    costs = owner.costs(device.kind)
    if costs is None:
        return f"{owner.id} has no profile for devices of kind {device.kind}"
    need, memory = format_bytes(costs.occupation), device.device.memory
    if costs.occupation > memory:
        return f"{owner.id} needs {need}, device {device.id} has {format_bytes(memory)}"
    free = format_bytes(device.models.free)
    return f"{owner.id} needs {need}, device {device.id} has {free} free, and what could be evicted is too little"


def _busy(device: DeviceState) -> str:
    if device.run is not None:
        return f"device {device.id} is busy with call {device.run.id}"
    return f"device {device.id} is busy with a load"
