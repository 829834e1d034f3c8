"""
Bounds of what copies are worth, kept from run to run.

The worth of a copy changes all the time, but slowly. So a bound of it is good for many runs: until its function is
called, has another number of copies or other times, or until time, the demand or the queue has moved by more than the
bound allows for. A decision that a bound settles needs no figures.
"""

from math import inf
from typing import Final

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.roles import WaitsView
from gpufaas_scheduler.view_nouns import FiguresView, FunctionView

# How far the figures may move until all bounds are computed again: the further, the wider the bounds are.
FADED: Final = 0.998
"""What is left of a rate that has faded: this takes a quarter of a second."""
DEMAND: Final = 0.001
DEARER: Final = 0.006
"""A change of `Estimates.dearer`, as a share of it."""
_HALF: Final = 0.49
"""A bound that was computed at one end of that way is good to the other end."""
_STEADY: Final = 4
"""Where all figures move with each event, as on few devices, bounds are no use: they last for so many runs at least."""
_ROUNDING: Final = 1e-9


class Bound:
    """What a function's copies are worth at least, and what one more would be worth at most."""

    __slots__ = ("called", "called_at", "copies", "figures", "function", "least", "load_s", "most", "service_s")

    def __init__(self, function: FunctionView, figures: FiguresView) -> None:
        self.function, self.figures = function, figures
        # What the bounds were computed from.
        self.called = self.called_at = -1.0
        self.copies = -1
        self.load_s = self.service_s = -1.0
        self.least = 0.0
        """See `Estimates.worth`."""
        self.most = inf
        """See `Estimates.saved`."""

    def is_old(self) -> bool:
        function, figures = self.function, self.figures
        return (
            function.called_at != self.called_at
            or function.called != self.called
            or figures.service_s != self.service_s
            or figures.load_s != self.load_s
            or function.copies != self.copies
        )

    def renew(self, estimates: Estimates, kind: str) -> None:
        function, figures = self.function, self.figures
        self.called, self.called_at, self.copies = function.called, function.called_at, function.copies
        self.load_s, self.service_s = figures.load_s, figures.service_s
        least, most = estimates.bounds(function, kind, FADED, DEMAND, DEARER)
        self.least, self.most = (1.0 - _ROUNDING) * least, (1.0 + _ROUNDING) * most


class Bounds:
    """Callers ask it after something has changed (`expire`) and before the next change."""

    __slots__ = (
        "_dearer",
        "_demand",
        "_estimates",
        "_fresh",
        "_known",
        "_looks",
        "_since",
        "_steady",
        "_view",
        "epoch",
    )

    def __init__(self, view: WaitsView, estimates: Estimates) -> None:
        self._view, self._estimates = view, estimates
        self._fresh = False
        self.epoch = 0
        """Bounds of another epoch are void."""
        self._known: dict[FunctionId, Bound] = {}
        """The bounds that were computed in this epoch."""
        self._since: Seconds = -inf
        """When this epoch began, with these figures."""
        self._demand = self._dearer = 0.0
        self._looks = 0
        """The number of runs in this epoch."""
        self._steady = False

    def expire(self) -> None:
        """Something has changed."""
        self._fresh = False

    def refresh(self) -> int:
        """Begin a new epoch if the figures have moved too far. Return its number."""
        if self._fresh:
            return self.epoch
        self._fresh = True
        estimates = self._estimates
        estimates.refresh()
        self._looks += 1
        if (
            abs(estimates.demand - self._demand) > _HALF * DEMAND
            or abs(estimates.dearer - self._dearer) > _HALF * DEARER * self._dearer
            or self._view.faded(self._since) < FADED
        ):
            self._since, self._demand, self._dearer = self._view.now, estimates.demand, estimates.dearer
            self._known.clear()
            self.epoch += 1
            self._steady, self._looks = self._looks > _STEADY, 0
        return self.epoch

    def of(self, function: FunctionView, figures: FiguresView) -> Bound:
        """Return the bound for *function*, which may be old."""
        bound = self._known.get(function.id)
        if bound is None or bound.figures is not figures or bound.function is not function:
            bound = self._known[function.id] = Bound(function, figures)
        return bound

    def most(self, function: FunctionView, kind: str, least_s: Seconds) -> float:
        """Return an upper bound of what one more copy saves. *least_s* is as for `Estimates.saved`."""
        if not self._fresh:
            self.refresh()
        if not self._steady:
            return self._estimates.saved(function, function.copies, kind, least_s)
        figures = function.costs[kind]
        bound = self._known.get(function.id)
        if bound is None or bound.figures is not figures or bound.function is not function:
            if figures is None:
                return inf
            bound = self.of(function, figures)
        if bound.is_old():
            bound.renew(self._estimates, kind)
        return bound.most
