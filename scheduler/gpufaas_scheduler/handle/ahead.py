"""
While a short call or batch runs, its worker gets the next one, and begins it at once: the device does not wait for the
answers of the one to go out, and for the calls of the next to come in (docs/adr/0048).

Only a call or a full batch goes ahead of the function that runs there, and only if nothing else could start in its
place: it comes first in the local queue of the device, or no other function has a call in the global queue. A call that
comes later waits for one short call or batch more than it would otherwise.

What runs may take unexpectedly long. So nodes that can do it take back what went ahead, if its worker has not begun it,
after the time that its grant says; and when another device with a copy is free (`take_back`).
"""

from typing import Final

from gpufaas_core import messages as m
from gpufaas_core.model import Seconds
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.batches import joining, tell_held
from gpufaas_scheduler.handle.grants import start, take_from_queue
from gpufaas_scheduler.policy_contract import FINISH
from gpufaas_scheduler.world.call import Call, GrantState
from gpufaas_scheduler.world.call_state import WAITING
from gpufaas_scheduler.world.conditions import Condition
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.places import idle_holder
from gpufaas_scheduler.world.world import World

AHEAD_S: Final[Seconds] = 0.05
"""Longer calls do not go ahead: the time between two of them counts for little, and others would wait for long."""
LATE_S: Final[Seconds] = 0.02
"""What runs is late when it takes so much longer than expected, or twice as long."""
SOON_S: Final[Seconds] = 0.01
"""What runs ends soon: nothing is taken back, which takes some time itself."""
_FEW: Final = 8
"""An arrival looks at so many devices at most. On others, calls go ahead when a call ends."""
_AHEAD: Final = contract.Why("a full batch for the copy that runs now: it begins as soon as the one before has ended")


def send_ahead(world: World, owner: FunctionState) -> None:
    """Calls of *owner* wait: let them go ahead to each device where they can."""
    if not owner.batches:
        if owner.copies <= _FEW:
            _send_calls_ahead(world, owner)
        return
    for device in owner.holders.values():
        if owner.waiting < owner.batch_size(device.kind):
            return
        send_ahead_to(world, device)


def _send_calls_ahead(world: World, owner: FunctionState) -> None:
    for device in owner.holders.values():
        holding = device.holding
        if not owner.waiting:
            return
        if len(holding) == 1 and holding[0].copy.running < 2:  # nearly always, the next call is there already
            send_ahead_to(world, device)


def send_ahead_to(world: World, device: DeviceState) -> None:
    """Grant the next call or full batch of the copy that runs on *device*, if nothing else comes first."""
    running = device.holding[0] if len(device.holding) == 1 else None
    if running is None or not _may_follow(world, running, device):
        return
    copy = running.copy
    if not copy.owner.batches:
        _send_call(world, device, running)
        return
    batch = _next_batch(world, device, copy)
    if not batch:
        return
    for each in batch:
        take_from_queue(world, device, each)
        each.why = _AHEAD
    start(world, batch[0], device, copy, (), tuple(batch[1:]), ahead=0.0)
    tell_held(world, batch[0])


def _send_call(world: World, device: DeviceState, running: GrantState) -> None:
    """As `send_ahead_to`, of a function whose calls run one by one. Its node can give a call back."""
    call = _next_call(world, device, running.copy)
    if call is None:
        return
    if call.state == WAITING:
        call.why = world.follows
    take_from_queue(world, device, call)
    running.alone = False
    start(world, call, device, running.copy, (), ahead=_late_at(running) - world.now)
    grant = call.granted
    assert grant is not None
    grant.early = True
    world.ahead[grant] = running
    world.settled = world.rare = True


def _late_at(running: GrantState) -> Seconds:
    return running.free_at + max(running.estimate_s, LATE_S)


def _may_follow(world: World, running: GrantState, device: DeviceState) -> bool:
    """Whether something may begin as soon as *running*, the only one that holds compute of *device*, has ended."""
    copy = running.copy
    owner = copy.owner
    if running.size < 2 if owner.batches else not device.ahead:
        return False  # of a call alone, the answer may stream for ever
    costs = owner.costs[device.kind]
    if costs is None or (costs.service_s > AHEAD_S and not owner.batches):
        return False
    if owner.slots > 1 or copy.running > 1 or copy.loading or copy not in owner.active:
        return False
    if running.compute < device.compute or copy.share or copy.split or device.shut or device.preload is not None:
        return False
    if world.mixed or world.nested or device.others or (world.agenda.by_name and world.watches & FINISH):
        return False  # a load of the plan may wait for the end of what runs
    if owner.batches:
        return costs.grant_s(0.0, Condition(owner.batch_size(device.kind))) <= AHEAD_S
    now = world.now
    if running.free_at - now > AHEAD_S:
        return False
    if running.calls[0].endless or running.calls[0].aborted:
        return False
    return owner.ahead_after <= now < _late_at(running)


def _next_batch(world: World, device: DeviceState, copy: Copy) -> list[Call]:
    """Return the full batch that comes next on *device*; empty: there is none, or something else may come before it."""
    owner, queue = copy.owner, world.queue
    size = min(owner.batch_size(device.kind), copy.batch or owner.batch_max)
    if device.local:
        first = device.local[0]
    elif (
        queue.count < size
        or world.idle_devices
        or queue.returned
        or len(owner.flow.calls) - owner.flow.tombstones < queue.count
    ):
        return []
    else:
        first = owner.flow.calls[0]
    if size < 2 or (device.local and first.copy is not copy):
        return []
    batch = [first, *joining(world, device, first, copy)]
    return batch if len(batch) >= size and all(each.outer is None for each in batch) else []


def _next_call(world: World, device: DeviceState, copy: Copy) -> Call | None:
    """
    As `_next_batch`, of a function whose calls run one by one. From the global queue a call goes ahead under the
    conditions of `follow`, and only if there is one for each copy: else it would wait while another device gets free.
    """
    owner, queue = copy.owner, world.queue
    if device.local:
        first = device.local[0]
        return first if first.copy is copy and first.outer is None else None
    flow, waiting = owner.flow, queue.count
    if not waiting or len(flow.calls) - flow.tombstones != waiting or world.idle_devices or world.follows is None:
        return None
    if world.agenda.wakes or world.surplus or world.homeless:
        return None
    first = flow.calls[0]
    return first if len(world.ahead) + waiting >= owner.copies and first.outer is None else None


def take_back(world: World) -> None:
    """Have calls that went ahead taken back for which another device with a copy is free now."""
    now = world.now
    for grant, running in world.ahead.items():
        call = grant.calls[0]
        device = call.device
        if grant.taken_back or call.aborted or device is None:
            continue
        if running.free_at - now >= SOON_S and idle_holder(world, call) is not None:
            grant.taken_back = True
            why = "another call runs there, and another device is free"
            world.out.append(m.Abort(call.id, device.id, True, why, grant.number, True))
