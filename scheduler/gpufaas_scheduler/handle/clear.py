"""A device is cleared for a call that smaller ones keep waiting, and the call starts there: see `world.clearing`."""

from collections.abc import Iterable
from typing import Final

from gpufaas_core import messages as m
from gpufaas_scheduler import contract
from gpufaas_scheduler.handle.commit import try_start
from gpufaas_scheduler.handle.copies import send_off, serve_fifo
from gpufaas_scheduler.handle.grants import return_all
from gpufaas_scheduler.handle.settle import settle, start_nested, untangle
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import WAITING
from gpufaas_scheduler.world.clearing import PAUSE_S, held_by_late, in_the_way, is_drained, to_clear
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy
from gpufaas_scheduler.world.world import World

_WAITED: Final = contract.Why("smaller calls had kept it waiting too long, so this device was cleared for it")


def make_way(world: World) -> None:
    """An event has been dealt with: clear a device if a call has waited too long, or go on with that."""
    if world.older.left is not None or isinstance(world.agenda.event, m.Serving):
        return
    clearing = world.clearing
    if clearing.call is None and world.now >= clearing.pauses_until and (world.queue.count or world.homeless):
        found = to_clear(world, world.nests, world.homeless.values())
        clearing.pauses_until, world.settled = world.now + PAUSE_S, True
        if found is not None:
            clearing.device, clearing.call = found
            world.clears = True
    if clearing.call is not None and clearing.device is not None:
        _clear(world, clearing.device, clearing.call)
    if world.freed:
        world.freed = False
        settle(world)
    if world.tangled and world.nested:
        world.tangled = False
        untangle(world)


def _clear(world: World, device: DeviceState, call: Call) -> None:
    """Let *device* take no other call, and start *call* there if it has room."""
    if call.state != WAITING or device.gone:
        _stop(world, device)
        return
    owner = call.owner
    if (
        device.shut
        and not device.closed
        and not world.nested
        and not device.has_compute(owner)
        and not owner.shared_hold
    ):
        return  # most events change nothing
    if world.nested:
        if held_by_late(world.nests, device, call, world.now):
            _stop(world, device)
            return
        _start_inner(world, device)
    leaving = in_the_way(device, call)
    if leaving is None:
        _stop(world, device)
        return
    _shut(world, device, leaving)
    if not _start(world, device, call) and is_drained(device, call):
        _stop(world, device)  # what stays there has taken more memory


def _shut(world: World, device: DeviceState, leaving: Iterable[Copy]) -> None:
    if not device.shut:
        world.settled = True
        world.shut(device, True)
        return_all(world, device)
    for copy in leaving:
        send_off(world, device, copy)


def _start(world: World, device: DeviceState, call: Call) -> bool:
    owner = call.owner
    device.shut = False
    if owner.placed:
        try_start(world, contract.start_on(device, call, _WAITED))
    else:
        serve_fifo(world, owner)
    if call.state != WAITING:
        _stop(world, device)
        return True
    world.shut(device, True)  # meanwhile it may have been offered
    return False


def _stop(world: World, device: DeviceState) -> None:
    """*device* takes calls again."""
    world.clearing.device = world.clearing.call = None
    world.clears = False
    world.clearing.pauses_until = world.now + PAUSE_S
    world.freed = world.settled = True
    if not device.gone:
        world.shut(device, device.closed)


def _start_inner(world: World, device: DeviceState) -> None:
    """Start calls that calls wait for, on *device* as well: one of the latter may run there."""
    world.shut(device, False)
    return_all(world, device)  # what it has spare would be for them
    for each in world.nests.waiting():
        if not each.owner.placed:
            serve_fifo(world, each.owner)
    start_nested(world)
