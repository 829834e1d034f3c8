"""
Copies that come and go without a policy: those of direct functions, and those that a minimum or `Scaled` asks for.
"""

from collections import Counter
from typing import Final

from gpufaas_core import messages as m
from gpufaas_scheduler.fit import Reason
from gpufaas_scheduler.handle.grants import next_local, return_all, return_local, start
from gpufaas_scheduler.handle.parking import evicted, order_load, park
from gpufaas_scheduler.handle.reserve import reserve
from gpufaas_scheduler.handle.staging import stage_beside
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.calls import runs_on
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.places import room_for
from gpufaas_scheduler.world.world import World

MAX_LOADING: Final = 4
"""Copies of a direct function that load at the same time without a call, once one copy is ready and shows that it can.
A container takes a second to start, mostly waiting; more at a time would take the cores from running calls."""


def note_lack(world: World, owner: FunctionState) -> None:
    world.short.pop(owner.id, None)
    world.held_back.pop(owner.id, None)
    if owner.copies < owner.target and not owner.removed and owner.after is None:
        (world.held_back if is_held_back(world, owner) else world.short)[owner.id] = owner


def is_held_back(world: World, owner: FunctionState) -> bool:
    """Whether its loads failed, and the next one has to wait."""
    return owner.backoff is not None and owner.backoff.retry_at > world.now


def wake(world: World, owner: FunctionState) -> None:
    """A call of a function that was scaled to zero came: its calls decide about its copies again."""
    owner.wake()
    _revive(world, owner, owner.max_copies or owner.copies + len(owner.draining))


def _revive(world: World, owner: FunctionState, most: int) -> None:
    """Let draining copies take calls again, until there are *most* that do."""
    revived = False
    while owner.copies < most and world.revive(owner):
        revived = True
    if revived and not owner.placed:
        serve_fifo(world, owner)


def balance(world: World, owner: FunctionState) -> None:
    """Its number of copies changed, or the number that it should have: note what it lacks, or has too many of."""
    note_lack(world, owner)
    if owner.surplus or owner.draining:
        world.surplus[owner.id] = owner
    world.freed = True


def inherit(world: World, owner: FunctionState) -> None:
    """If *owner* has a copy, and all calls of the revision before: from now on its calls decide about its copies."""
    if owner.before is not None and owner.before.removed and owner.copies > owner.loading:
        owner.before = None
        owner.wake()
        balance(world, owner)


def evict(world: World, device: DeviceState, copy: Copy, to: str = "none") -> None:
    """Evict a copy that is no victim of a miss or a load."""
    if copy.split:
        device, copy = world.copies[copy.id]
    preload, further = device.preload, world.parts(copy)
    world.evict(device, copy)
    world.out.append(m.EvictCopy(copy.owner.id, device.id, copy.number, to))
    if to != "none":
        park(world, device, (copy,))
    if preload is not device.preload:
        next_local(world, device)
    for other, _ in further:
        next_local(world, other)


def send_off(world: World, device: DeviceState, copy: Copy) -> None:
    """Evict a copy, or let it drain if it is in use."""
    owner = copy.owner
    if copy.split:
        copy = world.copies[copy.id][1]
    if copy.silent and not copy.pinned:
        evict(world, device, copy)
    elif copy in owner.draining:
        pass
    elif copy.pinned:
        world.drain(copy)
        world.tangled = True
    else:
        evict(world, device, copy)
    balance(world, owner)


def shun(world: World, device: DeviceState, copy: Copy) -> None:
    """Its worker is silent: it takes no calls until it is heard, and those that wait for it may run elsewhere."""
    return_all(world, device)
    world.silence(device, copy)
    world.tangled = True


def drop(world: World, device: DeviceState, copy: Copy) -> None:
    """Remove a copy whose worker is lost, or a part of it with *device*, and return its local queue."""
    owner, lost = copy.owner, device
    if copy.split:
        device, copy = world.copies[copy.id]
    if copy.queued:
        for call in [each for each in device.local if each.owner is owner]:
            return_local(world, device, call)
    world.evict(device, copy, lost=True)
    if copy.split:
        for each in (device, *(other for other, _ in world.parts(copy))):
            if each is not lost:
                next_local(world, each)
    if owner.copies < owner.target and owner.id not in world.short:
        note_lack(world, owner)


def forget_if_done(world: World, owner: FunctionState) -> None:
    """Evict a removed function and forget it, once none of its calls waits or runs."""
    if owner.waiting or owner.running or world.functions.get(owner.id) is not owner:
        return
    for copy, device in [*owner.active.items(), *owner.draining.items()]:
        evict(world, device, copy)
    for name in sorted(owner.parked):  # a successor does not know which was parked first
        device = world.devices[name]
        if (gone := world.parked.take(device, owner)) is not None:
            world.out += evicted(device, (gone,))
    world.forget(owner)
    world.surplus.pop(owner.id, None)


def serve_fifo(world: World, owner: FunctionState) -> None:
    """Start as many waiting calls of a direct function as it has free slots; load it if it has no copy."""
    queue = owner.flow
    if not owner.active and queue.calls:
        world.revive(owner)
    if not owner.active and queue.calls:
        room = room_for(world, owner)
        if room is None:
            return
        device, victims = room
        first = queue.calls[0]
        queue.remove(first)
        first.started_at = world.now
        start(world, first, device, None, victims)
    world.homeless.pop(owner.id, None)
    while queue.calls and (free := _free_copy(owner)) is not None:
        following = queue.calls[0]
        queue.remove(following)
        following.started_at = world.now
        start(world, following, owner.active[free], free, ())


