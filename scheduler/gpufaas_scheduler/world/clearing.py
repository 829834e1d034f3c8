"""
Which device is cleared for a call that smaller ones keep waiting, and what has to leave it.

A call that needs more of a device than the end of one call gives back could wait for ever: the others take turns, and
some of them run at any time. So once it has waited for `WAIT_S`, a device takes no further calls until it has room
for this one: one device at a time, for the oldest such call. `handle.clear` does it.

Without functions that take a part of a device's compute (`Cluster.mixed`) the end of any call leaves the whole device,
and no device is cleared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.fit import Reason
from gpufaas_scheduler.world import finish
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.nests import Nests
from gpufaas_scheduler.world.places import idle_holder, room_for

WAIT_S: Final[Seconds] = 20.0
"""A device is cleared for a call that has waited so long: a third of the usual timeout of calls, so that there is time
for the calls on the device to end."""

PAUSE_S: Final[Seconds] = 2.0
"""From the end of one clearing to the next: in an overload all calls wait too long, and most devices should go on with
the calls that the policy has chosen, which need no loads."""

EXAMINED: Final = 16
"""The most calls that have waited too long and are examined at a time, the oldest first."""


def to_clear(cluster: Cluster, nests: Nests, homeless: Collection[FunctionState]) -> tuple[DeviceState, Call] | None:
    """
    Return the device to clear, and for which call; None: none has to be. O(devices x residents) for each call that has
    waited for `WAIT_S`.

    :param homeless: direct functions that have calls but no copy
    """
    since = cluster.now - WAIT_S
    first = cluster.queue.first()
    if (first is None or first.arrived_at > since) and not homeless:
        return None
    late = [each for each in cluster.queue.firsts() if each.arrived_at <= since]
    late += [each.flow.calls[0] for each in homeless if each.flow.calls and each.flow.calls[0].arrived_at <= since]
    late.sort(key=lambda each: each.number)
    for call in late[:EXAMINED]:
        if not _can_start(cluster, call) and (device := _soonest(cluster, nests, call)) is not None:
            return device, call
    return None


def in_the_way(device: DeviceState, call: Call) -> list[Copy] | None:
    """
    Return the copies of direct functions that have to leave *device* before it has room for *call*, once all calls
    that the policy has started there have ended; None: it has no room even so.

    What a call without a deadline holds stays, and what a call that waits for *call* holds, and copies within the
    minimum of their functions or that a plan keeps. O(residents).
    """
    owner = call.owner
    need = owner.need(device)
    if isinstance(need, Reason):
        return None
    own = device.residency.copies[device.copies[owner.id]] if owner.placed and owner.id in device.copies else None
    if own is not None and (own.split or own.share or own not in owner.active):
        return None
    outer = set(_outer(call))
    held = {each.copy.id for each in device.runs() if each.copy is not None and (each.endless or each in outer)}
    stay = [each for each in device.grants() if any(other.endless or other in outer for other in each.calls)]
    compute = device.compute - owner.takes(device) - sum(each.compute for each in stay)
    memory = device.device.memory - (need if own is None else 0)
    movable: list[Copy] = []
    beyond: dict[FunctionId, int] = {}
    for each in device.residency:
        its = each.owner
        left = beyond.setdefault(its.id, its.copies - its.min_copies)
        going = each.id not in held and each is not own and (each in its.draining or (left > 0 and each.kept is None))
        if going and each not in its.draining:
            beyond[its.id] = left - 1
            if not its.placed:
                movable.append(each)
                going = False
        if not going:
            memory -= each.memory
            compute -= each.share
    leaving: list[Copy] = []
    for each in sorted(movable, key=lambda each: each.running > 0):
        if memory < 0 or (compute < 0 and each.share):
            memory += each.memory
            compute += each.share
            leaving.append(each)
    return leaving if memory >= 0 and compute >= 0 else None


def is_drained(device: DeviceState, call: Call) -> bool:
    """Whether all that has to leave *device* for *call* has left."""
    outer = set(_outer(call))
    if device.preload is not None or any(each.loading and each in each.owner.draining for each in device.residency):
        return False
    return not any(
        (each.owner.placed or each.copy in each.owner.draining) and not (each.endless or each in outer)
        for each in device.runs()
    )


def held_by_late(nests: Nests, device: DeviceState, call: Call, now: Seconds) -> bool:
    """
    Whether a call on *device* waits for one that has waited too long itself. That one may need another device, which
    is not cleared for it before the clearing of *device* ends.
    """
    return nests.held_by(device, now - WAIT_S, call)


def _outer(call: Call) -> Iterator[Call]:
    """Yield the calls that wait for *call*."""
    each = call.outer
    while each is not None:
        yield each
        each = each.outer


def _can_start(cluster: Cluster, call: Call) -> bool:
    """Whether there is a place for *call* now, and the policy does not want it."""
    owner = call.owner
    if not owner.placed:
        return room_for(cluster, owner) is not None
    if idle_holder(cluster, call) is not None:
        return True
    return room_for(cluster, owner, [key[2] for key in cluster.idle_devices], starts=True) is not None


def _soonest(cluster: Cluster, nests: Nests, call: Call) -> DeviceState | None:
    """
    Return the device that has room for *call* first, if smaller calls take turns on one of them. Devices whose calls
    wait for calls come last.
    """
    owner, now = call.owner, cluster.now
    best: tuple[bool, Seconds, int, DeviceState] | None = None
    crowded = False
    for device in cluster.devices.values():
        leaving = in_the_way(device, call)
        if leaving is None or held_by_late(nests, device, call, now):
            continue
        crowded = crowded or _is_crowded(device, owner)
        left_s = max([finish.left_s(device, now) - device.local_s, *_times(device, leaving)])
        load_s = 0.0 if owner.placed and device.id in owner.holders else owner.load_on(device)
        key = (nests.held_by(device, now, call), left_s + load_s, device.order)
        if best is None or key < best[:3]:
            best = *key, device
    return best[3] if best is not None and crowded else None


def _times(device: DeviceState, leaving: list[Copy]) -> Iterator[Seconds]:
    """Yield how long the calls of direct functions take whose copies leave *device*."""
    for each in device.residency:
        if each.running and not each.owner.placed and (each in leaving or each in each.owner.draining):
            yield each.owner.service_s(device.kind)


def _is_crowded(device: DeviceState, owner: FunctionState) -> bool:
    """Whether only calls run on *device* whose end, one at a time, leaves no room for a call of *owner*."""
    if not device.runs():
        return False
    grants = device.grants()
    ends = [each.compute for each in grants if each.copy.owner is owner or not each.copy.owner.shared_hold]
    wanted = owner.takes(device)
    if max(ends, default=0) < wanted and (device.preload is None or device.preload.owner.reserves < wanted):
        return True
    need = owner.need(device)
    pinned = [each.memory for each in device.residency if each.running and each.owner is not owner]
    room = device.device.memory - sum(pinned) + max(pinned, default=0)
    return not isinstance(need, Reason) and owner.id not in device.copies and need > room
