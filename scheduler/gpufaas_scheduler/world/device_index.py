"""The devices, which of them policies may use now, and when their local queues go back."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from gpufaas_core.model import ALL_COMPUTE, Bytes, Device, DeviceId, Seconds
from gpufaas_scheduler.world.changes import Changes
from gpufaas_scheduler.world.device import JOINED, DeviceState, IdleKey
from gpufaas_scheduler.world.hits import Hits
from gpufaas_scheduler.world.hosts import Hosts
from gpufaas_scheduler.world.overdue import Overdue
from gpufaas_scheduler.world.parked import ParkedCopies

if TYPE_CHECKING:
    from gpufaas_scheduler.world.call import Call, GrantState
    from gpufaas_scheduler.world.function import Copy


class DeviceIndex:
    """
    What follows from the facts of devices is kept here: `idle_devices`, the estimated ends of what runs, `overdue`,
    which docs change, and whether something became `freed`. Facts that others follow from change by these methods.

    `grants` has `begin` and `end` inlined for calls that have a device to themselves.
    """

    __slots__ = (
        "changes", "constrained", "devices", "fleet", "freed", "hits", "hosts", "idle_devices", "joined",
        "largest", "least_compute", "mixed", "moves", "now", "overdue", "parked", "tail", "tail_from", "takes_ahead",
    )  # fmt: skip

    def __init__(self, hosts: Hosts) -> None:
        self.now: Seconds = 0.0
        self.changes = Changes()
        self.freed = False
        """Something changed that may let a waiting call start, so a scheduling run follows."""
        self.hosts = hosts
        self.devices: dict[DeviceId, DeviceState] = {}
        self.parked = ParkedCopies()
        self.largest: dict[str, Bytes] = {}
        """Memory of the largest device, by kind."""
        self.least_compute = ALL_COMPUTE
        """The least compute that one of the devices has."""
        self.fleet = 0
        """Counts changes of devices and profiles. Conclusions from an older count are void."""
        self.moves = 0
        """Counts the copies that came or went, the devices likewise, and deployments."""
        self.joined = 0
        """Devices that have joined so far."""
        self.takes_ahead = False
        """Some node takes calls ahead."""
        self.constrained = 0
        """The number of functions that are `bound`, plus `mixed`, plus the number of drained devices."""
        self.mixed = 0
        """The number of functions that take a part of a device's compute: see `Revision.mixed`."""
        self.idle_devices: list[IdleKey] = []
        """
        Devices without a local queue that have compute that no grant holds, or are open. Always sorted: sorting 1,000
        devices would cost more than the rest of a decision.
        """
        self.tail: list[DeviceState] | None = None
        """The last ones of `idle_devices`, from the end to `tail_from`, since policies ask for them; None: not now."""
        self.tail_from: IdleKey | None = None
        """The key of the last one in `tail`; None: it has all idle devices."""
        self.hits = Hits()
        self.overdue = Overdue()

    # --- devices come and go ---

    def attach(self, device: Device, order: int | None = None) -> DeviceState:
        """A device joins, as number *order* or the next. The caller offers it, once its calls are known."""
        order = self.joined if order is None else order
        self.joined = max(self.joined, order + 1)
        self.devices[device.id] = state = DeviceState(device, order, self.changes, self.hosts.of(device))
        state.mark()
        self._measure(state)
        self.takes_ahead |= device.ahead
        self.fleet += 1
        self.moves += 1
        self.freed = True
        return state

    def leave(self, device: DeviceState) -> None:
        """*device*, which holds nothing any more, is gone."""
        self.withdraw(device)
        self.constrained -= device.closed
        self.parked.leave(device)
        del self.devices[device.id]
        device.gone = True
        device.forget()
        self.hosts.leave(device.host, device.id)
        self.largest, self.least_compute = {}, ALL_COMPUTE
        for each in self.devices.values():
            self._measure(each)
        self.fleet += 1
        self.moves += 1
        self.freed = True

    def _measure(self, device: DeviceState) -> None:
        self.largest[device.kind] = max(device.device.memory, self.largest.get(device.kind, 0))
        self.least_compute = min(self.least_compute, device.compute)

    def close(self, device: DeviceState, *, closed: bool) -> None:
        """*device* is drained: it takes no new calls from now on; or takes calls again."""
        device.closed = closed
        device.mark()
        self.constrained += 1 if closed else -1
        self.shut(device, closed)
        self.freed = True

    def shut(self, device: DeviceState, shut: bool) -> None:
        """*device* takes no new calls from now on, or takes calls again."""
        device.shut = shut
        if shut:
            self.withdraw(device)
        else:
            self.offer(device)

    def mix(self, more: int) -> None:
        """
        Count *more* functions that take a part of a device's compute. When the first comes or the last goes, devices
        with silent copies are judged anew: see `offer`.
        """
        before, self.mixed = self.mixed, self.mixed + more
        self.constrained += more
        if (before > 0) != (self.mixed > 0):
            for each in [each for each in self.devices.values() if each.silent]:
                if self.mixed:
                    self.offer(each)
                else:
                    self.withdraw(each)

    # --- who is idle ---

    def offer(self, device: DeviceState) -> None:
        """The policy may use *device*, if it has no local queue, and is idle, has spare compute, or is open."""
        if device.idle_key is not None:
            if device.idle_key[0] != JOINED or device.reserved >= device.compute:
                return
            self.withdraw(device)  # its place is among those with spare compute now
        if device.shut or device.local or device.preload is not None:
            return
        if device.silent and not self.mixed:
            return  # policies take it that all that an idle device holds can be used, unless compute is shared
        first = -device.starts
        if device.reserved >= device.compute:
            if not device.open:
                return
            first = JOINED
        device.idle_key = key = (first, device.order, device)
        insort(self.idle_devices, key)
        if self.tail is not None and (self.tail_from is None or key > self.tail_from):
            self.tail = None
        if self.hits.asked:
            self.hits.note_idle(device)

    def withdraw(self, device: DeviceState) -> None:
        """The policy may not use *device* now."""
        key = device.idle_key
        if key is None:
            return
        del self.idle_devices[bisect_left(self.idle_devices, key)]
        device.idle_key = None
        if self.tail is not None and (self.tail_from is None or key >= self.tail_from):
            self.tail = None
        if self.hits.asked:
            self.hits.note_busy(device)

    def withdraw_full(self, device: DeviceState) -> None:
        """A copy on *device* takes fewer grants than before: perhaps there is none any more that calls could join."""
        if device.reserved >= device.compute and not device.open:
            self.withdraw(device)

    # --- compute ---

    def begin(self, device: DeviceState, grant: GrantState, since: Seconds) -> None:
        """*grant* runs on *device* since then, and holds its compute there."""
        device.mark()
        if grant.compute:
            device.holding.append(grant)
            device.hold(grant.compute, since, grant.free_at)
            self.overdue.note(device)
            if device.reserved >= device.compute:
                self.withdraw(device)
        else:
            device.beside[grant] = None

    def let_go(self, device: DeviceState, grant: GrantState) -> None:
        """*grant* ends on *device*, or gives back the compute that it holds there."""
        device.mark()
        if grant.compute:
            device.holding.remove(grant)
            device.let_go(grant.compute, self.now)
            self.overdue.note(device)
        else:
            device.beside.pop(grant, None)

    def preload(self, device: DeviceState, copy: Copy, since: Seconds, free_at: Seconds) -> None:
        """A policy loads *copy* without a call since then, and should have done so at *free_at*. It holds compute."""
        device.preload = copy
        device.hold(copy.owner.reserves, since, free_at)
        self.withdraw(device)

    def end_preload(self, device: DeviceState, copy: Copy) -> bool:
        """*copy* is loaded, or gone. Return whether a policy had loaded it without a call."""
        if device.preload is not copy:
            return False
        device.preload = None
        device.let_go(copy.owner.reserves, self.now)
        self.freed = True
        return True

    def judge(self, device: DeviceState) -> None:
        """Another grant of *device* holds its compute, or the estimated end of one has changed."""
        device.mark()
        device.judge()
        self.overdue.note(device)

    # --- local queues ---

    def push(self, device: DeviceState, call: Call, copy: Copy) -> None:
        """*call*, whose time is estimated, waits for *copy* in the local queue of *device*."""
        call.copy = copy
        copy.queued += 1
        device.local.append(call)
        device.local_s += call.estimate_s
        if device.local[0] is call:
            self.overdue.note(device)
            self.withdraw(device)  # what it has spare is for its local queue

    def pull(self, device: DeviceState, call: Call) -> None:
        """*call* leaves the local queue of *device*."""
        local = device.local
        if local[0] is call:
            local.popleft()
            if local:
                self.overdue.note(device)
        else:
            local.remove(call)
        # Of an empty queue it is exactly 0, whatever was rounded.
        device.local_s = device.local_s - call.estimate_s if local else 0.0
        if call.copy is not None:
            call.copy.queued -= 1
