"""
How many copies a function should have, from its labels and its load. Pure; `scaler` measures and carries it out.

The rule is that of OpenFaaS Pro: the load of the whole function over what one copy is aimed to bear,
rounded up. It does not depend on how many copies there are, so a constant load has one answer, and more load never
fewer copies. Up at once, down by the highest need of a window, to zero after a time without calls.
"""

import math
from dataclasses import dataclass
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_core.scaling import ScalingRule

# A load that a float measures as 50.000000001 is 50: otherwise a constant load on a boundary would flutter.
_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class FunctionLoad:
    """Of a function, over all of its copies, now."""

    rps: float = 0.0
    """Calls completed per second, of late."""
    inflight: int = 0
    """Calls that wait or run."""
    cpu_millicores: float = 0.0
    queued: int = 0
    """Asynchronous calls that are pending."""
    arrived: bool = False
    """A call came in since it was looked at last."""

    @property
    def idle(self) -> bool:
        return not (self.inflight or self.queued or self.arrived)


@dataclass(frozen=True, slots=True)
class History:
    """What there was before: made by `remember`."""

    active_at: Seconds
    """When it was last seen not to be idle; at first, when it was seen first."""
    needs: tuple[tuple[Seconds, int], ...] = ()
    """(when, copies needed), oldest first: each higher than all that follow it, and all younger than the window."""


def desired_copies(rule: ScalingRule, load: FunctionLoad, current: int, now: Seconds, history: History) -> int:
    """
    Return how many copies the function should have, within the bounds of *rule*; 0 only where that is allowed or is so.

    :param current: how many it should have so far
    :param history: up to now, see `remember`
    """
    if load.idle:
        if current == 0:
            return 0  # whoever scaled it to zero meant it, until a call comes
        if rule.zero and now - history.active_at >= rule.zero_duration_s:
            return 0
    if rule.factor == 0:
        needed = current
    else:
        needed = max([needed_copies(rule, load), *(copies for at, copies in history.needs if _fresh(rule, at, now))])
    return min(max(rule.floor, needed), max(rule.floor, rule.max))


def needed_copies(rule: ScalingRule, load: FunctionLoad) -> int:
    """Return how many copies *load* needs, whatever the bounds; 0 for no load."""
    match rule.type:
        case "capacity":
            amount = float(load.inflight)
        case "cpu":
            amount = load.cpu_millicores
        case "queue":
            amount = float(load.queued)
        case _:
            amount = load.rps
    return math.ceil(amount / (rule.target * rule.target_proportion) - _TOLERANCE)


def remember(rule: ScalingRule, load: FunctionLoad, now: Seconds, history: History) -> History:
    """Return *history* with *load* at *now*. O(needs), which are at most as many as there are different numbers."""
    needed = needed_copies(rule, load)
    needs = [each for each in history.needs if _fresh(rule, each[0], now) and each[1] > needed]
    return History(now if not load.idle else history.active_at, (*needs, (now, needed)))


def _fresh(rule: ScalingRule, at: Seconds, now: Seconds) -> bool:
    return now - at < rule.down_window_s
