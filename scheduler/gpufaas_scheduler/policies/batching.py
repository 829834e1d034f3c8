"""Which calls start together."""

from typing import Final

from msgspec.structs import replace

from gpufaas_core.model import Seconds
from gpufaas_scheduler.contract import Start, Wake
from gpufaas_scheduler.view_contract import View, WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView, FunctionView

SPARE: Final = 1.25
"""Before a goal or deadline, a batch is left so many times its mean time, as times vary."""
UNDERWAY_S: Final[Seconds] = 0.02
"""And this time, in which its grant gets to the worker, and the answers to the callers."""
MOMENT_S: Final[Seconds] = 0.001
"""Calls of one moment come one after the other. They are waited for, even if a goal leaves no time."""
LATE_S: Final[Seconds] = 1.0
"""How long a load that takes longer than expected is waited for, until the device is considered anew."""


class Waiting:
    """The calls of its function that wait now start with a call; it waits for more as long as its function allows."""

    def extend(self, view: View, start: Start, call: WaitingCall) -> Start | Wake:
        owner = call.owner
        device = view.device_of(start.copy) if start.copy else None
        limit = owner.batch_max if device is None else owner.batch_size(device.kind)
        copy = view.find(start.copy) if start.copy else None
        if copy is not None and copy.batch:
            limit = min(limit, copy.batch)
        lacking = limit - len(start.calls)
        others = view.queue.more_of(call, lacking) if lacking > 0 else []
        lacking -= len(others)
        # A new copy is not waited for: its load begins with the call. While it loads, others can come.
        if lacking > 0 and owner.batch_wait_s and device is not None and copy is not None:
            if copy.loading:
                return Wake(copy.ready_at if copy.ready_at > view.now else view.now + LATE_S)
            until = _starts_at(device, [call, *others])
            if until > view.now:
                return Wake(until)
        calls = (*start.calls, *(each.id for each in others))[:limit]
        return start if calls == start.calls else replace(start, calls=calls)


def _starts_at(device: DeviceView, calls: list[WaitingCall]) -> Seconds:
    """Return when *calls* start at the latest, whether or not more come: each can still keep its goal and deadline."""
    owner: FunctionView = calls[0].owner
    came_at = min(each.arrived_at for each in calls)
    took_s = SPARE * owner.grant_s(device.kind, min(len(calls) + 1, owner.batch_max)) + UNDERWAY_S
    goals = [each.arrived_at + each.goal_s - took_s for each in calls if each.goal_s is not None]
    deadlines = [each.deadline - took_s for each in calls if each.deadline is not None]
    at = max(min([came_at + owner.batch_wait_s, *goals]), came_at + min(owner.batch_wait_s, MOMENT_S))
    return min([at, *deadlines])
