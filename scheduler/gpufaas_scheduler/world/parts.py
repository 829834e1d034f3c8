"""What a copy has of devices: one part, or several."""

from collections.abc import Iterable

from gpufaas_cache_manager import residency
from gpufaas_core.model import Bytes, Part
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy


def parts_of(copy: Copy, device: DeviceState) -> tuple[Part, ...]:
    """Return what *copy*, whose first device is *device*, has of devices."""
    if copy.split:
        first = Part(device.id, copy.memory, copy.share)
        return first, *(Part(name, each.memory, each.share) for name, each in copy.rest)
    if not copy.parts:
        copy.parts = (Part(device.id, copy.memory, copy.share),)
    return copy.parts


def insert_rest(cluster: Cluster, copy: Copy, parts: Iterable[tuple[DeviceState, Bytes, int]]) -> None:
    """*copy* has these further parts: the device of each, its memory there and its share."""
    copy.split = True
    entries = []
    for device, memory, share in parts:
        entry: Copy = residency.Copy(copy.owner, memory, cluster.now, copy.ready_at, copy.number)
        entry.split, entry.share = True, share
        device.residency.insert(entry)
        device.copies[copy.owner.id] = copy.id
        device.mark()
        entries.append((device.id, entry))
    copy.rest = tuple(entries)
