"""
Taking over from another engine, whose state comes from its docs, snapshots of nodes, and calls that gateways resend.
"""

from collections.abc import Callable

from msgspec.structs import replace

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, Seconds
from gpufaas_core.snapshot import CallDoc, DeviceSnapshot, EngineDoc, FunctionDoc
from gpufaas_scheduler import docs
from gpufaas_scheduler.handle.agenda import offered
from gpufaas_scheduler.handle.calls import arrived
from gpufaas_scheduler.handle.copies import forget_if_done, is_held_back, note_lack
from gpufaas_scheduler.handle.fleet import function_deployed
from gpufaas_scheduler.handle.grants import next_local
from gpufaas_scheduler.handle.joins import adopt, join_parts, tell_staged, whole_copies
from gpufaas_scheduler.handle.waiting import wait_again
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import RUNNING
from gpufaas_scheduler.world.changes import device_key
from gpufaas_scheduler.world.demand import Demand
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.older import Left
from gpufaas_scheduler.world.world import World


def restored(world: World, event: m.Restored) -> None:
    if world.older.left is not None or world.devices or world.calls.by_id:
        world.ignored["Restored"] += 1
        return
    world.older.left = Left(event, world.now)


def defer(world: World, event: m.Event) -> None:
    assert world.older.left is not None
    world.older.left.events.append((world.now, event))


def serving(world: World, replay: Callable[[m.Event], None]) -> None:
    """Restore the state and begin to decide. *replay* handles an event that came before this one."""
    left = world.older.left
    if left is None:
        world.ignored["Serving"] += 1
        return
    world.older.left = None
    now = world.now
    another = left.event.engine is not None and left.event.engine.policy != world.policy.name
    if another:
        left.event = _without_policy(left.event)
    if left.event.engine is not None:
        _restore_engine(world, left.event.engine, left.since(left.event.engine))
    offers = [each for _, each in left.events if isinstance(each, m.Offered)]
    for told in offers:
        offered(world, told)  # before the joins, which close orders
    functions = _restore_functions(world, left)
    waiting = _restore_calls(world, left)
    changed = _restore_devices(world, left, waiting) or bool(offers)
    for doc, owner in functions:
        docs.restore_order(owner, doc)
    for call in sorted(waiting.values(), key=lambda each: each.number):
        # A call with a count of its own came back from a device before: see `queue`.
        wait_again(world, call)
    changed |= _restore_wishes(world, left, functions) or another
    if left.event.engine is not None:
        since = left.since(left.event.engine)
        docs.restore_clearing(world, left.event.engine, since)
        world.hosts.restore_declined(left.event.engine.declined, since)
    for device in list(world.devices.values()):
        if not device.busy and device.local:
            changed = True
        next_local(world, device)
    for device in world.devices.values():
        device.mark()
    for owner in world.functions.values():
        owner.mark()
    # What came meanwhile: first the unknown calls, by age, as if they had come in that order.
    aged = [(at, each) for at, each in left.events if isinstance(each, m.Arrived) and each.age_s]
    aged.sort(key=lambda each: each[0] - each[1].age_s)
    for at, again in aged:
        known = world.calls.by_id.get(again.call)
        if known is None or known.state == RUNNING:
            changed = True
            arrived(world, replace(again, age_s=again.age_s + now - at))
    joined = {each.device.id: at for at, (_, each) in enumerate(left.events) if isinstance(each, m.DeviceJoined)}
    for at_event, (_, each) in enumerate(left.events):
        if isinstance(each, m.DeviceJoined | m.Offered) or (isinstance(each, m.Arrived) and each.age_s):
            continue
        if at_event < joined.get(getattr(each, "device", DeviceId("")), -1):
            continue  # the snapshot includes it
        changed = True
        replay(each)
    for owner in list(world.functions.values()):
        if owner.removed:
            forget_if_done(world, owner)
    # If nothing changed, its predecessor would do nothing now either.
    world.freed, world.crowded = changed, world.crowded and changed


def _without_policy(event: m.Restored) -> m.Restored:
    """Leave out what only the policy that made it can read: its state, its wakes, and its notes with calls."""

    def plain(calls: tuple[CallDoc, ...]) -> tuple[CallDoc, ...]:
        return tuple(replace(each, note=0, promised_in_s=None) for each in calls)

    engine = event.engine and replace(
        event.engine, waiting=plain(event.engine.waiting), wakes=(), planned=False, policy_state=None
    )
    devices = [replace(each, running=plain(each.running), local=plain(each.local)) for each in event.devices]
    return replace(event, engine=engine, devices=tuple(devices))


def _restore_engine(world: World, doc: EngineDoc, since: Seconds) -> None:
    world.grant = doc.grant
    world.queue.next_number = doc.next_number
    world.joined = doc.joined
    docs.restore_agenda(world, doc, since)
    if doc.reserved_in_s is not None:
        world.reserved_until = since + doc.reserved_in_s
    first = doc.first_call_age_s
    world.demand = Demand(None if first is None else since - first, doc.offered_s, since - doc.offered_age_s)


