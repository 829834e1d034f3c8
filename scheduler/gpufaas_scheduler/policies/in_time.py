"""Admission by goals: a call that would be answered too late is refused when it comes, not after it has waited."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.contract import Reject
from gpufaas_scheduler.view_contract import DeviceView, FunctionView, ResidentView, View, WaitingCall

MAX_RETRY_AFTER_S: Final[Seconds] = 60.0
TRIED_AGAIN_S: Final[Seconds] = 60.0
"""A function that takes longer than its goal gets a call after this time: only calls show that it is quicker now."""
_CANDIDATES: Final = 8
"""The number of idle devices on which a load is considered."""


class InTime:
    """
    A call with a goal is refused when it could not be answered in time even alone in its grant.

    It starts on a copy that can take it now; else on the one that is free first, behind the calls of its function that
    wait; else after a load. Before the first call of a function has ended, its times are guesses, and none is refused.
    A call of a function without a copy is not refused because of the load: nobody else would load it.
    """

    def __init__(self) -> None:
        self._slow: dict[FunctionId, Seconds] = {}
        """Since when calls are refused of functions that take longer than their goals; or when one was tried last."""

    def admit(self, view: View, call: WaitingCall) -> Reject | None:
        goal_s, owner = call.goal_s, call.owner
        if goal_s is None or view.unknown(owner):
            return None
        left_s = goal_s - (view.now - call.arrived_at)
        start_s, takes_s = inf, inf
        for waits_s, runs_s in _ways(view, call, left_s):
            if waits_s + runs_s <= left_s:
                self._slow.pop(owner.id, None)
                return None
            if waits_s + runs_s < start_s + takes_s:
                start_s, takes_s = waits_s, runs_s
        if takes_s <= left_s and not view.copies_of(owner):
            return None
        if takes_s > left_s and view.now - self._slow.setdefault(owner.id, view.now) >= TRIED_AGAIN_S:
            self._slow[owner.id] = view.now
            return None
        if start_s == inf:
            return Reject(call.id, f"no device can run {owner.id} within its goal of {goal_s:g} s", 503, None, 1.0)
        again_s = MAX_RETRY_AFTER_S if takes_s > left_s else start_s + takes_s - left_s
        why = f"{owner.id} has a goal of {goal_s:g} s: a call would start in {start_s:.3g} s and take {takes_s:.3g} s"
        details = {"goal_s": goal_s, "starts_in_s": round(start_s, 3), "takes_s": round(takes_s, 3)}
        return Reject(call.id, why, 503, details, min(MAX_RETRY_AFTER_S, max(0.1, again_s)))


def _ways(view: View, call: WaitingCall, left_s: Seconds) -> Iterator[tuple[Seconds, Seconds]]:
    """Yield when *call* could start and how long it would take: on each copy, then after loads not too late for it."""
    owner = call.owner
    copies = view.copies_of(owner)
    before = owner.waiting - sum(copy.queued for copy, _ in copies)
    slots = sum(copy.slots or owner.slots for copy, _ in copies)
    for copy, device in copies:
        runs_s = _runs_s(view, call, device, copy.share)
        waits_s = _free_s(view, call, copy, device, runs_s)
        if before or copy.queued:
            waits_s += owner.serve_s(device.kind, before) / slots
        yield waits_s, runs_s
    for device in _rooms(view, call) if owner.placed or not copies else ():
        runs_s, load_s = _runs_s(view, call, device), owner.load_on(device)
        if load_s + runs_s <= left_s or not copies:
            yield view.left_s(device) + load_s + owner.serve_s(device.kind, before) / (slots + owner.slots), runs_s


def _free_s(view: View, call: WaitingCall, copy: ResidentView, device: DeviceView, runs_s: Seconds) -> Seconds:
    """Return when *copy* can take a call, if none waits."""
    owner = call.owner
    load_s = max(0.0, copy.ready_at - view.now) if copy.loading else 0.0
    if view.can_start(device, call) if owner.placed else copy.running < (copy.slots or owner.slots):
        return load_s
    if owner.placed and copy.running < 2 and not copy.share:
        return view.left_s(device)
    return load_s + runs_s / (copy.running + 1)  # the first of several that are done at any time


def _runs_s(view: View, call: WaitingCall, device: DeviceView, share: int = 0) -> Seconds:
    return call.owner.grant_s(device.kind, 1, share) if share else view.estimate_s(call, device.kind)


def _rooms(view: View, call: WaitingCall) -> Iterator[DeviceView]:
    """Yield devices for a load: some idle ones with room; if there are none, all others that are not too small."""
    owner: FunctionView = call.owner
    if owner.placed:
        idle = [device for device, _ in view.places(owner, _CANDIDATES) if view.fits(device, call)]
        if idle:
            yield from idle
            return
    for device in view.devices():
        if device.busy or not owner.placed:
            need = view.occupation(device, owner)
            if need is not None and not view.holds(device, call):
                yield device
