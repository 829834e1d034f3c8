"""
While a short batch runs, its worker gets the next one, and begins it at once: the device does not wait for the answers
of the one to go out, and for the calls of the next to come in (docs/adr/0048).

Only a full batch goes ahead, of the function that runs there, and only if nothing else could start in its place: it
comes first in the local queue of the device, or no other function has a call in the global queue. A call that comes
later waits for one short batch more than it would otherwise.
"""

from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.batches import joining, tell_held
from gpufaas_scheduler.handle.grants import start, take_from_queue
from gpufaas_scheduler.world.conditions import Condition
from gpufaas_scheduler.world.state import Call, Copy, DeviceState, FunctionState, Grant
from gpufaas_scheduler.world.world import World

AHEAD_S: Final[Seconds] = 0.05
"""Longer batches do not go ahead: the time between two of them counts for little, and others would wait for long."""
_AHEAD: Final = contract.Why("a full batch for the copy that runs now: it begins as soon as the one before has ended")


def send_ahead(world: World, owner: FunctionState) -> None:
    """Calls of *owner* wait: let a full batch of them go ahead to each device where it can."""
    for device in owner.holders.values():
        if owner.waiting < owner.batch_size(device.kind):
            return
        send_ahead_to(world, device)


def send_ahead_to(world: World, device: DeviceState) -> None:
    """Grant the next batch of the copy that runs on *device*, if it is full and nothing else comes first."""
    running = device.holding[0] if len(device.holding) == 1 else None
    if running is None or not _may_follow(world, running, device):
        return
    copy = running.copy
    batch = _next_batch(world, device, copy)
    if not batch:
        return
    for each in batch:
        take_from_queue(world, device, each)
        each.why = _AHEAD
    start(world, batch[0], device, copy, (), tuple(batch[1:]), ahead=True)
    tell_held(world, batch[0])


def _may_follow(world: World, running: Grant, device: DeviceState) -> bool:
    """Whether a batch may begin as soon as *running*, the only one that holds compute of *device*, has ended."""
    copy = running.copy
    owner = copy.owner
    if running.size < 2 or owner.slots > 1 or copy.running > 1 or copy.loading or copy not in owner.active:
        return False  # of a call alone, the answer may stream for ever: its worker listens to what is said of it
    if running.compute < device.compute or copy.share or copy.split or device.shut or device.preload is not None:
        return False
    if world.cluster.mixed or world.nested:
        return False
    costs = owner.costs[device.kind]
    return costs is not None and costs.grant_s(0.0, Condition(owner.batch_size(device.kind))) <= AHEAD_S


def _next_batch(world: World, device: DeviceState, copy: Copy) -> list[Call]:
    """Return the full batch that comes next on *device*; empty: there is none, or something else may come before it."""
    owner, queue = copy.owner, world.queue
    size = min(owner.batch_size(device.kind), copy.batch or owner.batch_max)
    if device.local:
        first = device.local[0]
    elif (
        queue.count < size
        or world.idle
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
