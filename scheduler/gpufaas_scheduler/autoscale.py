"""
The number of copies that a function should have, from its labels and its load. `scaler` measures the load and scales.

The rule is that of OpenFaaS Pro: the load of the whole function over the load that one copy should
bear, rounded up. It does not depend on the present number of copies, so a constant load has one answer, and more load
never has fewer copies. Copies are added at once, removed by the highest need of a window, and go to zero after a time
without calls.
"""

import math
from dataclasses import dataclass
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_core.scaling import ScalingRule

# A measured load of 50.000000001 counts as 50: otherwise a constant load on a boundary would flutter.
_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class FunctionLoad:
    """The present load of a function, over all of its copies."""

    rps: float = 0.0
    """Calls completed per second."""
    inflight: int = 0
    """Calls that wait or run."""
    cpu_millicores: float = 0.0
    queued: int = 0
    """Asynchronous calls that are pending."""
    arrived: bool = False
    """A call came since the last measurement."""

    @property
    def idle(self) -> bool:
        return not (self.inflight or self.queued or self.arrived)


@dataclass(frozen=True, slots=True)
class History:
    """Past loads; see `remember`."""

    active_at: Seconds
    """When it was last seen with load; at first, when it was first seen."""
    needs: tuple[tuple[Seconds, int], ...] = ()
    """(when, copies needed), oldest first: each is above all later ones, and younger than the window."""


def desired_copies(
    rule: ScalingRule, load: FunctionLoad, current: int, now: Seconds, history: History, *, held: bool = False
) -> int:
    """
    Return the number of copies that the function should have, within the bounds of *rule*. It is 0 only if *rule*
    allows that, or if it is 0 already.

    :param current: the number that it should have so far
    :param history: up to now, see `remember`
    :param held: *current* was set lately: the present load can raise it, nothing lowers it, and a call ends a 0
    """
    if held:
        return max(current, min(needed_copies(rule, load), rule.max)) if current and rule.by_load else current
    if load.idle:
        if current == 0:
            return 0  # it was scaled to zero, and stays so until a call comes
        if rule.zero and now - history.active_at >= rule.zero_duration_s:
            return 0
    if not rule.by_load:
        needed = current
    else:
        needed = max([needed_copies(rule, load), *(copies for at, copies in history.needs if _fresh(rule, at, now))])
    return min(max(rule.floor, needed), max(rule.floor, rule.max))


def needed_copies(rule: ScalingRule, load: FunctionLoad) -> int:
    """Return the number of copies that *load* needs, without bounds; 0 for no load."""
    amounts = {"capacity": load.inflight, "cpu": load.cpu_millicores, "queue": load.queued}
    amount = amounts.get(rule.type, load.rps)
    return math.ceil(amount / (rule.target * rule.target_proportion) - _TOLERANCE)


def remember(rule: ScalingRule, load: FunctionLoad, now: Seconds, history: History) -> History:
    """Return *history* with *load* at *now*. O(needs)."""
    needed = needed_copies(rule, load)
    needs = [each for each in history.needs if _fresh(rule, each[0], now) and each[1] > needed]
    return History(now if not load.idle else history.active_at, (*needs, (now, needed)))


def _fresh(rule: ScalingRule, at: Seconds, now: Seconds) -> bool:
    return now - at < rule.down_window_s
