"""Something became free: all that waits tries again, the calls of placed functions in one run of the policy."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from gpufaas_core import messages as m
from gpufaas_scheduler import contract
from gpufaas_scheduler.contract import Action, Refusal
from gpufaas_scheduler.handle.agenda import release_empty, try_procure, try_release, try_set_plan, try_wake
from gpufaas_scheduler.handle.commit import try_assign, try_load, try_promise, try_start
from gpufaas_scheduler.handle.commit_calls import try_choose, try_preempt, try_reject
from gpufaas_scheduler.handle.commit_copies import try_evict, try_fetch, try_limit
from gpufaas_scheduler.handle.copies import load_copies, serve_fifo, trim
from gpufaas_scheduler.handle.grants import return_all, return_local, start
from gpufaas_scheduler.handle.waiting import give_up
from gpufaas_scheduler.policy_contract import ARRIVAL
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import RUNNING, WAITING
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.places import idle_holder, room_for
from gpufaas_scheduler.world.world import World

_NESTED: Final = contract.Why("a call that holds a device waits for it, so it gets the first device that it can use")
_PLANNED: Final = contract.Why("the copy has what a plan gives it, beside the calls that wait for its device")

COMMIT: Final[Mapping[type[Action], Callable[[World, Any], str | None]]] = {
    contract.Start: try_start,
    contract.Assign: try_assign,
    contract.Load: try_load,
    contract.Evict: try_evict,
    contract.Limit: try_limit,
    contract.Choose: try_choose,
    contract.Reject: try_reject,
    contract.Preempt: try_preempt,
    contract.Fetch: try_fetch,
    contract.Wake: try_wake,
    contract.Procure: try_procure,
    contract.Release: try_release,
    contract.SetPlan: try_set_plan,
    contract.Promise: try_promise,
}
"""What does an action, or returns why not."""

# After this many actions in a row that are refused, a run ends; the next event starts another one.
_MAX_IDLE_ACTIONS: Final = 1000
_IDLE_ACTIONS_PER_DEVICE: Final = 4


def settle(world: World) -> None:
    """Let all that waits try again."""
    world.settled = True
    if world.surplus:
        for owner in list(world.surplus.values()):
            trim(world, owner)
    if world.homeless:
        for owner in list(world.homeless.values()):
            serve_fifo(world, owner)
    if world.nested:
        start_nested(world)
    if (world.queue.count and world.idle_devices) or (world.watches and world.watches & world.agenda.causes):
        run_policy(world)
        if world.watches:
            world.read_policy()
    if world.keeps and world.queue.count and world.agenda.by_name:
        for owner in [call.owner for call in world.queue.firsts() if call.owner.plan]:
            start_as_planned(world, owner)
    if world.short or world.agenda.releasing:
        after_run(world)


def start_as_planned(world: World, owner: FunctionState) -> None:
    """
    Start calls of *owner* on copies that a plan keeps where calls of others wait in the local queue for more compute
    than is spare: a policy does not consider these devices.
    """
    for copy, device in owner.active.items():
        while copy.kept is not None and device.local and not copy.queued and owner.flow.calls:
            if try_start(world, contract.Start((owner.flow.calls[0].id,), copy.id, (), None, _PLANNED)) is not None:
                break


def after_run(world: World) -> None:
    """The policy has had its choice: load what functions lack, and release the nodes that are empty."""
    for owner in list(world.short.values()):
        load_copies(world, owner)
    if world.agenda.releasing:
        release_empty(world)


def is_watched(world: World) -> bool:
    """Whether the policy runs for the present event in any case. It has run for an arrival, when the call came."""
    return bool(world.agenda.watches & world.agenda.causes & ~ARRIVAL)


def run_policy(world: World) -> None:
    """
    Do one scheduling run: the policy proposes actions, and each is done or refused at once. There are more runs as long
    as calls start, if a device may run several: a run considers a device once.
    """
    while True:
        starts = world.grant
        plan = world.policy.plan(world.view)
        # As `send(None)`, which says that the action was done, but its end is no exception: each call passes here.
        for action in plan:
            reason = COMMIT.get(type(action), _no_action)(world, action)
            if reason is not None:
                refuse(world, plan, action, reason)
        if world.queue.aside:
            world.queue.rewind()
        if not (world.mixed and world.grant > starts and world.queue.count and world.idle_devices):
            return


def _commit(world: World, action: Action) -> str | None:
    return COMMIT.get(type(action), _no_action)(world, action)


def refuse(
    world: World,
    plan: contract.Plan,
    action: Action,
    reason: str,
    commit: Callable[[World, Action], str | None] = _commit,
) -> None:
    """Refuse *action* and those that *plan* proposes instead, until one of them is done or *plan* ends."""
    limit = _MAX_IDLE_ACTIONS + _IDLE_ACTIONS_PER_DEVICE * len(world.devices)
    for _ in range(limit):
        verdict = Refusal(action, reason)
        world.refusals.append(verdict)
        try:
            action = plan.send(verdict)
        except StopIteration:
            return
        refused = commit(world, action)
        if refused is None:
            return
        reason = refused
    world.refusals.append(Refusal(action, reason))
    world.refusals.append(Refusal(action, f"{limit} actions without one that was done: run ended"))
    plan.close()


def _no_action(_world: World, action: object) -> str:
    return f"{type(action).__name__} is not an action"


def start_nested(world: World) -> None:
    """
    Start calls that other calls wait for, where the policy cannot know that waiting is in vain: at an idle holder, and
    elsewhere if calls that wait for calls hold all holders or all slots.
    """
    for call in world.nests.waiting():
        owner = call.owner
        if not owner.placed:
            if owner.active and call.state != RUNNING and world.nests.full_of_outers(owner):
                _start_at_another_copy(world, call)
        elif call.state == WAITING and (world.idle_devices or owner.shared_hold):
            device = idle_holder(world, call) or _open_holder(owner)
            if device is None and not world.nests.may_wait(owner):
                room = room_for(world, owner, [key[2] for key in world.idle_devices], starts=True)
                device = None if room is None else room[0]
            if device is not None:
                try_start(world, contract.start_on(device, call, _NESTED))


def _open_holder(owner: FunctionState) -> DeviceState | None:
    """Return the device where a call of *owner* can join others, whatever waits in its local queue."""
    found = [each for each in owner.holders.values() if each.can_join(owner)]
    return min(found, key=lambda each: each.order, default=None)


def _start_at_another_copy(world: World, call: Call) -> None:
    owner = call.owner
    copy = world.nests.draining_slot(owner)
    if copy is not None:
        owner.flow.remove(call)
        start(world, call, owner.draining[copy], copy, ())
        return
    room = room_for(world, owner) if world.nests.may_have_more(owner) else None
    if room is not None:
        device, victims = room
        owner.flow.remove(call)
        start(world, call, device, None, victims)


def untangle(world: World) -> None:
    """
    Refuse nested calls that wait for a place that cannot become free before they end: one at a time, the newest first.
    Its outer call goes on then, and perhaps gives the others a place.
    """
    start_nested(world)
    while stuck := world.nests.stuck():
        local = [(device, each) for device in world.devices.values() if device.local and world.nests.holds(device)
                 for each in device.local]  # fmt: skip
        for device, each in local:
            return_local(world, device, each)
        if not local:
            refused = stuck[-1]
            why = world.nests.why_stuck(refused)
            give_up(world, refused)
            world.out.append(m.RejectCall(refused.id, "nested", why))
        if world.freed:
            world.freed = False
            settle(world)


def return_overdue(world: World) -> None:
    """Return the local queues of devices that are too late. The run after the event plans for their calls."""
    for device in world.overdue.take(world.now):
        return_all(world, device)
