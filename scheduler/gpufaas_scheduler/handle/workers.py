"""Events of workers: they load, fail to load, end, or need another amount of memory."""

from typing import Final

from gpufaas_core import messages as m
from gpufaas_core.model import copy_id
from gpufaas_core.plausible import is_size, is_time
from gpufaas_core.reservations import reservation
from gpufaas_core.units import format_bytes
from gpufaas_scheduler.handle.batches import ran_out
from gpufaas_scheduler.handle.copies import balance, drop, forget_if_done, inherit, note_lack, serve_fifo, shun, trim
from gpufaas_scheduler.handle.grants import change_share, end, estimate, next_local
from gpufaas_scheduler.handle.parking import unparked
from gpufaas_scheduler.handle.reserve import evictions, leave_for_others
from gpufaas_scheduler.handle.waiting import backs_off, give_up, refuse_failing
from gpufaas_scheduler.world import backoff, memory
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.calls import runs_on
from gpufaas_scheduler.world.costs import DISK
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.world import LEARNING_RATE, World

# A grant reaches its node within moments, or its caller gives up: this many are for bursts and for dead gateways.
_MAX_LOST: Final = 10_000
KEPT_S: Final = 60.0
"""After a change of a share that failed, no other one of its function is tried for so long."""


def _resident(
    world: World, event: m.Loaded | m.CopyFailed | m.Measured | m.Resized | m.ShareKept | m.WorkerExited | m.CopySilent
) -> tuple[DeviceState, Copy] | None:
    """Return the device and the copy of *event*; None: the engine has removed the copy."""
    state = world.devices.get(event.device)
    copy = None if state is None else state.residency.copies.get(copy_id(event.function, event.copy))
    if copy is not None and copy.split and not isinstance(event, m.Measured | m.Resized):
        return world.copies.get(copy.id)  # its worker is one
    return None if state is None or copy is None else (state, copy)


def loaded(world: World, event: m.Loaded) -> None:
    found = _resident(world, event)
    if found is None or not found[1].loading:
        world.ignored["Loaded"] += 1
        return
    device, copy = found
    owner = copy.owner
    world.loaded(device, copy)
    copy.tier = event.tier
    if owner.backoff is not None:
        note_lack(world, owner)
    inherit(world, owner)
    if world.learn and owner.declared.elastic:
        # Its node waits for an answer, even if nothing is lent.
        world.out += world.lending.lend(device, copy) or [memory.resize_of(device, copy)]
    if world.end_preload(device, copy):
        next_local(world, device)
    costs = owner.costs[device.kind]
    if costs is not None and world.learn and is_time(event.load_s) and not copy.split:
        if event.read_s or event.tier != DISK or costs.loads:
            read_s = event.read_s if is_time(event.read_s) else 0.0
            costs.learn_load(event.load_s, LEARNING_RATE, event.tier, read_s)
            if costs.host_s < costs.disk_s:
                world.hosts.gain = world.rare = True
        else:
            costs.learn_load(event.load_s, LEARNING_RATE)
        world.learnt[(owner.id, device.kind)] = None
    if costs is not None:
        for grant in device.holding:
            if grant.copy is copy:
                estimate(grant, costs, world.now)  # the load is over, so the end is known better
                world.judge(device)
    for other, entry in world.parts(copy):
        if world.end_preload(other, entry):
            next_local(world, other)
        else:
            world.judge(other)
    if not owner.placed:
        serve_fifo(world, owner)
    if not copy.pinned or owner.copies < owner.target or owner.surplus or owner.held is not None:
        world.freed = True


def load_failed(world: World, event: m.CopyFailed) -> None:
    found = _resident(world, event)
    if found is None or not found[1].loading:
        world.ignored["LoadFailed"] += 1
        return
    device, copy = found
    owner = copy.owner
    awaited = copy.running > 0
    ended = _lose(world, device, copy)
    if event.blameless:
        if not ended:  # no call waits for this copy: it is loaded again, but not at once
            _hold_back(world, owner)
        _after_loss(world, device, owner)
        return
    costs = owner.costs[device.kind]
    if event.out_of_memory and world.learn and costs is not None and not copy.split:
        largest = world.largest_for(owner).get(device.kind, device.device.memory)
        if memory.widen(costs, copy.limit, largest):
            _profile_changed(world, owner, device.kind)
            for call in ended:
                call.refusals -= 1  # the node refuses them now, only for lack of memory
            _after_loss(world, device, owner)
            return
        owner.starved = (
            f"function {owner.id} ran out of memory while it loaded: it had {format_bytes(copy.limit)}, which is "
            f"all that the largest {device.kind} device for it has ({event.reason}). Deploy a smaller or quantised "
            "model, or add a larger device"
        )
    _start_failed(world, owner, awaited, f"the last load, on {device.id}: {event.reason}")
    _after_loss(world, device, owner)


def worker_exited(world: World, event: m.WorkerExited) -> None:
    found = _resident(world, event)
    if found is None:
        unparked(world, event)
        return
    device, copy = found
    owner = copy.owner
    young = copy.loading or world.now - copy.ready_at < backoff.STEADY_S
    # If calls ran on it, they may have ended it.
    if not _lose(world, device, copy) and young and owner.copies < owner.target:
        why = f"the last worker, on {device.id}, ended right after it had started: {event.reason}"
        _start_failed(world, owner, False, why)
    _after_loss(world, device, owner)


