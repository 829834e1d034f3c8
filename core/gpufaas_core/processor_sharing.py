"""
Grants that run beside each other on devices: how fast each runs, and so when it ends, by their costs (`cost`).

A grant has a certain amount of work, its service time when it is alone. It runs at full speed until another grant
begins or ends on one of its devices; then its speed, and its end, are computed anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import inf
from typing import Protocol

from gpufaas_core._types import Seconds
from gpufaas_core.cost import Truth
from gpufaas_core.model import ALL_COMPUTE, FunctionId


class SharedDevice(Protocol):
    @property
    def compute(self) -> int:
        """All that it has, in per cent."""

    @property
    def demand(self) -> int:
        """What the grants that run would use at full speed: `demand_of` them."""

    @property
    def running(self) -> Collection[Work]:
        """The grants that are served."""


class Work(Protocol):
    """A grant that is served."""

    function: FunctionId
    copy: int
    truth: Truth
    cap: int
    """The most of a device's compute that the copy may use, in per cent."""
    end: Seconds
    since: Seconds
    left_s: Seconds
    """What was left at `since`, at full speed."""
    slow: float
    """The time that it takes, in times of that at full speed."""

    @property
    def uses(self) -> int:
        """The compute that it uses at full speed."""

    @property
    def devices(self) -> Collection[SharedDevice]: ...


def begin(work: Work, service_s: Seconds, now: Seconds) -> None:
    """*work*, which takes *service_s* alone, begins: at full speed, until `paced` says otherwise."""
    work.since = now
    work.left_s = service_s
    work.slow = 1.0
    work.end = now + service_s


def paced(device: SharedDevice, now: Seconds) -> Iterator[Work]:
    """Compute the speeds anew on *device*, where a grant began or ended; yield the grants whose end has moved."""
    for each in device.running:
        slow = max([_slowdown(each, on) for on in each.devices])
        if slow != each.slow:
            each.left_s -= (now - each.since) / each.slow
            each.since = now
            each.slow = slow
            each.end = now + max(0.0, each.left_s) * slow
            yield each


def recap(device: SharedDevice, function: FunctionId, copy: int, cap: int, now: Seconds) -> None:
    """The copy may use *cap* per cent of the compute from now on. `paced` says what that changes."""
    for each in device.running:
        if (each.function, each.copy) == (function, copy):
            ratio = each.truth.share_factor(cap) / each.truth.share_factor(each.cap)
            each.left_s = (each.left_s - (now - each.since) / each.slow) * ratio
            each.since, each.cap, each.slow = now, cap, inf  # so that its end is computed anew


def demand_of(running: Iterable[Work]) -> int:
    """Return the compute that these grants would use at full speed. A copy uses no more than its cap."""
    capped: dict[tuple[FunctionId, int], int] = {}
    used = 0
    for each in running:
        if each.cap < ALL_COMPUTE:
            copy = (each.function, each.copy)
            capped[copy] = min(each.cap, capped.get(copy, 0) + each.uses)
        else:
            used += each.uses
    return used + sum(capped.values())


def _slowdown(work: Work, device: SharedDevice) -> float:
    """Return how many times as long *work* takes as alone, beside what runs on *device* now."""
    slow, cost = max(1.0, device.demand / device.compute), work.truth.cost
    if cost.power != 1.0:
        slow **= cost.power
    if len(device.running) == 1:
        return slow
    if cost.near:
        slow *= 1.0 + cost.near * max(0, min(device.demand, device.compute) - work.uses)
    if work.cap < ALL_COMPUTE:
        copy = (work.function, work.copy)
        slow *= max(1.0, sum([each.uses for each in device.running if (each.function, each.copy) == copy]) / work.cap)
    return slow * work.truth.disturbed([each.truth for each in device.running if each is not work])
