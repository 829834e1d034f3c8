"""
How much memory a worker may use: reservations that follow the measured peak, and free memory that is lent.

A reservation grows with the measured peak and never shrinks while its worker lives. A worker of a function that
declares no memory may also use free memory of its device (`lend`) until it is needed. When it is, an idle worker loses
what it was lent at once (`reclaim`). A worker that runs is asked for it (`ask`), and its node answers how much it
gave (`Resized`). So the limits on a device never add up to more than its memory (docs/adr/0032).
"""

from collections.abc import Iterable
from typing import Final

from gpufaas_cache_manager.eviction import evictable
from gpufaas_cache_manager.residency import ANSWERED, ASKED, NOT_ASKED
from gpufaas_core import messages as m
from gpufaas_core.constraints import KIND
from gpufaas_core.model import Bytes, DeviceId
from gpufaas_core.reservations import reservation
from gpufaas_scheduler.fit import Reason
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.costs import Costs
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState

WIDENING: Final = 2
"""A load that ran out of memory is tried again with this many times the reservation, up to the whole device."""

_OUTGROWN: Final = 4
"""A worker that ran out during a call gets this many times its memory, and idle copies are evicted for it. It may need
less, so the rest is only lent; but its growth should not take many failed calls."""

_LENT_ON: Final = ("cpu", "cuda")
"""The sorts of devices (label `KIND`) on which a worker's limit can change while it lives."""

_SEEKERS: Final = 8
"""This many placed functions without a holder are examined: whether lent memory would let them fit."""


def resize_of(device: DeviceState, copy: Copy) -> m.Resize:
    """Tell the node the limit of *copy*. The answer to what it was asked before does not count any more."""
    copy.asked = NOT_ASKED if copy.asked == ASKED else copy.asked
    copy.told = copy.limit
    return m.Resize(copy.owner.id, device.id, copy.limit, copy.number)


def widen(costs: Costs, failed: Bytes, largest: Bytes) -> bool:
    """A load with *failed* bytes ran out: give the next one more. False: the *largest* device has no more."""
    if failed >= largest:
        return False
    costs.widen(min(failed * WIDENING, largest), min(reservation(failed), largest))
    return True


def _lends(device: DeviceState) -> bool:
    return device.device.labels.get(KIND, device.kind) in _LENT_ON


class Lending:
    """The free memory that is lent. Methods return commands, in the order in which the nodes must get them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.lenders: dict[DeviceId, DeviceState] = {}
        """Devices that may have lent memory."""

    def reclaim(self, device: DeviceState, need: Bytes) -> list[m.Resize]:
        """Reclaim from idle workers until *need* bytes are unpromised. By the charges they are free."""
        if device.residency.unpromised >= need:
            return []
        return [resize_of(device, each) for each in device.residency.reclaim(need)]

    def resize(self, device: DeviceState, copy: Copy, wanted: Bytes) -> list[m.Command]:
        """Charge *model* with *wanted*, as far as there is room, and raise its limit to that if it is lower."""
        residency, limit = device.residency, copy.limit
        room = limit if copy.asked == ASKED else residency.room_of(copy)  # a new limit must not cross the node's answer
        memory = min(wanted, room)
        grown = max(limit, memory)
        ended: list[m.Command] = []
        if grown > limit and self._cluster.parked.devices:
            gone = self._cluster.parked.make_room(device, grown - limit)
            ended = [m.EvictCopy(each.owner.id, device.id, each.number) for each in gone]
        changed = residency.reclaim(grown - limit, copy) if grown > limit else []
        residency.resize(copy, memory, grown)
        self.note(device, copy)
        if grown > limit:
            changed.append(copy)
        return ended + [resize_of(device, each) for each in changed]

    def lend(self, device: DeviceState, copy: Copy) -> list[m.Resize]:
        """Let *model* use all free memory of its device."""
        residency = device.residency
        if copy.asked == ASKED or not _lends(device):
            return []
        limit = residency.room_of(copy)
        if self._cluster.parked.devices:
            limit -= sum([each.memory for each in self._cluster.parked.on(device)])
        if limit <= copy.limit:
            return []
        changed = residency.reclaim(limit - copy.limit, copy)
        residency.resize(copy, copy.memory, limit)
        self.note(device, copy)
        return [resize_of(device, each) for each in (*changed, copy)]

    def outgrown(self, device: DeviceState, copy: Copy) -> list[Copy]:
        """Return the idle copies to evict so that *model*, which ran out, can be lent `_OUTGROWN` times its limit."""
        cluster, residency = self._cluster, device.residency
        if copy.asked == ASKED or not _lends(device):
            return []
        missing = min(copy.limit * _OUTGROWN, device.device.memory) - residency.room_of(copy)
        leaving: list[Copy] = []
        for each in cluster.replacement.order(residency):
            if missing <= 0:
                break
            if each.owner is not copy.owner and evictable(each, [a.owner for a in leaving].count(each.owner)):
                leaving.append(each)
                missing -= each.memory
        return leaving

    def ask(self, homeless: Iterable[FunctionState]) -> list[m.Resize]:
        """
        Calls wait for functions without a holder: ask running workers to give back what they were lent, if those
        functions would fit then. Each worker is asked once until it is idle.

        Devices are asked in the order in which they joined, which a successor knows.
        """
        cluster, asked = self._cluster, []
        for device in sorted(self.lenders.values(), key=lambda each: each.order):
            lends = any(each.limit > each.memory for each in device.residency)
            if not lends or cluster.devices.get(device.id) is not device:
                del self.lenders[device.id]
                continue
            lent = [each for each in device.residency if each.running and not each.asked and each.limit > each.memory]
            if lent and any(self._lacks(device, owner) for owner in self._seekers(homeless)):
                for copy in lent:
                    copy.asked, copy.told = ASKED, copy.memory
                    device.mark()
                    asked.append(m.Resize(copy.owner.id, device.id, copy.memory, copy.number))
        return asked

    def answered(self, device: DeviceState, copy: Copy, answer: m.Resized) -> list[m.Resize]:
        """
        Its node says how much memory *copy* still uses. What it was told since goes its own way, so only the answer to
        the last `Resize` counts.
        """
        residency, held, limit = device.residency, answer.memory, copy.limit
        if answer.asked != copy.told and (answer.asked or copy.asked != ASKED):
            return []
        if copy.asked == ASKED:
            copy.asked = ANSWERED if copy.running else NOT_ASKED
            device.mark()
            limit = max(copy.memory, min(limit, held))
        else:  # it was taken for idle, and uses more than its charge
            limit += max(0, min(held - limit, residency.unpromised))
        if limit != copy.limit:
            residency.resize(copy, copy.memory, limit)
            self.note(device, copy)
        return [resize_of(device, copy)] if held < limit else []  # its charge has grown meanwhile

    def note(self, device: DeviceState, copy: Copy) -> None:
        device.mark()
        if copy.limit > copy.memory:
            self.lenders[device.id] = device

    def _seekers(self, homeless: Iterable[FunctionState]) -> list[FunctionState]:
        orphans = {call.function: None for call in self._cluster.first_of_orphans(_SEEKERS)}
        return [*homeless, *(self._cluster.functions[function] for function in orphans)]

    def _lacks(self, device: DeviceState, owner: FunctionState) -> bool:
        if owner.placed and device.busy:
            return False
        found = self._cluster.fits(device, owner)
        return isinstance(found, Reason) and found.need > 0
