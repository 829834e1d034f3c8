"""A device joins, with the copies and calls that its node has already."""

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Final

from msgspec.structs import replace

from gpufaas_cache_manager import residency
from gpufaas_cache_manager.residency import ANSWERED, NOT_ASKED
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, CopyId, Device, DeviceId, Part, Seconds, copy_id
from gpufaas_core.snapshot import CallDoc, DeviceDoc, DeviceSnapshot, ResidentDoc, ResidentSnapshot, RunningCall
from gpufaas_scheduler import docs
from gpufaas_scheduler.handle.agenda import node_joined
from gpufaas_scheduler.handle.copies import balance, serve_fifo
from gpufaas_scheduler.handle.fleet import forget_removed, leave
from gpufaas_scheduler.handle.grants import TAKEN_OVER, end, grant_again, next_local
from gpufaas_scheduler.handle.parking import keep_parked
from gpufaas_scheduler.handle.parts import hold_parts
from gpufaas_scheduler.handle.waiting import unqueue, wait_again
from gpufaas_scheduler.world.call import Call, GrantState
from gpufaas_scheduler.world.call_state import RUNNING
from gpufaas_scheduler.world.calls import runs_on
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.world import World

# Calls that were started before this engine knew of them have numbers below all others.
_MAX_ADOPTED: Final = 1 << 40


def device_joined(world: World, event: m.DeviceJoined) -> None:
    known = world.devices.get(event.device.id)
    if event.snapshot is not None:
        _device_came_back(world, event, event.snapshot, known)
    else:
        if known is not None:
            # Its node restarted before its absence was noticed: it holds nothing any more.
            forget_removed(world, leave(world, known))
        tell_staged(world, event)
        world.offer(world.attach(event.device))
    node_joined(world, event)


def tell_staged(world: World, event: m.DeviceJoined) -> None:
    """The node of a device that joins tells what is in its host tier."""
    if event.staged is not None:
        hosts = world.hosts
        hosts.tell(hosts.of(event.device), event.staged)
        world.rare = True


def _device_came_back(world: World, event: m.DeviceJoined, snapshot: DeviceSnapshot, known: DeviceState | None) -> None:
    """A node tells what its device has. *known* is the device's state, if it was not taken for gone yet."""
    now, device = world.now, event.device
    doc: DeviceDoc | None = None
    calls: dict[CallId, Call] = {}
    local: list[Call] = []
    held: list[FunctionState] = []
    if known is not None:
        doc = replace(docs.device_doc(known, now), order=world.joined)
        local = list(known.local)
        for call in local:
            unqueue(world, call)
        for call in known.runs():
            end(world, call)
            calls[call.id] = call
        held = leave(world, known)
    waiting: dict[CallId, Call] = {}
    tell_staged(world, event)
    adopt(world, device, snapshot, now, doc, now, calls, local, waiting)
    for call in waiting.values():
        wait_again(world, call)
    # Their grants may still be on their way: if a node refuses one, its call waits again.
    for call in calls.values():
        world.lost[call.id] = call
    next_local(world, world.devices[device.id])
    for owner in {each.function: world.functions.get(each.function) for each in snapshot.residents}.values():
        if owner is not None:
            balance(world, owner)
            held.append(owner)
            if not owner.removed and not owner.placed:
                serve_fifo(world, owner)
    forget_removed(world, held)  # not before: its calls may go on here


