"""
A busy device takes the next call of its function at once, where any run of the policy would lead to that
(`policy_contract.Following`). Nearly each call of a single function on busy devices comes here, and a run costs as
much as all the rest of its end.
"""

from gpufaas_scheduler.handle.grants import start
from gpufaas_scheduler.handle.settle import after_run
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy
from gpufaas_scheduler.world.world import World


def follow(world: World, device: DeviceState, copy: Copy) -> bool:
    """
    Start the next waiting call on *copy*, whose call has ended, and with it all that *device* did. False: something
    else may come first, there or elsewhere.
    """
    owner, queue = copy.owner, world.queue
    flow = owner.flow
    waiting = queue.count
    if not waiting or len(flow.calls) - flow.tombstones != waiting or world.idle_devices or device.local or device.shut:
        return False
    if device.silent:
        return False  # it is not idle for the policy, see `Cluster.set_idle`
    if world.mixed or world.nested or world.agenda.wakes or world.surplus or world.homeless:
        return False
    if copy not in owner.active:
        return False
    call = flow.calls[0]
    queue.remove(call)
    call.why = world.follows
    world.settled = True
    start(world, call, device, copy, ())
    if world.short or world.agenda.releasing:
        after_run(world)
    return True
