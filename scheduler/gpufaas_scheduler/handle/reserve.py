"""Memory changes hands: victims leave, and a new copy is charged."""

from collections.abc import Iterable, Sequence

from gpufaas_core import messages as m
from gpufaas_core.model import CopyId
from gpufaas_scheduler.handle.parking import evicted, park
from gpufaas_scheduler.handle.parts import Place
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.world import World


def reserve(
    world: World, device: DeviceState, owner: FunctionState, victims: tuple[Copy, ...], share: int = 0
) -> tuple[Copy, tuple[CopyId, ...]]:
    """Evict *victims* and charge the reservation of *owner*, whose load begins now. *share*: see `World.insert`."""
    leave_for_others(world, device, victims)
    costs, load_s, woken = owner.costs[device.kind], owner.load_on(device), None
    assert costs is not None
    names = tuple([each.id for each in victims])
    if world.parked.devices:  # the copy may be one that wakes; parked ones that are in the way are victims, too
        woken = world.parked.take(device, owner)
        if woken is not None and (share or owner.holds(device)):  # its process has another share, perhaps for good
            world.out += evicted(device, (woken,))
            woken = None
        names += tuple([each.id for each in world.parked.make_room(device, costs.occupation)])
    world.out += world.lending.reclaim(device, costs.occupation)
    copy = world.insert(device, owner, costs.occupation, load_s, None if woken is None else woken.number, share)
    if world.parks and victims:
        park(world, device, victims)
    _note_enough(world, owner)
    return copy, names


def reserve_parts(world: World, owner: FunctionState, places: tuple[Place, ...]) -> tuple[Copy, tuple[Copy, ...]]:
    """As `reserve`, for a copy with several parts. Return it, and all victims."""
    load_s, whole = 0.0, sum(each.part.memory for each in places)
    victims = {victim.id: victim for each in places for victim in each.victims}
    for device, part, leaving in places:
        leave_for_others(world, device, leaving)
        world.out += evicted(device, world.parked.make_room(device, part.memory))
        world.out += world.lending.reclaim(device, part.memory)
        load_s = max(load_s, owner.load_on(device) * part.memory / whole)
    device, part, _ = places[0]
    copy = world.insert(device, owner, part.memory, load_s)
    if part.share:
        device.residency.limit_compute(copy, part.share)
    world.insert_rest(copy, [(each.device, each.part.memory, each.part.share) for each in places[1:]])
    if part.share:
        world.judge_limits(owner)
    _note_enough(world, owner)
    return copy, tuple(victims.values())


def _note_enough(world: World, owner: FunctionState) -> None:
    if owner.copies >= owner.target:
        world.short.pop(owner.id, None)
        world.held_back.pop(owner.id, None)


def evictions(world: World, device: DeviceState, leaving: Sequence[Copy]) -> list[m.Command]:
    """Return the commands to evict copies of *device*; they name the first device of each."""
    found = world.copies
    return [
        m.EvictCopy(each.owner.id, found[each.id][0].id if each.split else device.id, each.number) for each in leaving
    ]


def leave_for_others(world: World, device: DeviceState, victims: Iterable[Copy]) -> None:
    for victim in victims:
        if victim.split and victim.id not in world.copies:
            continue  # it has left another one of the devices
        world.evict(device, victim)
        owner = victim.owner
        if owner.copies < owner.target:
            owner.eager = False
            world.short[owner.id] = owner
