"""When the calls and loads of a device should have ended, by their estimates."""

from __future__ import annotations

from math import inf

from gpufaas_core.model import Seconds
from gpufaas_scheduler.world.call import GrantState
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.times import SHARE


def finish_s(device: DeviceState, now: Seconds) -> Seconds:
    """Return the estimated seconds until it has nothing to do: what is left of the grants, plus `local`."""
    left = device.free_at - now if device.busy else 0.0
    return (left if left > 0.0 else 0.0) + device.local_s


def overdue_at(device: DeviceState) -> Seconds:
    """When its local queue goes back to the global queue, if nothing changes; infinite: never."""
    return device.free_at + device.local[0].patience_s if device.local and device.busy else inf


def overrun_s(device: DeviceState, now: Seconds) -> Seconds:
    """Return how long ago the call or load should have ended; 0.0 if it is not late, or idle."""
    return max(0.0, now - device.free_at) if device.busy else 0.0


def left_s(device: DeviceState, now: Seconds) -> Seconds:
    """Return `finish_s`, but with the time left that calls had on average after they had run for this long."""
    holding = device.holding
    if holding:
        left = _left_of(device, holding[0], now)
        if len(holding) > 1:
            left = max([_left_of(device, each, now) for each in holding])
    elif device.preload is None:
        left = 0.0
    else:
        left = device.free_at - now
        if left < 0.0:
            left = -SHARE * left
    for each in device.beside:
        if each.ahead:
            left += each.estimate_s
    return left + device.local_s


def _left_of(device: DeviceState, grant: GrantState, now: Seconds) -> Seconds:
    began_at = grant.free_at - grant.estimate_s
    costs = grant.copy.owner.costs[device.kind]
    if costs is None or now <= began_at:
        return max(0.0, grant.free_at - now)
    if grant.copy.loading:
        return grant.estimate_s + SHARE * (now - began_at)  # its load takes longer than estimated
    return costs.left_s(now - began_at, grant.estimate_s)


def free_for(device: DeviceState, owner: FunctionState) -> Seconds:
    """Return when the next call of *owner*, which a copy here holds, should be able to begin."""
    compute = owner.takes(device)
    if owner.shared_hold or not compute:  # when the first of its slots is free
        return min([each.free_at for each in device.grants() if each.copy.owner is owner], default=device.free_at)
    lacking = device.reserved + compute - device.compute
    if lacking <= 0 or len(device.holding) < 2:
        return device.free_at
    for each in sorted(device.holding, key=lambda each: each.free_at):
        lacking -= each.compute
        if lacking <= 0:
            return each.free_at
    return device.free_at
