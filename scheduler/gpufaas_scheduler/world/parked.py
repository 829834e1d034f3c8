"""
Parked copies: evicted, but their processes and their weights are in the memory of their nodes, so that a load there
wakes them.

A copy counts as parked from the decision to evict it: if its node cannot park it, the node says so (`Unparked`), and
it is loaded anew. What a parked copy holds of its device all the same, mostly a context on a GPU, is no free memory for
limits. But decisions count it as free: a copy that needs it evicts the parked one, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpufaas_core.model import Bytes, CopyId, DeviceId, FunctionId, copy_id
from gpufaas_scheduler.world.costs import PARKED
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState


class ParkedCopy:
    __slots__ = ("id", "memory", "number", "owner")

    def __init__(self, owner: FunctionState, number: int, memory: Bytes) -> None:
        self.owner = owner
        self.number = number
        self.id: CopyId = copy_id(owner.id, number)
        self.memory = memory
        """What it holds of its device."""


class ParkedCopies:
    """Of all devices. A device has one of a function at most."""

    __slots__ = ("devices",)

    def __init__(self) -> None:
        self.devices: dict[DeviceId, dict[FunctionId, ParkedCopy]] = {}
        """In the order in which they were parked. Devices without any are left out."""

    def on(self, device: DeviceState) -> Iterable[ParkedCopy]:
        return self.devices.get(device.id, {}).values()

    def find(self, device: DeviceState, function: FunctionId) -> ParkedCopy | None:
        return self.devices.get(device.id, {}).get(function)

    def can(self, device: DeviceState, copy: Copy) -> bool:
        """Whether *copy*, which is evicted from *device*, should be parked."""
        owner = copy.owner
        costs = owner.costs[device.kind]
        if costs is None or not (device.device.parks and owner.placed) or copy.share or copy.split or copy.loading:
            return False
        if owner.removed or device.closed or device.id in owner.parked:
            return False
        saves = PARKED not in costs.loads or costs.parked_s < (costs.host_s if owner.staged else costs.disk_s)
        return saves and costs.parked_bytes <= device.residency.unpromised

    def park(self, device: DeviceState, owner: FunctionState, number: int, memory: Bytes) -> None:
        self.devices.setdefault(device.id, {})[owner.id] = ParkedCopy(owner, number, memory)
        device.residency.unpromised -= memory
        owner.park(device)

    def hold(self, device: DeviceState, parked: ParkedCopy, memory: Bytes) -> bool:
        """Charge what its node says that it holds. False: that much is not free."""
        if memory - parked.memory > device.residency.unpromised:
            return False
        device.residency.unpromised -= memory - parked.memory
        parked.memory = memory
        return True

    def take(self, device: DeviceState, owner: FunctionState) -> ParkedCopy | None:
        """The parked copy of *owner* on *device* is woken, or is gone; None: there is none."""
        here = self.devices.get(device.id)
        parked = None if here is None else here.pop(owner.id, None)
        if parked is None:
            return None
        if not here:
            del self.devices[device.id]
        device.residency.unpromised += parked.memory
        owner.unpark(device)
        return parked

    def make_room(self, device: DeviceState, need: Bytes) -> list[ParkedCopy]:
        """Evict parked copies, the one parked first before others, until *need* bytes are unpromised; return them."""
        gone = []
        for each in list(self.on(device)):
            if device.residency.unpromised >= need:
                break
            if each.memory:
                self.take(device, each.owner)
                gone.append(each)
        return gone

    def leave(self, device: DeviceState) -> list[ParkedCopy]:
        """All of *device* are gone. Return them."""
        gone = list(self.on(device))
        for each in gone:
            self.take(device, each.owner)
        return gone