def trim(world: World, owner: FunctionState) -> None:
    """Evict surplus copies that are idle, and drain those that are not."""
    for copy, device in list(owner.draining.items()):
        if not (copy.pinned or copy.silent):
            evict(world, device, copy)
            if owner.after is not None:
                load_copies(world, owner.after)  # before a call takes the room
    surplus = owner.surplus
    if surplus:
        for copy in _dispensable(owner)[:surplus]:
            owner.excess -= 1
            if copy.pinned:
                world.drain(copy)
                world.tangled = True
            else:
                evict(world, owner.active[copy], copy)
    if not owner.surplus:
        if owner.excess:  # none of its copies has to go any more
            owner.excess = 0
            owner.mark()
        if not owner.draining:
            world.surplus.pop(owner.id, None)


def load_copies(world: World, owner: FunctionState) -> None:
    """Load copies that the function lacks: only where they fit, and a few at a time."""
    if is_held_back(world, owner) or owner.after is not None:
        note_lack(world, owner)
        return
    _revive(world, owner, owner.target)
    world.note_waiting(owner)
    while owner.copies < owner.target:
        at_once = MAX_LOADING if not owner.placed and owner.loading < owner.copies else 1
        if owner.loading >= at_once or not _load_copy(world, owner):
            return
    world.short.pop(owner.id, None)


def _load_copy(world: World, owner: FunctionState) -> bool:
    """Load one copy. Return whether there was room."""
    if owner.placed and owner.copies >= len(world.devices):
        return False
    room = room_for(world, owner)
    if room is None and owner.before is not None:
        _roll(world, owner, owner.before)
        room = room_for(world, owner)
    if room is None:
        stage_beside(world, owner)
        return False
    device, victims = room
    if victims and owner.copies >= owner.min_copies and not owner.eager and not owner.flow.calls:
        return False
    copy, names = reserve(world, device, owner, victims)
    order_load(world, device, copy, names)
    if not owner.placed:
        serve_fifo(world, owner)  # its slots are free from now on, see `_free_copy`
    return True


def _roll(world: World, owner: FunctionState, before: FunctionState) -> None:
    """
    *owner* fits nowhere beside *before*, which it succeeds: evict one copy of that where it fits instead, or let one
    drain. One after the other, until *before* has no more copies than *owner*: it has all calls until then.
    """
    if before.removed or before.draining or before.copies <= owner.copies + 1 or not owner.placed or owner.shared_hold:
        return
    for copy in _dispensable(before):
        device, ends = before.active[copy], not any(call.endless for call in runs_on(copy, before.active[copy]))
        need = owner.need(device)
        fits = not isinstance(need, Reason) and need <= device.residency.free + copy.memory
        share = owner.holds(device)
        if fits and ends and not copy.split and (not share or share <= device.spare + copy.share):
            before.after = owner
            send_off(world, device, copy)
            return


def _free_copy(owner: FunctionState) -> Copy | None:
    """
    Return the copy for the next call of a direct function; None: the call waits for a slot. A loading copy counts only
    while none is ready: a call in the FIFO takes the first slot that becomes free, also that of a copy just loaded.
    """
    if owner.ready is not None and owner.loading < owner.copies:
        return owner.ready.first(owner.slots)
    best: Copy | None = None
    fewest = owner.slots
    for copy in owner.active:
        if copy.running < fewest:
            best, fewest = copy, copy.running
    return best


def place_direct(world: World, call: Call) -> None:
    """Start a call of a direct function, or let it wait in the FIFO of its function."""
    owner = call.owner
    if not owner.flow.calls and (free := _free_copy(owner)) is not None:
        start(world, call, owner.active[free], free, ())
        return
    owner.flow.append(call)
    if not owner.active:
        world.note_waiting(owner)
        serve_fifo(world, owner)
    elif owner.waiting == 1 and owner.id in world.short:
        load_copies(world, owner)  # now it may evict; later calls change nothing about that


def scaled(world: World, event: m.Scaled) -> None:
    owner = world.functions.get(event.function)
    if owner is None or owner.removed or owner.plan:
        world.ignored["Scaled"] += 1
        return
    owner.ask(event.copies)
    owner.held_until = world.now + event.hold_s
    balance(world, owner)


def _dispensable(owner: FunctionState) -> list[Copy]:
    """
    Return the copies that may go, the first to go first: by the fewest running calls, then by the most copies on their
    device, then by the last use, oldest first.

    Loading copies are left out until they are loaded: a call may have been promised one.
    """
    ready = [(copy, device) for copy, device in owner.active.items() if not copy.loading]
    ready.sort(key=lambda each: (each[0].running + each[0].queued, each[0].last_used, each[1].order))
    left = Counter(device for _, device in ready)
    ranked = []
    for at, (copy, device) in enumerate(ready):
        ranked.append((copy.running + copy.queued, -left[device], at, copy))
        left[device] -= 1
    ranked.sort(key=lambda each: each[:3])
    return [each[3] for each in ranked]
