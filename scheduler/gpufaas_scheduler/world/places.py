"""Where a call could start now, and where there is room for a copy that no policy places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gpufaas_core.model import Bytes, Seconds
from gpufaas_scheduler.fit import Reason
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState


def can_start(cluster: Cluster, device: DeviceState, owner: FunctionState) -> bool:
    """
    Whether a call of *owner* can start on *device*: it has the compute, if need be after the eviction of idle
    copies, or the call joins others; and its copy has a free slot, if there is one.
    """
    if device.preload is not None or device.idle_key is None:
        return False
    held = device.copies.get(owner.id)
    if held is not None:
        copy = cluster.copies[held][1]
        if copy.running >= (copy.slots or owner.slots) or copy not in owner.active:
            return False
    return device.can_join(owner) or cluster.leaving(device, owner) is not None


def idle_holder(cluster: Cluster, call: Call) -> DeviceState | None:
    """Return the first idle device that holds the function of *call*; one whose copy loads yet comes last."""
    owner = call.owner
    holders = owner.holders
    if len(cluster.idle_devices) <= len(holders) and not owner.loading:
        for key in cluster.idle_devices:
            if key[2].id in holders and (not cluster.mixed or can_start(cluster, key[2], owner)):
                return key[2]
        return None
    keys = [device.idle_key for device in holders.values() if device.idle_key is not None]
    if cluster.mixed:
        keys = [key for key in keys if can_start(cluster, key[2], owner)]
    if owner.loading:
        keys = [key for key in keys if not is_loading(key[2], owner)] or keys
    return min(keys)[2] if keys else None


def is_loading(device: DeviceState, owner: FunctionState) -> bool:
    """Whether the copy of *owner* on *device*, which holds it, loads yet."""
    return device.residency.copies[device.copies[owner.id]].loading


def room_for(
    cluster: Cluster, owner: FunctionState, among: Iterable[DeviceState] | None = None, *, starts: bool = False
) -> tuple[DeviceState, tuple[Copy, ...]] | None:
    """
    Return the device (of *among*, or any) for a copy that no policy places, and the victims there.

    Best is a device without victims; then one with fewer copies of *owner* (none, for a placed function); then the
    victims that are cheapest to load again; then the most free memory; then the first that joined.
    O(devices x residents).
    """
    best: tuple[DeviceState, tuple[Copy, ...]] | None = None
    best_key: tuple[bool, int, Seconds, Bytes, int] | None = None
    held = Counter(owner.active.values())
    for device in cluster.devices.values() if among is None else among:
        if owner.placed and owner.id in device.copies:
            continue
        found = cluster.fits(device, owner, starts=starts)
        if isinstance(found, Reason):
            continue
        reload_s = sum(copy.owner.load_on(device) for copy in found.victims)
        key = (bool(found.victims), held[device], reload_s, -device.residency.free, device.order)
        if best_key is None or key < best_key:
            best, best_key = (device, found.victims), key
    return best
