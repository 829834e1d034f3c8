"""
Copies with parts on several devices. Each part of a new one has to fit on its device, and all of them or none are
charged.

They are for nodes that say that they can load them (`Device.loads_parts`), as those of the simulator do. They have no
local queue, and keep the shares that they were loaded with.
"""

from typing import NamedTuple

from gpufaas_core.model import CopyId, Part, Seconds
from gpufaas_scheduler.fit import Reason
from gpufaas_scheduler.world.call import GrantState
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.world import World


class Place(NamedTuple):
    """A part of a new copy with several, and the copies that are evicted for it."""

    device: DeviceState
    part: Part
    victims: tuple[Copy, ...]


def places_for(
    world: World, owner: FunctionState, parts: tuple[Part, ...], victims: tuple[CopyId, ...] | None
) -> tuple[Place, ...] | str:
    """
    Return where the parts of a new copy go, with the copies to evict there; or why they cannot.

    :param victims: evict these, each from its device; None: as many as needed, in the replacement order of each device
    """
    if len({bool(each.share) for each in parts}) > 1:
        return "all parts of a copy hold a share, or none does"
    places: list[Place] = []
    leaving: dict[CopyId, Copy] = {}
    for part in parts:
        device = world.devices.get(part.device)
        if device is None:
            return f"there is no device {part.device}"
        if any(each.device is device for each in places):
            return f"a copy has one part on a device, not two on {device.id}"
        if not device.device.loads_parts:
            return f"a copy on {device.id} has one part, not {len(parts)}: its node cannot load several"
        why = _why_not(owner, part, device)
        if why is not None:
            return why
        named = None if victims is None else tuple(each for each in victims if each in device.residency.copies)
        found = world.fits(device, owner, named, part=part)
        if isinstance(found, Reason):
            return found.say(owner.id, device.id, device.kind)
        leaving.update((each.id, each) for each in found.victims)
        places.append(Place(device, part, found.victims))
    if victims is not None and (absent := [each for each in victims if each not in leaving]):
        return f"{absent[0]} cannot be evicted: none of the devices holds it"
    for each in leaving.values():
        gone = sum(other.owner is each.owner for other in leaving.values())
        if each.owner.min_copies and each.owner.copies - gone < each.owner.min_copies:
            return f"{gone} copies of {each.owner.id} cannot be evicted: its minimum is {each.owner.min_copies}"
    return tuple(places)


def why_no_share(owner: FunctionState, part: Part, device: DeviceState) -> str | None:
    """Return why a new copy of *owner* cannot hold the share of *part* on *device*; None: it can, or it has none."""
    planned = owner.plan.get(device.id)
    if not 0 <= part.share <= device.compute:
        return f"device {device.id} has {device.compute} % of compute, a share there cannot be {part.share} %"
    if part.share and owner.declared.need.sharing != "auto":
        return f"{owner.id} has no share of its own: its sharing is {owner.declared.need.sharing}"
    if part.share and planned is not None and part.share != planned.share:
        gives = f"{planned.share} %" if planned.share else "no share"
        return f"plan {owner.plan_version} gives {owner.id} {gives} of {device.id}, not {part.share} %"
    return None


def _why_not(owner: FunctionState, part: Part, device: DeviceState) -> str | None:
    if part.memory <= 0:
        return f"one of several parts says its memory: that on {device.id} has {part.memory}"
    if refused := why_no_share(owner, part, device):
        return refused
    if owner.plan:
        return f"plan {owner.plan_version} has copies of {owner.id} with one part each"
    if owner.id in device.copies:
        return f"device {device.id} holds {owner.id} already: as copy {device.copies[owner.id]}"
    if device.shut:
        return f"device {device.id} takes no new calls now"
    if device.preload is not None:
        return f"device {device.id} is busy with a load"
    if not device.has_compute(owner):
        spare = device.compute - device.reserved
        return f"{owner.id} needs {owner.reserves} % of the compute of {device.id}, which has {spare} % spare"
    return None


def hold_parts(world: World, grant: GrantState, since: Seconds) -> None:
    """*grant*, which has begun on the first device of its copy, holds what it needs on the others as well."""
    owner = grant.copy.owner
    for device, entry in world.parts(grant.copy):
        entry.running += 1
        if entry.running == 1:
            device.residency.hold(entry)
        device.residency.touch(entry, world.now)
        world.begin(device, grant, since)
        world.withdraw(device)
        device.starts += 1
        if not owner.removed and device.reserved < device.compute:
            world.offer(device)


def full_part(world: World, copy: Copy) -> DeviceState | None:
    """Return a further device of *copy* that has too little compute for a grant; None: there is none."""
    owner = copy.owner
    for device, _ in world.parts(copy):
        if device.shut or device.preload is not None or world.leaving(device, owner) is None:
            return device
    return None
