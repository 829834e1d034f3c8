"""Actions on calls beside their start: another function for a call, its refusal, and the end of a running grant."""

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, FunctionId
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.copies import forget_if_done, is_held_back, wake
from gpufaas_scheduler.handle.waiting import give_up
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import WAITING
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.world import World


def try_choose(world: World, action: contract.Choose) -> str | None:
    """Do *action*, or return why not."""
    call = waiting(world, action.call)
    if isinstance(call, str):
        return call
    before, after = call.owner, variant_for(world, call.owner, action.function)
    if isinstance(after, str):
        return after
    came_back = call.left
    world.queue.remove(call)
    world.calls.become(call, after)
    world.demand.move(before, after, call.arrived_at, world.now)
    if after.desired == 0:
        wake(world, after)
    if came_back or (after.flow.calls and after.flow.calls[-1].number > call.number):
        world.queue.put_back(call)
    else:
        world.queue.append(call)
    world.note_waiting(after)
    if before.removed:
        forget_if_done(world, before)
    return None


def variant_for(world: World, before: FunctionState, name: FunctionId) -> FunctionState | str:
    """Return the function of that name, whose calls those of *before* may become; or why they may not."""
    after = world.functions.get(name)
    if after is None or after.removed:
        return f"no function {name} is deployed"
    if after is before:
        return f"the call is one of {after.id} already"
    task = before.declared.task
    if not task or after.declared.task != task:
        return f"{after.id} is no variant of {before.id}: they have no task in common"
    if not after.placed:
        return f"the calls of {after.id} start without a policy"
    if is_held_back(world, after):
        return f"the last load of {after.id} failed, and the next one has to wait"
    if not world.fits_somewhere(after):
        return f"{after.id} fits no device"
    if after.waiting >= after.max_queue:
        return f"{after.id} has {after.waiting} calls waiting already"
    return after


def try_reject(world: World, action: contract.Reject) -> str | None:
    """Do *action*, or return why not."""
    call = world.calls.by_id.get(action.call)
    if call is None or call.state != WAITING:
        return f"call {action.call} does not wait in the queue of its function"
    said = rejected(action)
    if isinstance(said, str):
        return said
    give_up(world, call)
    world.out.append(said)
    return None


def rejected(action: contract.Reject) -> m.RejectCall | str:
    """Return the command that refuses a call as *action* says, or why there is none."""
    if action.status not in contract.REJECTIONS:
        return f"a call is refused with status {', '.join(map(str, contract.REJECTIONS))}, not {action.status}"
    return m.RejectCall(action.call, "policy", action.why, action.retry_after_s, action.status, action.details)


def try_preempt(world: World, action: contract.Preempt) -> str | None:
    """Do *action*, or return why not."""
    calls = [each for each in world.running() if each.grant == action.grant]
    if not calls:
        return f"no grant {action.grant} runs"
    if any(each.aborted or each.preempted for each in calls):
        return f"grant {action.grant} is being stopped already"
    owner = calls[0].owner
    if action.requeue and not owner.declared.idempotent:
        return f"{owner.id} is not idempotent: its calls cannot run again"
    for call in calls:
        device = world.calls.abort(call)
        call.aborted, call.preempted = not action.requeue, action.requeue
        world.out.append(m.Abort(call.id, device, action.requeue, "the policy stopped the call", call.grant))
    return None


def waiting(world: World, name: CallId) -> Call | str:
    """Return the call of that name, which waits for the policy; or why it does not."""
    call = world.calls.by_id.get(name)
    if call is None or call.state != WAITING or not call.owner.placed:
        return f"call {name} does not wait in the global queue"
    return call
