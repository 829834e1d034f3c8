"""Functions that find no room, since copies that others keep, by a plan or as their minimum, are never evicted."""

from collections.abc import Sequence
from typing import Final

from gpufaas_core.model import FunctionId
from gpufaas_core.units import format_bytes
from gpufaas_scheduler.fit import Reason, in_the_way
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.world import World

_SHOWN: Final = 5
"""This many devices and functions are named."""


def kept_out(world: World, owner: FunctionState) -> str | None:
    """
    Return why a call of *owner* would wait for ever: copies that are never evicted hold its memory or compute
    everywhere. None: it would not.
    """
    if owner.active and not (owner.placed and world.mixed):  # shares that are kept keep out copies, too
        return None
    full: list[str] = []
    names: dict[FunctionId, None] = {}
    plans: set[int | None] = set()
    places = {**{each: world.devices[each] for each in owner.plan}, **owner.holders} if owner.plan else world.devices
    for device in places.values():
        need = owner.need(device)
        if isinstance(need, Reason) or need > device.device.memory:
            continue
        if owner.placed and device.id in owner.holders:
            need = 0
        there = device.residency
        wanted = owner.takes(device)
        kept = in_the_way(there, need, lambda it: it in it.owner.draining or it.owner is owner.before, wanted)
        if not kept:
            return None
        others = [each for each in kept if each.owner is not owner]
        names.update(dict.fromkeys(each.owner.id for each in others))
        plans |= {each.kept for each in others}
        bytes_held, shares = sum(each.memory for each in kept), sum(each.share for each in kept)
        if wanted + shares > device.compute:
            full.append(f"{wanted} % of the compute of {device.id} ({shares} % of {device.compute} % are held)")
        else:
            held = f"{format_bytes(bytes_held)} of {format_bytes(device.device.memory)}"
            full.append(f"{format_bytes(need)} on {device.id} ({held} are held)")
    if not full:
        return None
    lower = [f"change plan {each}" for each in plans if each is not None]
    lower += ["lower their minimum (com.openfaas.scale.min)"] if None in plans else []
    return (
        f"there is no room for function {owner.id}: it needs {_some(full, ' or ')}, and copies that are always kept "
        f"hold it: those of {_some(list(names), ', ')}. {' or '.join(lower).capitalize()}, remove one "
        "of them, or add a device"
    )


def _some(texts: Sequence[str], between: str) -> str:
    more = len(texts) - _SHOWN
    return between.join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