def adopt(
    world: World,
    device: Device,
    snapshot: DeviceSnapshot,
    at: Seconds,
    doc: DeviceDoc | None,
    since: Seconds,
    calls: dict[CallId, Call],
    local: list[Call],
    waiting: dict[CallId, Call],
) -> bool:
    """
    Take over a device with the copies and calls of *snapshot*, which was made at *at*.

    :param doc: the scheduler's state of the device, made at *since*
    :param calls: the calls that should run there; those that do not remain in it
    :param local: its local queue; calls that cannot wait there go to *waiting*
    :param waiting: calls that wait elsewhere; those that run here are removed from it
    :return: whether something differs from *doc*
    """
    taken = {each.order for each in world.devices.values()}
    fresh = doc is None or doc.order in taken or device.id in world.devices
    state = world.attach(device, None if fresh or doc is None else doc.order)
    if doc is not None:
        state.starts, state.served, state.hits = doc.starts, doc.served, doc.hits
        state.misses, state.evictions, state.busy_s = doc.misses, doc.evictions, doc.busy_s
    changed = _adopt_residents(world, state, snapshot, at, doc, since)
    _adopt_parked(world, state, snapshot)
    if doc is not None and doc.closed:
        world.close(state, closed=True)
    running: list[tuple[Call, RunningCall]] = []
    for each in snapshot.running:
        copy = state.residency.copies.get(copy_id(each.function, each.copy))
        if copy is None:
            continue  # it is on its way out, and its calls with it
        call = _adopt_call(world, state, copy, each, at, calls, waiting)
        running.append((call, each))
    if doc is not None and calls:
        changed = True
    _adopt_grants(world, state, running, at, doc, since)
    if doc is not None and state.busy != (doc.status != "idle"):
        changed = True
    waits = _adopt_local(world, state, local)
    for call in local:
        if call not in waits:
            changed = True
            waiting[call.id] = call
    if doc is not None and len(waits) == len(doc.local):
        state.local_s = doc.local_s
    world.overdue.note(state)
    return changed


def _adopt_grants(
    world: World,
    state: DeviceState,
    running: list[tuple[Call, RunningCall]],
    at: Seconds,
    doc: DeviceDoc | None,
    since: Seconds,
) -> None:
    """
    Make the grants of *running*, and the load without a call of *doc*. Those that held compute by *doc* come first;
    what exceeds the compute of the device waits on the node (`DeviceState.others`).
    """
    known = {} if doc is None else {each.call: (rank, each) for rank, each in enumerate(doc.running)}
    placed = []
    for told, grant in _grants_of(running, {call: each.grant for call, (_, each) in known.items()}):
        if grant.copy.owner.placed:
            rank, before = known.get(grant.calls[0].id, (inf, None))
            if before is not None and not before.compute:
                rank = inf
            placed.append((rank, not told.begun, -told.age_s, told, grant, before))
        else:
            for call in grant.calls:
                call.grant, call.granted = 0, None
                state.direct[call.id] = call
    placed.sort(key=lambda each: each[:3])
    for *_, told, grant, before in placed:
        copy, held = grant.copy, 0 if before is None else before.compute
        if copy.share or (copy.owner.shared_hold and any(each.copy is copy for each in state.holding)):
            _expect(grant, told, at, before, since)
            state.beside[grant] = None
        elif before is not None and before.ahead and any(each.copy is copy for each in state.holding):
            _expect(grant, told, at, before, since)
            grant.ahead = True
            state.beside[grant] = None
            state.free_at = max(state.free_at, grant.free_at)
        elif (compute := held or copy.owner.takes(state)) > state.spare:
            state.others.append(grant)
        else:
            grant.compute = compute
            _expect(grant, told, at, before if held else None, since)
            began_at = since - doc.busy_for_s if doc is not None and held else at - told.age_s
            world.begin(state, grant, began_at)
    preload = None if doc is None or doc.preload is None else state.residency.copies.get(doc.preload)
    if (
        doc is not None
        and preload is not None
        and preload.loading
        and state.reserved + preload.owner.reserves <= state.compute
    ):
        world.preload(state, preload, since - doc.busy_for_s, since + doc.free_in_s)


def _expect(grant: GrantState, told: RunningCall, at: Seconds, before: CallDoc | None, since: Seconds) -> None:
    """Estimate the end of *grant*: as its doc *before* says, which was made at *since*; None: by what its node says."""
    call = grant.calls[0]
    if before is None:
        grant.free_at = _estimate(call, told, at)
    else:
        call.estimate_s, grant.neighbours = before.estimate_s, before.neighbours
        grant.free_at = since + before.free_in_s
    grant.estimate_s = call.estimate_s


def _grants_of(
    running: list[tuple[Call, RunningCall]], numbers: dict[CallId, int]
) -> list[tuple[RunningCall, GrantState]]:
    """Return the grants of *running*. :param numbers: those of single calls, which their node does not say"""
    together: dict[tuple[Copy | None, int | CallId], list[tuple[Call, RunningCall]]] = {}
    for call, told in running:
        together.setdefault((call.copy, told.grant or call.id), []).append((call, told))
    made = []
    for members in together.values():
        calls = tuple(call for call, _ in members)
        copy = calls[0].copy
        assert copy is not None
        number = members[0][1].grant or numbers.get(calls[0].id, 0)
        ended = max(0, members[0][1].batch - len(calls))
        grant = GrantState(number, calls, copy, 0, open=len(calls), adopted=True, ended=ended)
        for call in calls:
            call.grant, call.granted = grant.number, grant
        made.append((members[0][1], grant))
    return made