def silent(world: World, event: m.CopySilent) -> None:
    found = _resident(world, event)
    if found is None or found[1].silent == event.silent or found[1].loading or found[1].split:
        world.ignored["CopySilent"] += 1
        return
    device, copy = found
    owner = copy.owner
    if not event.silent:
        world.hear(device, copy)
        balance(world, owner)
        trim(world, owner)  # one that is too many takes no call
        if not owner.placed:
            serve_fifo(world, owner)
    else:
        shun(world, device, copy)


def _start_failed(world: World, owner: FunctionState, awaited: bool, why: str) -> None:
    """A copy could not be loaded. :param awaited: a call waited for it"""
    held_back = _hold_back(world, owner)
    # A function that serves elsewhere goes on, without this copy.
    if owner.backoff is not None and ((held_back and awaited) or owner.copies <= owner.loading):
        owner.backoff.reason = why
    if held_back and backs_off(owner):
        for call in world.waits_of(owner):
            give_up(world, call)
            world.out.append(refuse_failing(world, call.id, owner))


def _hold_back(world: World, owner: FunctionState) -> bool:
    """Count a failed load. Return whether the next one has to wait."""
    held_back = owner.load_failed(world.now)
    note_lack(world, owner)
    return held_back


def _lose(world: World, device: DeviceState, copy: Copy) -> list[Call]:
    """
    Remove a copy whose worker is gone. Its calls end, and those in its local queue go back to the global queue.

    Return the calls that ended.
    """
    ended = runs_on(copy, device)
    for call in ended:
        end(world, call)
        world.lost[call.id] = call
    while len(world.lost) > _MAX_LOST:
        del world.lost[next(iter(world.lost))]
    drop(world, device, copy)
    return ended


def _after_loss(world: World, device: DeviceState, owner: FunctionState) -> None:
    next_local(world, device)
    if owner.removed:
        forget_if_done(world, owner)


def measured(world: World, event: m.Measured) -> None:
    found = _resident(world, event)
    if found is None:
        _measured_late(world, event)
        return
    if not is_size(event.occupation):
        world.ignored["Measured"] += 1
        return
    device, copy = found
    costs = copy.owner.costs[device.kind]
    peak, charged, limit = event.occupation, copy.memory, copy.limit
    if event.out_of_memory and costs is not None and world.learn:
        ran_out(copy, device, costs)
    if event.out_of_memory and costs is not None and limit <= costs.occupation:
        peak = max(peak, limit)  # it needs more than it had; with lent memory, nothing follows
    if peak:
        wanted = min(reservation(peak), device.device.memory)
        if costs is not None and world.learn and not copy.split:  # a part says nothing of the whole
            if costs.learn_size(wanted):
                _profile_changed(world, copy.owner, device.kind)
            wanted = min(costs.occupation, device.device.memory)
        world.out += world.lending.resize(device, copy, max(wanted, copy.owner.declared.floor))
    elastic = copy.owner.declared.elastic
    if world.learn and event.out_of_memory and elastic:
        leaving = world.lending.outgrown(device, copy)
        commands = evictions(world, device, leaving)
        leave_for_others(world, device, leaving)
        world.out += commands
    if world.learn and (event.out_of_memory or (copy.limit > limit and elastic)):
        world.out += world.lending.lend(device, copy)
    if (copy.memory, copy.limit) != (charged, limit):
        world.freed = True


def _measured_late(world: World, event: m.Measured) -> None:
    """The copy was evicted while its memory was measured, after its answer. Its need is known for the next one."""
    owner, state = world.functions.get(event.function), world.devices.get(event.device)
    costs = None if owner is None or state is None else owner.costs[state.kind]
    told = event.occupation > 0 and is_size(event.occupation)
    if owner is None or state is None or costs is None or not told or not world.learn:
        world.ignored["Measured"] += 1
    elif costs.learn_size(min(reservation(event.occupation), state.device.memory)):
        _profile_changed(world, owner, state.kind)


def resized(world: World, event: m.Resized) -> None:
    found = _resident(world, event)
    if found is None:
        world.ignored["Resized"] += 1
        return
    device, copy = found
    limit = copy.limit
    world.out += world.lending.answered(device, copy, event)
    if copy.limit < limit:
        world.freed = True


def share_kept(world: World, event: m.ShareKept) -> None:
    found = _resident(world, event)
    if found is None or found[1].share == event.share:
        world.ignored["ShareKept"] += 1
        return
    device, copy = found
    copy.owner.keeps_share_until = world.now + KEPT_S
    change_share(world, device, copy, event.share)  # it may be more than is spare: then calls wait for the rest
    world.freed = True


def profiled(world: World, event: m.Profiled) -> None:
    owner = world.functions.get(event.function)
    costs = None if owner is None else owner.costs[event.kind]
    if owner is None or costs is None:
        world.ignored["Profiled"] += 1
        return
    costs.take(event.taken)
    _profile_changed(world, owner, event.kind)


def _profile_changed(world: World, owner: FunctionState, kind: str) -> None:
    world.resize(owner)
    world.learnt[(owner.id, kind)] = None
