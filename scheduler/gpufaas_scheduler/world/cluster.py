"""
Devices and functions, which device holds which function, and which devices are idle.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from math import inf

from gpufaas_cache_manager import eviction, residency
from gpufaas_cache_manager.replacement import Replacement
from gpufaas_core.model import ALL_COMPUTE, Bytes, CallId, CopyId, Device, DeviceId, FunctionId, Part, Seconds
from gpufaas_scheduler.fit import SHUT, Fit, Reason, fits
from gpufaas_scheduler.world.agenda import Agenda
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.changes import Changes
from gpufaas_scheduler.world.demand import Demand
from gpufaas_scheduler.world.device import JOINED, DeviceState, IdleKey
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.hits import Hits
from gpufaas_scheduler.world.hosts import Hosts
from gpufaas_scheduler.world.orphans import Orphans
from gpufaas_scheduler.world.parked import ParkedCopies
from gpufaas_scheduler.world.queue import GlobalQueue


class Clearing:
    """The device that takes no calls until it has room for one that has waited long: see `clearing`."""

    __slots__ = ("call", "device", "pauses_until")

    def __init__(self) -> None:
        self.device: DeviceState | None = None
        self.call: Call | None = None
        self.pauses_until: Seconds = 0.0
        """No device is looked for before."""


class Cluster:
    """The state that decisions are made from."""

    def __init__(self, replacement: Replacement) -> None:
        self.now: Seconds = 0.0
        self.changes = Changes()
        self.learns = False
        """See `Engine`."""
        self.queue: GlobalQueue[Call] = GlobalQueue()
        self.calls: Mapping[CallId, Call] = {}
        """All calls that wait or run, once there is a book of them."""
        self.devices: dict[DeviceId, DeviceState] = {}
        self.functions: dict[FunctionId, FunctionState] = {}
        self.tasks: dict[str, list[FunctionState]] | None = None
        """The deployed functions by their tasks; None: functions came or went since the view was asked for variants."""
        self.hosts = Hosts(self.functions)
        self.copies: dict[CopyId, tuple[DeviceState, Copy]] = {}
        self.largest: dict[str, Bytes] = {}
        """Memory of the largest device, by kind."""
        self.fleet = 0
        """Counts changes of devices and profiles. Conclusions from an older count are void."""
        self.constrained = 0
        """The number of functions with constraints, plus `mixed`, plus the number of drained devices."""
        self.mixed = 0
        """The number of functions that take a part of a device's compute."""
        self.least_compute = ALL_COMPUTE
        """The least compute that one of the devices has."""
        self.keeps = False
        """A function with a minimum of copies was deployed, so copies may hold memory for ever."""
        self.idle_devices: list[IdleKey] = []
        """
        Devices without a local queue that have compute that no grant holds, or are open. Always sorted: sorting 1,000
        devices would cost more than the rest of a decision.
        """
        self.tail: list[DeviceState] | None = None
        """The last ones of `idle_devices`, from the end to `tail_from`, since policies ask for them; None: not now."""
        self.tail_from: IdleKey | None = None
        """The key of the last one in `tail`; None: it has all idle devices."""
        self.moves = 0
        """Counts the copies that came or went, the devices likewise, and deployments."""
        self.replacement = replacement
        self.ahead = False
        """Some node takes calls ahead."""
        self.parks: bool = getattr(replacement, "park", False)
        """Victims are parked where their nodes can do that."""
        self.parked = ParkedCopies()
        self.joined = 0
        """Devices that have joined so far."""
        self.orphans = Orphans(self.queue)
        self.hits = Hits()
        self.reserved_until: Seconds = -inf
        """See `contract.Start.reserved_s`."""
        self.demand = Demand()
        self.agenda = Agenda()
        self.clearing = Clearing()
        self.clears = False
        """A device is cleared."""
        self.rare = False
        """Some function is `mixed`, a device is cleared, or `Hosts.gain`; or that has just been so."""

    def note_waiting(self, owner: FunctionState) -> None:
        """One of its calls began to wait, or a device began or stopped holding it."""
        if owner.waiting and owner.queued:
            if owner.holders:
                if self.hits.asked:
                    self.hits.note(owner)
            else:
                self.orphans.functions[owner.id] = owner

    # --- devices and residency ---

    def attach(self, device: Device, order: int | None = None) -> DeviceState:
        """A device joins, as number *order* or the next. The caller makes it idle or busy."""
        order = self.joined if order is None else order
        self.joined = max(self.joined, order + 1)
        state = DeviceState(device, order, self.changes, self.hosts.of(device))
        state.mark()
        self.devices[device.id] = state
        self.largest[device.kind] = max(device.memory, self.largest.get(device.kind, 0))
        self.least_compute = min(self.least_compute, device.compute)
        self.fleet += 1
        self.moves += 1
        self.ahead |= device.ahead
        return state

    def leave(self, device: DeviceState) -> None:
        if device.idle_key is not None:
            self.set_busy(device)
        self.constrained -= device.closed
        for copy in list(device.residency):
            self.evict(device, copy, lost=True)
        self.parked.leave(device)
        del self.devices[device.id]
        device.gone = True
        device.forget()
        self.hosts.leave(device.host, device.id)
        self.largest = {}
        self.least_compute = min([ALL_COMPUTE, *(each.compute for each in self.devices.values())])
        for each in self.devices.values():
            self.largest[each.kind] = max(each.device.memory, self.largest.get(each.kind, 0))
        self.fleet += 1
        self.moves += 1

    def close(self, device: DeviceState, *, closed: bool) -> None:
        """*device* takes no new calls from now on, or takes calls again."""
        device.closed = device.shut = closed
        device.mark()
        self.constrained += 1 if closed else -1

    def offer(self, device: DeviceState) -> None:
        """The policy may use *device*, if it has no local queue, and is idle, has spare compute, or is open."""
        if (
            device.idle_key is None
            and (device.reserved < device.compute or device.open)
            and not (device.shut or device.local or device.preload)
        ):
            self.set_idle(device)

    def drain(self, owner: FunctionState, copy: Copy) -> None:
        """*copy* takes no more calls, and is evicted once it is idle."""
        device = owner.drain(copy)
        if owner.shared_hold and device.idle_key is not None and device.reserved >= device.compute and not device.open:
            self.set_busy(device)  # there is no copy any more that calls could join
        self.note_waiting(owner)

    def revive(self, owner: FunctionState) -> bool:
        """Let a draining copy take calls again; False: there is none that may."""
        device = owner.revive()
        if device is not None and owner.shared_hold:
            self.offer(device)
        return device is not None

    def silence(self, device: DeviceState, copy: Copy) -> None:
        """*copy* takes no more calls until it is heard again. It drains, but is not evicted for that."""
        copy.silent = True
        device.mark()
        device.silent += copy.owner.queued
        if copy in copy.owner.active:
            self.drain(copy.owner, copy)
        if device.idle_key is not None and device.silent and not self.mixed:
            self.set_busy(device)

    def hear(self, device: DeviceState, copy: Copy) -> None:
        """*copy*, which was silent, takes calls again, unless its device takes none. It may be one too many."""
        owner = copy.owner
        copy.silent = False
        device.mark()
        device.silent -= owner.queued
        if not device.shut:
            owner.add(copy, owner.draining.pop(copy))
        self.offer(device)
        self.note_waiting(owner)

    def mix(self, more: int) -> None:
        """
        Count *more* functions that take a part of a device's compute. When the first comes or the last goes, `set_idle`
        judges devices with silent copies anew.
        """
        before, self.mixed = self.mixed, self.mixed + more
        if (before > 0) != (self.mixed > 0):
            for each in [each for each in self.devices.values() if each.silent]:
                if self.mixed:
                    self.offer(each)
                elif each.idle_key is not None:
                    self.set_busy(each)

    def set_idle(self, device: DeviceState) -> None:
        if device.silent and not self.mixed:
            return  # policies take it that all that an idle device holds can be used, unless compute is shared
        first = JOINED if device.reserved and device.reserved >= device.compute else -device.starts
        device.idle_key = key = (first, device.order, device)
        insort(self.idle_devices, key)
        if self.tail is not None and (self.tail_from is None or key > self.tail_from):
            self.tail = None
        if self.hits.asked:
            self.hits.note_idle(device)

    def set_busy(self, device: DeviceState) -> None:
        key = device.idle_key
        assert key is not None
        del self.idle_devices[bisect_left(self.idle_devices, key)]
        device.idle_key = None
        if self.tail is not None and (self.tail_from is None or key >= self.tail_from):
            self.tail = None
        if self.hits.asked:
            self.hits.note_busy(device)

    def insert(
        self, device: DeviceState, owner: FunctionState, memory: Bytes, load_s: Seconds, woken: int | None = None
    ) -> Copy:
        """:param woken: the number of the parked copy that it was"""
        number = owner.number if woken is None else woken
        owner.number += woken is None
        copy: Copy = residency.Copy(owner, memory, self.now, self.now + load_s, number)
        self.place(device, copy)
        owner.add(copy, device)
        owner.loading += 1
        if self.hits.asked:
            self.hits.note(owner)
        return copy

    def place(self, device: DeviceState, copy: Copy) -> None:
        """*copy* is in the memory of *device* from now on."""
        device.residency.insert(copy)
        self.moves += 1
        self.copies[copy.id] = device, copy
        if copy.owner.queued:
            device.copies[copy.owner.id] = copy.id
            device.flows[copy.owner.id] = copy.owner.flow

    def evict(self, device: DeviceState, copy: Copy, *, lost: bool = False) -> None:
        """Remove *copy* and free its charge. *lost*: its worker is gone already, so this is no eviction."""
        owner = copy.owner
        if not owner.marked:
            owner.mark()
        if copy.split:
            device, copy = self.copies[copy.id]
            for other, entry in self.parts(copy):
                other.mark()
                other.residency.remove(entry.id)
                del other.copies[owner.id]
                other.end_preload(entry, self.now)
        if not device.marked:
            device.mark()
        device.evictions += not lost
        device.residency.remove(copy.id)
        del self.copies[copy.id]
        self.moves += 1
        if owner.queued:
            del device.copies[owner.id], device.flows[owner.id]
        if copy in owner.active:
            owner.drop(copy)
        else:
            del owner.draining[copy]
        if copy.silent:
            device.silent -= owner.queued
            if not lost:
                self.offer(device)
        if copy.loading:
            owner.loading -= 1
            device.end_preload(copy, self.now)
        self.note_waiting(owner)

    def parts(self, copy: Copy) -> list[tuple[DeviceState, Copy]]:
        """Return the further devices of a copy with several parts, each with its entry there."""
        devices = self.devices
        return [(devices[name], entry) for name, entry in copy.rest if name in devices]

    def fits(
        self,
        device: DeviceState,
        owner: FunctionState,
        victims: tuple[CopyId, ...] | None = None,
        *,
        starts: bool = True,
        part: Part | None = None,
    ) -> Fit[FunctionState] | Reason:
        """
        Return the copies to evict from *device* so that one more copy of *owner* fits, or why it does not fit.

        :param victims: evict these; None: as many as needed, in the replacement order
        :param starts: a call starts there at once, and needs its compute now
        :param part: the copy has several parts, and this one there
        """
        need = SHUT if device.shut and not device.closed else owner.need(device)
        if isinstance(need, Reason):
            return need
        compute = (owner.reserves if starts else 0) or owner.share
        if part is not None:
            need, compute = part.memory, part.share or owner.reserves
        leaving = self.replacement if victims is None else victims
        return fits(device.residency, need, owner, leaving, compute, device.reserved)

    def leaving(self, device: DeviceState, owner: FunctionState) -> tuple[Copy, ...] | None:
        """
        Return the idle copies with shares to evict so that one more call of *owner* has its compute on *device*, beside
        a copy that is there; None: grants hold it, or copies that stay.
        """
        lacking = device.lacks(owner)
        return () if lacking <= 0 else eviction.victims(self.replacement, device.residency, 0, owner, lacking)

    def fits_somewhere(self, owner: FunctionState) -> bool:
        """Whether some device that it may be on would be large enough if it were empty."""
        if owner.fits_as_of != self.fleet:
            owner.fits_as_of = self.fleet
            needs = ((owner.costs[kind], memory) for kind, memory in self.largest_for(owner).items())
            owner.fits = any(costs is not None and costs.occupation <= memory for costs, memory in needs)
        return owner.fits

    def largest_for(self, owner: FunctionState) -> dict[str, Bytes]:
        """Return `largest` for the devices that *owner* may be on."""
        if not owner.constraints and owner.wanted <= self.least_compute:
            return self.largest
        largest: dict[str, Bytes] = {}
        for each in self.devices.values():
            if owner.wanted <= each.compute and owner.allows(each):
                largest[each.kind] = max(each.device.memory, largest.get(each.kind, 0))
        return largest
