"""Admission by goals: a call that would be answered too late is refused when it comes, not after it has waited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.contract import Reject
from gpufaas_scheduler.view_contract import ResidentView, View, WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView

LONGEST_S: Final[Seconds] = 60.0
"""The longest time after which a caller is told to try again. A function that takes longer than its goal gets a call
after this time: only calls show that it is quicker now."""
_CANDIDATES: Final = 8
"""The number of idle devices on which a load is considered."""


class InTime:
    """
    A call with a goal is refused when it could not be answered in time even alone in its grant.

    It starts on a copy that can take it now; else on the one that is free first, behind the calls of its function that
    wait; else after a load on an idle device. Before the first call of a function has ended, its times are guesses, and
    none is refused. Nor is one of a function without a copy because of the load: nobody else would load it.
    """

    def __init__(self) -> None:
        self._slow: dict[FunctionId, Seconds] = {}
        """Since when calls are refused of functions that take longer than their goals; or when one was tried last."""

    def admit(self, view: View, call: WaitingCall) -> Reject | None:
        goal_s, owner, now = call.goal_s, call.owner, view.now
        ways = [] if goal_s is None or view.unknown(owner) else list(_ways(view, call))
        if goal_s is None or not ways:
            return None
        start_s, takes_s = min(ways, key=sum)
        if start_s + takes_s <= goal_s:
            return None
        again_s = start_s + takes_s - goal_s
        if takes_s > goal_s:
            again_s = LONGEST_S
            if now - self._slow.setdefault(owner.id, now) >= LONGEST_S:
                self._slow[owner.id] = now
                return None
        why = f"{owner.id} has a goal of {goal_s:g} s: a call would start in {start_s:.3g} s and take {takes_s:.3g} s"
        details = {"goal_s": goal_s, "starts_in_s": round(start_s, 3), "takes_s": round(takes_s, 3)}
        return Reject(call.id, why, 503, details, min(LONGEST_S, max(0.1, again_s)))


def _ways(view: View, call: WaitingCall) -> Iterator[tuple[Seconds, Seconds]]:
    """Yield when *call* could start and how long it would take."""
    owner = call.owner
    copies = view.copies_of(owner)
    if not copies:
        kinds = {each.kind for each in view.devices() if view.occupation(each, owner) is not None}
        yield from ((0.0, view.estimate_s(call, kind)) for kind in kinds)
        return
    before = owner.waiting - sum(copy.queued for copy, _ in copies)
    slots = sum(copy.slots or owner.slots for copy, _ in copies)
    for copy, device in copies:
        takes_s = owner.grant_s(device.kind, 1, copy.share) if copy.share else view.estimate_s(call, device.kind)
        yield _free_s(view, call, copy, device, takes_s) + owner.serve_s(device.kind, before) / slots, takes_s
    for device, _ in view.places(owner, _CANDIDATES) if owner.placed else ():
        if view.fits(device, call):
            start_s = owner.load_on(device) + owner.serve_s(device.kind, before) / (slots + owner.slots)
            yield start_s, view.estimate_s(call, device.kind)


def _free_s(view: View, call: WaitingCall, copy: ResidentView, device: DeviceView, takes_s: Seconds) -> Seconds:
    """Return when *copy* can take a call, if none waits."""
    placed = call.owner.placed
    load_s = max(0.0, copy.ready_at - view.now) if copy.loading else 0.0
    if view.can_start(device, call) if placed else copy.running < call.owner.slots:
        return load_s
    if placed and copy.running < 2 and not copy.share:
        return view.left_s(device)
    return load_s + takes_s / (copy.running + 1)  # the first of several that are done at any time