def _adopt_local(world: World, state: DeviceState, local: list[Call]) -> list[Call]:
    """Put the calls of *local* whose model is there into the local queue, and return them."""
    waits = [call for call in local if call.function in state.copies]
    for call in waits:
        world.calls.wait(call)
        world.calls.enqueue(call, state)
        world.push(state, call, state.residency.copies[state.copies[call.function]])
        world.calls.watch(call)
    return waits


def _adopt_residents(
    world: World, state: DeviceState, snapshot: DeviceSnapshot, at: Seconds, doc: DeviceDoc | None, since: Seconds
) -> bool:
    """List the copies on the device; evict those that are unknown or too many. Return whether *doc* has others."""
    known = {} if doc is None else {copy_id(each.function, each.copy): each for each in doc.residents}
    running = Counter(
        key for key, _ in {(copy_id(each.function, each.copy), each.grant or each.call) for each in snapshot.running}
    )
    over = sum(each.memory for each in snapshot.residents) - state.device.memory
    found = []
    for each in snapshot.residents:
        owner = world.functions.get(each.function)
        if owner is not None:
            owner.number = max(owner.number, each.copy + 1)
        key = copy_id(each.function, each.copy)
        before = known.get(key)
        excess = over > 0 and not running[key]
        if (
            owner is None
            or excess
            or owner.digest != each.digest
            or owner.costs[state.kind] is None
            or not owner.suits(state)
            or owner.takes(state) > state.compute
            or (each.function in state.copies)
            or each.memory > state.residency.unpromised
            or (key in world.copies and key not in world.older.whole)
            or _is_torn(world, key, before)
        ):
            over -= each.memory
            world.out.append(m.EvictCopy(each.function, state.id, each.copy))
            continue
        copy = _copy_found(owner, state, each, running[key], at, before, since)
        if before is not None and before.parts:
            copy.split = True
            if world.older.whole[key][0].device != state.id:
                state.residency.insert(copy)
                state.copies[owner.id] = copy.id
                continue
        closed = doc is not None and doc.closed
        world.adopt(state, copy, draining=closed or (before is not None and before.draining))
        world.lending.note(state, copy)
        if each.silent and not (each.loading or copy.split):
            world.silence(state, copy)
        world.note_waiting(owner)
        found.append((key, each.memory, each.loading, copy.running))
    return found != [
        (copy_id(each.function, each.copy), each.limit or each.memory, each.loading, each.running)
        for each in known.values()
    ]


def _copy_found(
    owner: FunctionState, state: DeviceState, found: ResidentSnapshot, running: int, at: Seconds,
    before: ResidentDoc | None, since: Seconds,
) -> Copy:  # fmt: skip
    """Return the copy of *owner* that a node says is on *state*, with what the scheduler *before* knew of it."""
    costs = owner.costs[state.kind]
    assert costs is not None
    charged = min(found.memory, costs.occupation if before is None else before.memory)
    loaded_at = at - found.load_age_s + owner.load_on(state)
    copy = residency.Copy(owner, charged, at - found.idle_s, loaded_at, found.copy)
    copy.limit = copy.told = found.memory
    copy.loading, copy.tier = found.loading, found.tier
    copy.running = running
    copy.asked = ANSWERED if running and before is not None and before.asked else NOT_ASKED
    if before is not None:
        copy.share, copy.reserve = before.share, before.reserve
        copy.slots, copy.batch = before.slots, before.batch
        if before.loading == found.loading:
            copy.ready_at = since + before.ready_in_s
    return copy


def _adopt_parked(world: World, state: DeviceState, snapshot: DeviceSnapshot) -> None:
    """List the parked copies of the device; those that are of no use end."""
    for each in snapshot.parked:
        owner = world.functions.get(each.function)
        if owner is not None:
            owner.number = max(owner.number, each.copy + 1)
        if owner is None or owner.digest != each.digest or not keep_parked(world, state, owner, each.copy, each.memory):
            world.out.append(m.EvictCopy(each.function, state.id, each.copy))


