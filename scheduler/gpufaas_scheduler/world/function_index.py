"""The functions, their copies, and what waits for a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpufaas_cache_manager import residency
from gpufaas_core.model import Bytes, CopyId, Function, FunctionId, Seconds
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.device_index import DeviceIndex
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.hosts import Hosts
from gpufaas_scheduler.world.queue import GlobalQueue

if TYPE_CHECKING:
    from gpufaas_scheduler.world.call import Call


class FunctionIndex(DeviceIndex):
    """
    What follows from the facts of functions and copies is kept here: who holds what, `constrained`, `tasks`, who waits
    without a copy (`orphans`, `homeless`), which docs change. Copies come, go, load, drain and fall silent by these
    methods.
    """

    __slots__ = ("copies", "crowded", "functions", "homeless", "keeps", "orphans", "queue", "rare", "tasks")

    def __init__(self) -> None:
        self.functions: dict[FunctionId, FunctionState] = {}
        super().__init__(Hosts(self.functions))
        self.queue: GlobalQueue[Call] = GlobalQueue()
        self.copies: dict[CopyId, tuple[DeviceState, Copy]] = {}
        self.orphans: dict[FunctionId, FunctionState] = {}
        """Placed functions with waiting calls and without a holder, in the order in which they lost the last one or got
        their first call; and some that were such before, which drop out when calls are asked for."""
        self.homeless: dict[FunctionId, FunctionState] = {}
        """Direct functions with waiting calls and without a copy."""
        self.tasks: dict[str, list[FunctionState]] | None = None
        """The deployed functions by their tasks; None: functions came or went since the view was asked for variants."""
        self.keeps = False
        """A function with a minimum of copies was deployed, or a plan was in force, so copies may hold memory for ever.
        """
        self.crowded = False
        """Copies that a plan keeps have come or grown: calls may wait in vain for their room."""
        self.rare = False
        """Some function is `mixed`, a device is cleared, or `Hosts.gain`; or that has just been so."""

    # --- functions come and go ---

    def deploy(self, function: Function) -> FunctionState:
        """*function* is deployed, for the first time or again."""
        owner = self.functions.get(function.id)
        if owner is None:
            self.functions[function.id] = owner = FunctionState(function, self.changes)
            self.constrained += owner.bound
            self.hosts.deployed(owner.id, owner)
        else:
            self.mix(-owner.mixed)
            owner.deploy(function)
            self.moves += 1
        self.mix(owner.mixed)
        self.keeps |= owner.min_copies > 0
        self.tasks = None
        return owner

    def remove(self, owner: FunctionState) -> None:
        """*owner* takes no new calls, and is forgotten once its calls have ended."""
        owner.remove()
        self.tasks = None
        self.freed = True

    def forget(self, owner: FunctionState) -> None:
        """*owner*, which was removed, has no calls and no copies any more."""
        del self.functions[owner.id]
        owner.forget()
        self.hosts.forgotten(owner.id)
        self.mix(-owner.mixed)
        self.constrained -= owner.bound
        self.homeless.pop(owner.id, None)
        self.freed = True

    def note_waiting(self, owner: FunctionState) -> None:
        """One of its calls began to wait, or a device began or stopped holding it."""
        if not owner.waiting:
            return
        if not owner.placed:
            if owner.flow.calls and not owner.active:
                self.homeless[owner.id] = owner
        elif not owner.holders:
            self.orphans[owner.id] = owner
        elif self.hits.asked:
            self.hits.note(owner)

    def first_of_orphans(self, limit: int) -> list[Call]:
        """Return the first waiting call of each, of up to *limit* functions."""
        found: list[Call] = []
        stale = []
        returned = self.queue.returned
        for owner in self.orphans.values():
            calls = owner.flow.calls
            call = None if owner.holders or not calls else calls[0]
            if returned and not owner.holders:
                back = next((each for each in returned if each.owner is owner), None)
                if back is not None and (not calls or back.number < calls[0].number):
                    call = back
            if call is None:
                stale.append(owner.id)
            elif len(found) < limit:
                found.append(call)
            else:
                break
        for function in stale:
            del self.orphans[function]
        return found

    # --- copies come ---

    def insert(
        self, device: DeviceState, owner: FunctionState, memory: Bytes, load_s: Seconds, woken: int | None = None,
        share: int = 0,
    ) -> Copy:  # fmt: skip
        """
        A copy of *owner* begins to load, with what its plan says of it.

        :param woken: the number of the parked copy that it was
        :param share: it holds this share of the compute; 0: as the plan or the function says
        """
        number = owner.number if woken is None else woken
        owner.number += woken is None
        copy: Copy = residency.Copy(owner, memory, self.now, self.now + load_s, number)
        if owner.bound and (planned := owner.plan.get(device.id)) is not None:
            copy.share, copy.reserve = planned.share, planned.reserve
            copy.slots, copy.batch = planned.slots, planned.batch
        if share:
            copy.share = share
        self.adopt(device, copy)
        if self.hits.asked:
            self.hits.note(owner)
        return copy

    def adopt(self, device: DeviceState, copy: Copy, *, draining: bool = False) -> None:
        """*copy* is on *device* from now on, or was found there."""
        owner = copy.owner
        device.residency.insert(copy)
        self.moves += 1
        self.copies[copy.id] = device, copy
        owner.loading += copy.loading
        if owner.placed:
            device.copies[owner.id] = copy.id
            device.flows[owner.id] = owner.flow
            if owner.bound and device.id in owner.plan:
                copy.kept = owner.plan_version
                self.crowded = self.rare = True
        if draining:
            owner.draining[copy] = device
            owner.mark()
            device.mark()
        else:
            owner.add(copy, device)
        if copy.reserve or copy.share != owner.share:
            self.judge_limits(owner)

    def judge_limits(self, owner: FunctionState) -> None:
        """A plan or a policy has said, or says no more, what copies of *owner* take of the compute."""
        if not owner.placed:
            return
        limited = any(each.share or each.reserve for each in owner.plan.values())
        limited = limited or any(each.share or each.reserve for each in (*owner.active, *owner.draining))
        if limited != owner.limited:
            self.mix(-owner.mixed)
            owner.limit(limited=limited)
            self.mix(owner.mixed)
            self.rare = True

    def insert_rest(self, copy: Copy, parts: Iterable[tuple[DeviceState, Bytes, int]]) -> None:
        """*copy* has these further parts: the device of each, its memory there and its share."""
        copy.split = True
        entries = []
        for device, memory, share in parts:
            entry: Copy = residency.Copy(copy.owner, memory, self.now, copy.ready_at, copy.number)
            entry.split, entry.share = True, share
            device.residency.insert(entry)
            device.copies[copy.owner.id] = copy.id
            device.mark()
            entries.append((device.id, entry))
        copy.rest = tuple(entries)

    def parts(self, copy: Copy) -> list[tuple[DeviceState, Copy]]:
        """Return the further devices of a copy with several parts, each with its entry there."""
        devices = self.devices
        return [(devices[name], entry) for name, entry in copy.rest if name in devices]

    # --- what becomes of them ---

    def loaded(self, device: DeviceState, copy: Copy) -> None:
        """*copy* is ready, with all of its parts."""
        owner = copy.owner
        owner.mark()
        for each, entry in ((device, copy), *self.parts(copy)):
            each.mark()
            entry.loading, entry.ready_at = False, self.now
        owner.loading -= 1
        if copy not in owner.draining:
            owner.add(copy, device)
        owner.starved = None
        if owner.backoff is not None:
            owner.backoff.loaded(self.now)

    def drain(self, copy: Copy) -> None:
        """*copy* takes no more calls, and is evicted once it is idle."""
        owner = copy.owner
        owner.draining[copy] = device = owner.drop(copy)
        self.withdraw_full(device)
        self.note_waiting(owner)

    def revive(self, owner: FunctionState) -> bool:
        """Let a draining copy take calls again; False: there is none that may."""
        for copy, device in owner.draining.items():
            if not (device.shut or copy.split or copy.silent) and owner.allows(device):
                owner.add(copy, owner.draining.pop(copy))
                self.offer(device)
                return True
        return False

    def silence(self, device: DeviceState, copy: Copy) -> None:
        """*copy* takes no more calls until it is heard again. It drains, but is not evicted for that."""
        copy.silent = True
        device.mark()
        device.silent += copy.owner.placed
        if copy in copy.owner.active:
            self.drain(copy)
        if device.silent and not self.mixed:
            self.withdraw(device)
        self.freed = True

    def hear(self, device: DeviceState, copy: Copy) -> None:
        """*copy*, which was silent, takes calls again, unless its device takes none. It may be one too many."""
        owner = copy.owner
        copy.silent = False
        device.mark()
        device.silent -= owner.placed
        if not device.shut:
            owner.add(copy, owner.draining.pop(copy))
        self.offer(device)
        self.note_waiting(owner)

    def evict(self, device: DeviceState, copy: Copy, *, lost: bool = False) -> None:
        """Remove *copy* and free its charge. *lost*: its worker is gone already, so this is no eviction."""
        owner = copy.owner
        if copy.split:
            device, copy = self.copies[copy.id]
            for other, entry in self.parts(copy):
                other.mark()
                other.residency.remove(entry.id)
                del other.copies[owner.id]
                self.end_preload(other, entry)
        device.evictions += not lost
        device.residency.remove(copy.id)
        del self.copies[copy.id]
        self.moves += 1
        if owner.placed:
            del device.copies[owner.id], device.flows[owner.id]
        if copy in owner.active:
            owner.drop(copy)
        else:
            del owner.draining[copy]
            owner.mark()
            device.mark()
        if owner.limited:
            self.judge_limits(owner)
        if copy.loading:
            owner.loading -= 1
            self.end_preload(device, copy)
        if copy.silent:
            device.silent -= owner.placed
            if not lost:
                self.offer(device)
        self.freed |= lost
        self.note_waiting(owner)

    # --- memory ---

    def resize(self, owner: FunctionState) -> None:
        """The memory that copies of *owner* need has changed."""
        owner.fits_as_of = -1
        owner.mark()
        self.freed = True

    def fits_somewhere(self, owner: FunctionState) -> bool:
        """Whether some device that it may be on would be large enough if it were empty."""
        if owner.fits_as_of != self.fleet:
            owner.fits_as_of = self.fleet
            needs = ((owner.costs[kind], memory) for kind, memory in self.largest_for(owner).items())
            owner.fits = any(costs is not None and costs.occupation <= memory for costs, memory in needs)
        return owner.fits

    def largest_for(self, owner: FunctionState) -> dict[str, Bytes]:
        """Return `largest` for the devices that *owner* may be on."""
        if not owner.bound and owner.wanted <= self.least_compute:
            return self.largest
        largest: dict[str, Bytes] = {}
        for each in self.devices.values():
            if owner.takes(each) <= each.compute and owner.allows(each):
                largest[each.kind] = max(each.device.memory, largest.get(each.kind, 0))
        return largest
