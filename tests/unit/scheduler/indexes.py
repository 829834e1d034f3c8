"""What the indexes of an engine's state keep is what follows from the facts, computed anew."""

from collections import Counter
from math import inf

import pytest

from gpufaas_core.model import ALL_COMPUTE, name_of
from gpufaas_scheduler.contract import NEVER
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.world import finish
from gpufaas_scheduler.world.call_state import LOCAL, RUNNING, WAITING
from gpufaas_scheduler.world.device import JOINED, DeviceState
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.world import World


def check_indexes(engine: Engine) -> None:
    """:raises AssertionError: an index is not what the facts say, between two events"""
    world: World = engine._world
    if world.older.left is not None:
        return  # nothing joins before `Serving`
    for device in world.devices.values():
        _check_device(world, device)
    for owner in world.functions.values():
        _check_function(world, owner)
    _check_cluster(world)
    _check_calls(world)


def _check_device(world: World, device: DeviceState) -> None:
    copies, residency = list(device.residency), device.residency
    here = {each.owner.id: each.id for each in copies if each.owner.placed}
    assert device.copies == here
    first = {
        each.owner.id: each.owner.flow for each in copies if each.owner.placed and world.copies[each.id][1] is each
    }
    assert device.flows == first
    assert device.silent == sum(each.silent for each in copies if each.owner.placed)
    lent = {each: each.limit - each.memory for each in copies}
    assert residency.held == sum(lent[each] for each in copies if each.running)
    assert residency.free == residency.memory - sum(each.memory for each in copies) - residency.held
    parked = sum(each.memory for each in world.parked.on(device))
    assert residency.unpromised == residency.memory - sum(each.limit for each in copies) - parked
    assert residency.shares == sum(each.share for each in copies)

    preload = 0 if device.preload is None else device.preload.owner.reserves
    assert device.reserved == sum(each.compute for each in device.holding) + preload
    assert all(each.compute for each in device.holding)
    assert not any(each.compute for each in device.beside)
    if device.holding:
        last = max(each.free_at for each in device.holding)
        follows = device.preload is not None or any(each.ahead for each in device.beside)
        assert device.free_at == last or (follows and device.free_at >= last)
    assert device.local_s == pytest.approx(sum(each.estimate_s for each in device.local))
    if device.local and device.busy:
        assert device.noted_at <= finish.overdue_at(device) + 1e-9
    usable = not (device.shut or device.local or device.preload or (device.silent and not world.mixed))
    usable = usable and (device.reserved < device.compute or device.open)
    order = JOINED if device.reserved >= device.compute else -device.starts
    assert device.idle_key == ((order, device.order, device) if usable else None), f"{device.id} is idle, or is not"


def _check_function(world: World, owner: FunctionState) -> None:
    there = {copy: device for device, copy in world.copies.values() if copy.owner is owner}
    assert owner.active | owner.draining == there
    assert not owner.active.keys() & owner.draining.keys()
    assert owner.copies == len(owner.active)
    assert owner.loading == sum(each.loading for each in there)
    planned = world.agenda.by_name.get(name_of(owner.id), ()) if owner.placed and not owner.removed else ()
    usable = {each.id for each in world.devices.values() if not each.closed}
    assert owner.plan == {each.device: each for each in planned if each.device in usable}
    assert owner.bound == bool(owner.constraints or owner.plan)
    kept = {copy for copy, device in there.items() if device.id in owner.plan}
    assert kept == {each for each in there if each.kept is not None}
    limits = any(each.share or each.reserve for each in (*there, *owner.plan.values()))
    assert owner.limited == (owner.placed and limits)
    if owner.placed:
        assert owner.holders == {device.id: device for device in owner.active.values()}
    elif owner.ready is not None:
        assert set(owner.ready) == {each for each in owner.active if not each.loading}
    if world.hits.asked:
        assert owner.idle_holders == {device.id: device for device in owner.holders.values() if device.listed}
    calls = [each for each in world.calls if each.owner is owner]
    assert owner.waiting == sum(each.state in (WAITING, LOCAL) for each in calls)
    assert owner.running == sum(each.state == RUNNING for each in calls)
    assert (
        owner.flow.head == (owner.flow.calls[0].number if owner.placed and owner.flow.calls else NEVER)
        or not owner.placed
    )
    waits = owner.waiting > 0 and not owner.active
    assert (owner.id in world.homeless) == (waits and not owner.placed)
    if waits and owner.placed:
        assert owner.id in world.orphans


def _check_cluster(world: World) -> None:
    devices, functions = list(world.devices.values()), list(world.functions.values())
    idle = [each for each in devices if each.idle_key is not None]
    assert world.idle_devices == sorted(each.idle_key for each in idle if each.idle_key is not None)
    if world.tail is not None:
        assert world.tail == [key[2] for key in reversed(world.idle_devices)][: len(world.tail)]
    listed = {each.id for each in devices if each.listed}
    if world.hits.asked:
        last = set() if world.hits.last is None else {world.hits.last.id}
        assert listed | last == {each.id for each in idle}
        candidates = {each.id for each in world.hits.candidates()}
        assert candidates == {each.id for each in functions if each.idle_holders and each.flow.head != NEVER}
    assert world.mixed == sum(each.mixed for each in functions)
    drained = sum(each.closed for each in devices)
    assert world.constrained == sum(bool(each.constraints or each.plan) for each in functions) + world.mixed + drained
    assert world.least_compute == min([ALL_COMPUTE, *(each.compute for each in devices)])
    assert world.largest == {
        kind: max(each.device.memory for each in devices if each.kind == kind)
        for kind in {each.kind for each in devices}
    }
    if world.tasks is not None:
        tasks = {each.declared.task for each in functions if each.declared.task and not each.removed}
        assert world.tasks.keys() == tasks
    assert set(world.changes.marked) == {each for each in (*devices, *functions) if each.marked}


def _check_calls(world: World) -> None:
    for device in world.devices.values():
        grants = Counter(each.copy.id for each in device.grants())  # those of several parts are on each of its devices
        grants.update(each.copy.id for each in device.direct.values() if each.copy is not None)
        queued = Counter(each.copy.id for each in device.local if each.copy is not None)
        for copy in device.residency:
            assert copy.running == grants[copy.id]
            assert copy.queued == queued[copy.id]
    waiting = [each for each in world.calls.by_id.values() if each.state in (WAITING, LOCAL)]
    assert world.calls.waiting == len(waiting)
    assert world.queue.count == sum(each.state == WAITING and each.owner.placed for each in waiting)
    soonest = min((each.deadline for each in waiting if each.deadline is not None), default=inf)
    assert (world.calls.deadline() or inf) <= soonest
