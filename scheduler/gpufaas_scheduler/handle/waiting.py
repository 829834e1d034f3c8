"""Calls that wait: they join a queue, leave it, or wait again after their worker is gone."""

from typing import Final

from gpufaas_core import messages as m
from gpufaas_core.model import CallId
from gpufaas_scheduler.handle.copies import forget_if_done, is_held_back, send_off, wake
from gpufaas_scheduler.handle.grants import next_local, return_all
from gpufaas_scheduler.world.backoff import AT_ONCE
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import LOCAL, WAITING
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.kept import kept_out
from gpufaas_scheduler.world.world import World

MAX_REFUSALS: Final = 3
"""A call is rejected after this many nodes in a row refused it."""


def join_queue(world: World, call: Call) -> None:
    """Put *call* into its queue, by its number."""
    owner = call.owner
    if not owner.placed:
        owner.flow.put_back(call)
    elif call.left:
        world.queue.put_back(call)
    else:
        world.queue.append(call)
    world.note_waiting(owner)


def wait_again(world: World, call: Call) -> None:
    world.calls.wait(call)
    join_queue(world, call)
    world.calls.watch(call)


def unqueue(world: World, call: Call) -> None:
    """Take a waiting call out of its queue and out of the call book."""
    owner = call.owner
    if call.state == LOCAL:
        assert call.device is not None
        world.pull(call.device, call)
        world.offer(call.device)
    elif owner.placed:
        world.queue.remove(call)
    else:
        owner.flow.remove(call)
        if not owner.flow.calls:
            world.homeless.pop(owner.id, None)
    world.calls.leave(call)


def give_up(world: World, call: Call) -> None:
    """End a waiting call, wherever it waits."""
    owner, device = call.owner, call.device if call.state == LOCAL else None
    unqueue(world, call)
    if device is not None:
        world.freed = True  # perhaps it pinned the model
        next_local(world, device)  # the one behind it may need less compute
    if owner.removed:
        forget_if_done(world, owner)


def leave_to_plan(world: World) -> None:
    """Copies that a plan keeps have taken room: what waits is placed elsewhere, or refused. O(functions)."""
    for owner in [each for each in world.functions.values() if each.waiting]:
        why = kept_out(world, owner)
        if why is None:
            leave_stranded(world, owner)
            continue
        for call in world.waits_of(owner):
            if call.state in (WAITING, LOCAL):
                give_up(world, call)
                world.out.append(m.RejectCall(call.id, "no_room", why))


def leave_stranded(world: World, owner: FunctionState) -> None:
    """Calls of *owner* wait: send off its copies that shares which a plan keeps leave too little compute to run."""
    for copy, device in list(owner.active.items()) if owner.placed else ():
        if copy.kept is None and device.residency.shares and owner.takes(device) > device.left:
            if copy.queued:
                return_all(world, device)
            send_off(world, device, copy)


def place_again(world: World, call: Call, why: str) -> None:
    """Let a call wait again, with its number, that no worker has any more; or reject it."""
    owner = call.owner
    call.refusals += 1
    if call.aborted:
        pass
    elif owner.starved is not None:
        world.out.append(m.RejectCall(call.id, "out_of_memory", owner.starved))
    elif owner.removed:
        world.out.append(m.RejectCall(call.id, "removed", f"function {owner.id} was removed"))
    elif backs_off(owner) and is_held_back(world, owner):
        world.out.append(refuse_failing(world, call.id, owner))
    elif call.refusals >= MAX_REFUSALS:
        assert call.device is not None
        reason = f"{call.refusals} nodes in a row refused the call, the last one ({call.device.id}): {why}"
        world.out.append(m.RejectCall(call.id, "refused", reason, 1.0))
    else:
        call.device = call.copy = None
        call.cold, call.victims = False, ()
        if owner.desired == 0:
            wake(world, owner)
        wait_again(world, call)


def refuse_failing(world: World, call: CallId, owner: FunctionState) -> m.RejectCall:
    failing = owner.backoff
    assert failing is not None
    left_s = failing.left_s(world.now)
    again = f"is tried again in {max(1, round(left_s))} s" if left_s else "is being tried again now"
    message = (
        f"function {owner.id} failed to load {failing.failures} times in a row: it {again}, or at once when it is "
        f"deployed again; {failing.reason}"
    )
    return m.RejectCall(call, "load_failed", message, max(1.0, left_s))


def backs_off(owner: FunctionState) -> bool:
    """Whether its calls are refused, but for one that tries a load."""
    failing = owner.backoff
    return failing is not None and failing.reason is not None and failing.failures >= AT_ONCE
