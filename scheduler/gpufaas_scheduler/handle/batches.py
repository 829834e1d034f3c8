"""Which calls start together with one that starts, and how many. Only of functions whose calls may form batches."""

from itertools import islice

from msgspec.structs import replace

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Seconds
from gpufaas_scheduler import contract
from gpufaas_scheduler.world.agenda import batch_key
from gpufaas_scheduler.world.batch_size import Behind, Room, next_size
from gpufaas_scheduler.world.call import Call, GrantState
from gpufaas_scheduler.world.call_state import LOCAL, WAITING
from gpufaas_scheduler.world.costs import Costs
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.world import World


def batch_of(world: World, action: contract.Start, call: Call) -> tuple[Call, ...] | str:
    """Return the calls that start by *action*, *call* and perhaps others; or why they cannot."""
    owner, wakes = call.owner, world.agenda.wakes
    if world.batching is None or owner.batch_max < 2:
        return _named(world, owner, action.calls)
    extended = world.batching.extend(world.view, action, call)
    if isinstance(extended, contract.Wake):
        if extended.at > world.now and call.outer is None:
            wakes[batch_key(owner.id)] = extended.at
            if owner.held is None or owner.held[0] is not call:
                there = None if action.copy is None else world.copies.get(action.copy)
                # While its copy loads, it is not held back: it could not run.
                owner.held = call, world.now if there is None else max(world.now, there[1].ready_at)
            return f"call {call.id} waits for others of its batch"
        extended = action
    wakes.pop(batch_key(owner.id), None)
    found = _named(world, owner, extended.calls)
    if extended is not action and (isinstance(found, str) or found[0] is not call):
        return _named(world, owner, action.calls)
    if action.parts and not isinstance(found, str):  # a new copy, of which a policy does not know how many fit
        device = world.devices.get(action.parts[0].device)
        costs = None if device is None else owner.costs[device.kind]
        return found if costs is None or costs.room is None else found[: costs.room.calls]
    return found


def _named(world: World, owner: FunctionState, names: tuple[CallId, ...]) -> tuple[Call, ...] | str:
    """Return the calls of these names, which shall start together; or why they cannot."""
    if len(names) > owner.batch_max:
        return f"{len(names)} calls of {owner.id} cannot start together: at most {owner.batch_max} may"
    calls = []
    for name in dict.fromkeys(names):
        call = world.calls.by_id.get(name)
        if call is None or call.state != WAITING or call.owner is not owner:
            return f"call {name} of {owner.id} does not wait in the global queue"
        calls.append(call)
    return tuple(calls)


def with_held(world: World, call: Call, why: contract.Why | None) -> contract.Why | None:
    """Return *why* the batch of *call* starts now, and how long it was held back for more calls."""
    held = call.owner.held
    if why is None or held is None or held[0] is not call:
        return why
    held_s = world.now - held[1]
    if held_s <= 0.0:
        return why
    return contract.Why(f"{why.rule}; its batch was held back {held_s:.3f} s for more calls", why.options)


def tell_held(world: World, call: Call) -> None:
    """The grant of *call*, the command that was added last, says how long it was held back for others."""
    owner = call.owner
    if owner.held is None:
        return
    held, since = owner.held
    owner.held = None
    said = world.out[-1]
    if held is call and isinstance(said, m.StartCall):
        world.out[-1] = m.StartCall(replace(said.grant, held_s=max(0.0, world.now - since)))


def joining(world: World, device: DeviceState, call: Call, copy: Copy) -> list[Call]:
    """Return the calls that start on *copy* with *call*, of the local queue of *device* and others."""
    owner = call.owner
    if world.batching is None:
        return []
    local = {each.id: each for each in islice((each for each in device.local if each.copy is copy), owner.batch_max)}
    firsts = tuple(local) or (call.id,)
    extended = world.batching.extend(world.view, contract.Start(firsts, copy.id), call)
    names = firsts if isinstance(extended, contract.Wake) else extended.calls[: owner.batch_max]
    found = (local.get(name) or world.calls.by_id.get(name) for name in names if name != call.id)
    return [each for each in found if each is not None and each.owner is owner and _waits(each, copy)]


def adapt(world: World, grant: GrantState, device: DeviceState, costs: Costs, took_s: Seconds) -> None:
    """Set the size of the next batches, after *grant* has taken *took_s*."""
    owner, size = grant.copy.owner, grant.size
    if costs.room is not None:
        costs.room.fitted(size)
        if costs.room.calls >= owner.batch_max:
            costs.room = None
    if not owner.adaptive:
        return
    need, goal_s = owner.declared.need, owner.goal_s or 0.0
    behind = None
    firsts = [*islice(owner.flow.calls, 1), *islice((each for each in device.local if each.owner is owner), 1)]
    if firsts and world.now + took_s > min(each.arrived_at for each in firsts) + goal_s:
        larger = grant.condition._replace(batch=size + 1)
        behind = Behind(costs.grant_s(0.0, grant.condition._replace(batch=1)), costs.grant_s(0.0, larger))
    costs.batch = next_size(costs.batch, size, took_s, goal_s, need.batch_max, behind)


def ran_out(copy: Copy, device: DeviceState, costs: Costs) -> None:
    """A call of *copy* ran out of memory. If it ran in a batch, let the next ones be smaller."""
    size = max((each.size for each in device.grants() if each.copy is copy), default=1)
    if size > 1:
        costs.room = Room.after(size, costs.room)
        copy.owner.mark()


def _waits(call: Call, copy: Copy) -> bool:
    return call.state == WAITING or (call.state == LOCAL and call.copy is copy)