def _is_torn(world: World, key: CopyId, before: ResidentDoc | None) -> bool:
    """Whether it is a part of a copy of which not all parts are there."""
    return before is not None and bool(before.parts) and key not in world.older.whole


def whole_copies(found: Iterable[tuple[DeviceDoc, DeviceSnapshot]]) -> dict[CopyId, tuple[Part, ...]]:
    """
    Return the parts of the copies with several of which all are there. Snapshots tell of single parts only, so a copy
    of which a node or its doc is missing is evicted, part by part, and no device that comes back later has one.
    """
    parts: dict[CopyId, tuple[Part, ...]] = {}
    there: set[tuple[CopyId, DeviceId]] = set()
    for doc, snapshot in found:
        there |= {(copy_id(each.function, each.copy), doc.device.id) for each in snapshot.residents}
        for each in doc.residents:
            if len(each.parts) > 1:
                parts[copy_id(each.function, each.copy)] = each.parts
    return {key: its for key, its in parts.items() if all((key, each.device) in there for each in its)}


def join_parts(world: World) -> None:
    """The devices of a takeover are adopted: let the parts of each copy be one again."""
    for key, parts in world.older.whole.items():
        found = [
            (device, device.residency.copies[key])
            for each in parts
            if (device := world.devices.get(each.device)) is not None and key in device.residency.copies
        ]
        if len(found) < len(parts):
            for device, entry in found:
                world.out.append(m.EvictCopy(entry.owner.id, device.id, entry.number))
                entry.split = False
                if key in world.copies and world.copies[key][1] is entry:
                    world.evict(device, entry)
                else:
                    device.residency.remove(key)
                    del device.copies[entry.owner.id]
            continue
        (first, copy), *rest = found
        copy.rest = tuple((device.id, entry) for device, entry in rest)
        for grant in dict.fromkeys(call.granted for call in runs_on(copy, first)):
            if grant is not None:
                hold_parts(world, grant, first.busy_since)
        for device, _ in rest:
            device.starts -= copy.running  # counted before the takeover
    world.older.whole = {}


def _adopt_call(
    world: World,
    state: DeviceState,
    copy: Copy,
    running: RunningCall,
    at: Seconds,
    calls: dict[CallId, Call],
    waiting: dict[CallId, Call],
) -> Call:
    """Return the state of the call *running* on *model*, made new if need be. `model.running` counts it already."""
    owner = copy.owner
    other = world.calls.by_id.get(running.call)
    waited = waiting.pop(running.call, None)
    call = calls.pop(running.call, None) or waited
    regrant = twin = False
    if other is not None and other.state != RUNNING and not running.begun:
        # Its gateway asked again, since it had not heard of this grant: grant it again.
        call, regrant = other, True
        unqueue(world, other)
    elif other is not None:
        # It runs elsewhere, or its gateway has given this one up: stop it here.
        twin, call = True, None
    if call is None:
        # It was started before all that wait here, so its number is below theirs.
        world.older.adopted += 1
        call = Call(running.call, owner.id, owner, world.older.adopted - _MAX_ADOPTED, at - running.age_s, None)
        call.left = True
        call.aborted = running.abandoned
    if twin:
        if not call.aborted:
            call.aborted = True
            world.out.append(m.Abort(running.call, state.id))
    elif call.aborted and not running.abandoned:
        world.out.append(m.Abort(running.call, state.id))  # the node has not heard of it
    world.calls.adopt(call, state, copy, twin=twin)
    call.cold = running.cold
    if running.begun:
        call.why = TAKEN_OVER
    if regrant:
        grant_again(world, call, state, copy)
    return call


def _estimate(call: Call, running: RunningCall, at: Seconds) -> Seconds:
    """Return when a call of a placed function should end that this engine did not start."""
    copy, device = call.copy, call.device
    assert copy is not None
    assert device is not None
    costs = call.owner.costs[device.kind]
    call.estimate_s = 0.0 if costs is None else costs.estimate_s(call.size)
    if running.begun:
        return at - running.age_s + call.estimate_s
    return max(at, copy.ready_at if copy.loading else at) + call.estimate_s