def _restore_functions(world: World, left: Left) -> list[tuple[FunctionDoc, FunctionState]]:
    restored = []
    for doc in left.event.functions:
        owner = world.functions.get(doc.function.id)
        if owner is None:
            # Removed meanwhile, or before: it finishes its calls, and goes.
            function_deployed(world, m.FunctionDeployed(doc.function))
            owner = world.functions[doc.function.id]
            world.remove(owner)
        docs.restore_function(owner, doc, left.since(doc))
        if owner.removed:
            owner.scale(None)
        restored.append((doc, owner))
    return restored


def _restore_calls(world: World, left: Left) -> dict[CallId, Call]:
    """Return the calls that waited in the older engine's queues and are known to wait still."""
    again = {each.call: each for _, each in left.events if isinstance(each, m.Arrived)}
    known = [] if left.event.engine is None else [(each, left.event.engine) for each in left.event.engine.waiting]
    known += [(each, doc) for doc in left.event.devices for each in doc.local]  # type: ignore[misc]
    waiting: dict[CallId, Call] = {}
    for each, doc in known:
        since = left.since(doc)
        owner = world.functions.get(each.function)
        if owner is None:
            continue
        if not left.event.queued and each.call not in again:
            world.older.remembered[each.call] = (each, since)
            continue
        call = docs.restored_call(each, owner, since)
        if each.call in again and again[each.call].deadline is not None:
            call.deadline = again[each.call].deadline
        waiting[each.call] = call
    return waiting


def _restore_devices(world: World, left: Left, waiting: dict[CallId, Call]) -> bool:
    """Take over the devices that have joined; calls that run or wait on one of them are removed from *waiting*."""
    known = {doc.device.id: doc for doc in left.event.devices}
    joined: dict[DeviceId, tuple[Seconds, m.DeviceJoined]] = {}
    for at, event in left.events:
        if isinstance(event, m.DeviceLeft):
            joined.pop(event.device, None)
        elif isinstance(event, m.DeviceJoined):
            joined[event.device.id] = (at, event)
    changed = False
    last = len(known) + max((doc.order for doc in known.values()), default=0)
    order = {name: known[name].order if name in known else last for name in joined}
    world.older.whole = whole_copies(
        (known[name], event.snapshot) for name, (_, event) in joined.items() if name in known and event.snapshot
    )
    for name in sorted(joined, key=lambda each: order[each]):
        at, event = joined[name]
        doc = known.pop(name, None)
        calls: dict[CallId, Call] = {}
        local: list[Call] = []
        since = at
        if doc is not None:
            since = left.since(doc)
            for each in doc.running:
                owner = world.functions.get(each.function)
                if owner is not None:
                    calls[each.call] = docs.restored_call(each, owner, since)
                    world.older.remembered[each.call] = (each, since)
            local = [waiting.pop(each.call) for each in doc.local if each.call in waiting]
        snapshot = event.snapshot or DeviceSnapshot(event.device)
        tell_staged(world, event)
        world.agenda.joined(event.order)
        changed |= adopt(world, event.device, snapshot, at, doc, since, calls, local, waiting)
    join_parts(world)
    for name, doc in known.items():
        world.changes.gone(device_key(name))
        for each in doc.running:
            world.older.remembered[each.call] = (each, left.since(doc))
        changed = True
    return changed


def _restore_wishes(world: World, left: Left, functions: list[tuple[FunctionDoc, FunctionState]]) -> bool:
    """Restore the functions that lack copies, have too many, or wait without one: in the old order, then new ones."""
    engine = left.event.engine
    known = {doc.function.id: doc for doc, _ in functions}
    changed = False
    for begun in (world.orphans, world.short, world.surplus, world.homeless):
        begun.clear()  # they are in the order of the restoration; the old order follows
    for name in () if engine is None else engine.orphaned:
        if (owner := world.functions.get(name)) is not None:
            world.orphans[name] = owner
    for names, wishes, holds in (
        (() if engine is None else engine.short, world.short, lambda owner: _lacks(world, owner)),
        (() if engine is None else engine.surplus, world.surplus, lambda owner: bool(owner.surplus or owner.draining)),
        (() if engine is None else engine.homeless, world.homeless, _is_homeless),
    ):
        for name in names:
            owner = world.functions.get(name)
            if owner is not None and (wishes is not world.homeless or holds(owner)):  # its calls may have ended since
                wishes[name] = owner
        for name, owner in world.functions.items():
            if name not in wishes and holds(owner):
                # Otherwise the predecessor knew it, and had left it as it is.
                doc = known.get(name)
                if wishes is world.homeless or doc is None or docs.lost_copies(owner, doc):
                    wishes[name] = owner
                    changed = True
    for owner in world.functions.values():
        world.note_waiting(owner)
        if is_held_back(world, owner):
            note_lack(world, owner)
    return changed


def _lacks(world: World, owner: FunctionState) -> bool:
    return owner.copies < owner.target and not owner.removed and not is_held_back(world, owner)


def _is_homeless(owner: FunctionState) -> bool:
    return bool(not owner.placed and owner.flow.calls and not owner.active)
