"""What is brought ahead of the misses that need it: the prefetch of the policy is asked about few devices per event."""

from itertools import islice
from typing import Final

from gpufaas_core import messages as m
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.commit import try_load
from gpufaas_scheduler.handle.settle import refuse
from gpufaas_scheduler.world import finish
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import WAITING
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.world import World

_SAMPLE: Final = 16
"""When a call of a function without a copy comes, the one of so many devices is considered that is free first."""


def prefetch(world: World, event: m.Event) -> None:
    """
    Calls wait after *event* for functions without a copy, and some node has a host tier: ask the policy what to bring
    there or onto devices.
    """
    if world.prefetch is None:
        return
    devices = tuple(dict.fromkeys(_devices(world, event)))
    if not devices:
        return
    plan = world.prefetch.plan(world.view, devices)
    for action in plan:
        reason = _commit(world, action)
        if reason is not None:
            refuse(world, plan, action, reason, _commit)


def _devices(world: World, event: m.Event) -> list[DeviceState]:
    """Return the devices that begin to compute now, or that may be free soon for what *event* is about."""
    found = [world.devices[each.grant.parts[0].device] for each in world.out if type(each) is m.StartCall]
    if type(event) is m.Arrived:
        call = world.calls.by_id.get(event.call)
        if call is not None and call.state == WAITING and call.owner.waiting == 1 and not call.owner.holders:
            found += _soonest(world, call)
    elif type(event) is m.Loaded:
        device = world.devices.get(event.device)
        if device is not None:
            found.append(device)
    elif type(event) is m.Staged and (host := world.hosts.by_node.get(event.node)) is not None:
        of_node = [world.devices[each] for each in host.devices]
        found += sorted(of_node, key=lambda each: (finish.left_s(each, world.now), each.order))
    return found


def _soonest(world: World, call: Call) -> list[DeviceState]:
    """Return the device that is free first for *call*, of a sample that differs from call to call."""
    devices, staged = world.devices.values(), call.owner.staged
    first = call.number * _SAMPLE % max(1, len(devices))
    sample = [each for each in islice(devices, first, first + _SAMPLE) if not staged or each.node in staged]
    if len(sample) > 1:
        return [min(sample, key=lambda each: (finish.left_s(each, world.now), each.order))]
    return sample


def _commit(world: World, action: contract.Action) -> str | None:
    if type(action) is not contract.Load or not (action.tier == contract.HOST or action.beside):
        return "a prefetch loads into host tiers, and beside what devices compute"
    return try_load(world, action)
