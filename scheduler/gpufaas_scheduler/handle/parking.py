"""Copies are parked when they are evicted, and their nodes tell which they have, and what these hold of devices."""

from collections.abc import Iterable

from gpufaas_core import messages as m
from gpufaas_core.model import Bytes, CopyId, copy_id
from gpufaas_core.plausible import is_size
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.parked import ParkedCopy
from gpufaas_scheduler.world.world import World


def park(world: World, device: DeviceState, victims: Iterable[Copy]) -> None:
    """*victims*, which were evicted from *device*, are parked as far as their node can do that."""
    parked = world.parked
    for each in victims:
        if parked.can(device, each):
            costs = each.owner.costs[device.kind]
            parked.park(device, each.owner, each.number, 0 if costs is None else costs.parked_bytes)


def evicted(device: DeviceState, gone: Iterable[ParkedCopy]) -> list[m.Command]:
    """Return the commands to end parked copies of *device*."""
    return [m.EvictCopy(each.owner.id, device.id, each.number) for each in gone]


def parked_of(world: World, device: DeviceState, names: Iterable[CopyId]) -> tuple[CopyId, ...]:
    """Return those of *names* that are parked on *device*."""
    here = {each.id for each in world.parked.on(device)}
    return tuple([each for each in names if each in here])


def order_load(
    world: World, device: DeviceState, copy: Copy, victims: tuple[CopyId, ...], *, beside: bool = False
) -> None:
    """Have the node of *device* load *copy*, which has its reservation, once *victims* are gone from there."""
    owner, parts, world.grant = copy.owner, device.parts_of(copy), world.grant + 1
    parked = parked_of(world, device, victims) if victims and not beside else ()
    world.out.append(
        m.LoadCopy(world.epoch, world.grant, owner.id, owner.digest, parts, victims, copy.number, beside, parked)
    )


def parked(world: World, event: m.Parked) -> None:
    device, owner = world.devices.get(event.device), world.functions.get(event.function)
    if device is None or not is_size(event.memory):
        world.ignored["Parked"] += 1
        return
    costs = None if owner is None else owner.costs[device.kind]
    if owner is not None and costs is not None and costs.parked_bytes != event.memory:
        costs.parked_bytes = event.memory
        owner.mark()
    if copy_id(event.function, event.copy) in device.residency.copies:
        return  # it is woken already
    found = world.parked.find(device, event.function)
    if found is not None and found.number == event.copy:
        if not world.parked.hold(device, found, event.memory):
            world.parked.take(device, found.owner)
            world.out += evicted(device, (found,))
    elif owner is None or not keep_parked(world, device, owner, event.copy, event.memory):
        world.out.append(m.EvictCopy(event.function, device.id, event.copy))


def unparked(world: World, event: m.Unparked | m.WorkerExited) -> None:
    """A copy is not parked: it could not be, or its worker had ended just when it was evicted."""
    device = world.devices.get(event.device)
    found = None if device is None else world.parked.find(device, event.function)
    if device is None or found is None or found.number != event.copy:
        world.ignored[type(event).__name__] += 1
        return
    world.parked.take(device, found.owner)


def keep_parked(world: World, device: DeviceState, owner: FunctionState, copy: int, memory: Bytes) -> bool:
    """Count a copy as parked that the engine does not know. False: it is of no use there."""
    known = owner.id in device.copies or device.id in owner.parked
    if known or not owner.placed or device.closed or memory > device.residency.unpromised:
        return False
    world.parked.park(device, owner, copy, memory)
    return True
