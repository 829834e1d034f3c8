"""
A lower bound of what it costs to make room for a load, kept from run to run.

Nearly every call that waits beside idle devices is right to wait: the models that would leave for it are worth more.
To say so, it is enough to know the model of the least worth on the idle devices that would be compared: all victims
together are worth at least as much. The worth of a model changes all the time, but slowly, so a bound of it is good for
many runs: until its function is called, has another number of copies or other times, or until time, the demand or the
queue has moved by more than the bound allows for.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from gpufaas_core.model import Bytes, FunctionId, Seconds
from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.policies.least_wait.tuning import CANDIDATES
from gpufaas_scheduler.view_contract import DeviceView, FiguresView, FunctionView, View

# How far the figures may move until all bounds are computed again: the further, the lower the bounds are.
_FADED: Final = 0.998
"""Of a rate: a quarter of a second."""
_DEMAND: Final = 0.001
_DEARER: Final = 0.006
"""Of it, as a share."""
_HALF: Final = 0.49
"""A bound that was computed at one end of that way is good to the other end."""
_ROUNDING: Final = 1.0 - 1e-9


class _Bound:
    """What is known of a function, and what its bound was computed from."""

    __slots__ = ("called", "called_at", "copies", "figures", "function", "least", "load_s", "service_s")

    def __init__(self, function: FunctionView, figures: FiguresView) -> None:
        self.function = function
        self.figures = figures
        self.called = self.called_at = -1.0
        self.copies = 0
        self.load_s = self.service_s = 0.0
        self.least = 0.0

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
        self.least = _ROUNDING * estimates.least_worth(function, kind, _FADED, _DEMAND, _DEARER)


class Floor:
    """See module. It is asked after something has changed (`expire`) and before the next change."""

    __slots__ = (
        "_bounds", "_dearer", "_demand", "_devices", "_estimates", "_free", "_fresh", "_kind", "_least", "_moves",
        "_since", "_view",
    )  # fmt: skip

    def __init__(self, view: View, estimates: Estimates) -> None:
        self._view, self._estimates = view, estimates
        self._fresh = False
        self._devices: Sequence[DeviceView] = ()
        self._moves = -1
        """As of `_bounds`."""
        self._kind = ""
        """Of all `_devices`; empty: they differ, and nothing is known."""
        self._bounds: list[_Bound] = []
        """Of all functions with a copy on `_devices`."""
        self._free: Bytes = 0
        """The most that one of `_devices` has."""
        self._least = 0.0
        self._since: Seconds = -inf
        """The time of `_demand` and `_dearer`, from which the bounds allow for some distance."""
        self._demand = self._dearer = 0.0

    def expire(self) -> None:
        """Something has changed."""
        self._fresh = False

    def below(self, function: FunctionView, devices: Sequence[DeviceView]) -> float:
        """
        Return a lower bound of the worth of the victims for a copy of *function* on any of *devices*; 0.0 if there may
        be room, or little to compare.

        :param devices: the answer of `View.least_used` for it and `CANDIDATES`
        """
        if devices is not self._devices and (
            len(devices) < CANDIDATES or self._view.least_used(function, CANDIDATES) is not devices
        ):
            return 0.0  # these are for this function only: what is found of them would serve once
        if not self._fresh or devices is not self._devices:
            self._look(devices)
        if not self._kind:
            return 0.0
        figures = function.costs[self._kind]
        return 0.0 if figures is None or figures.occupation <= self._free else self._least

    def _look(self, devices: Sequence[DeviceView]) -> None:
        view, estimates = self._view, self._estimates
        self._fresh = True
        estimates.refresh()
        changed = devices is not self._devices or view.moves != self._moves
        if changed:
            self._gather(devices)
        if not self._kind:
            return
        self._free = max([view.free(each) for each in devices])
        far = (
            abs(estimates.demand - self._demand) > _HALF * _DEMAND
            or abs(estimates.dearer - self._dearer) > _HALF * _DEARER * self._dearer
            or view.faded(self._since) < _FADED
        )
        if far:
            self._since, self._demand, self._dearer = view.now, estimates.demand, estimates.dearer
        for bound in self._bounds:
            if far or bound.is_old():
                bound.renew(estimates, self._kind)
                changed = True
        if changed or far:
            self._least = min([each.least for each in self._bounds], default=inf)

    def _gather(self, devices: Sequence[DeviceView]) -> None:
        """Note the functions on *devices*. Bounds that are known stay."""
        view = self._view
        kinds = {each.kind for each in devices}
        kind = kinds.pop() if len(kinds) == 1 else ""
        known = {each.function.id: each for each in self._bounds} if kind == self._kind else {}
        bounds: dict[FunctionId, _Bound] = {}
        for device in devices if kind else ():
            for each in view.residents(device):
                owner = each.owner
                if owner.id in bounds:
                    continue
                figures = owner.costs[kind]
                if figures is None:
                    continue
                bound = known.get(owner.id)
                if bound is None or bound.function is not owner or bound.figures is not figures:
                    bound = _Bound(owner, figures)
                bounds[owner.id] = bound
        self._devices, self._moves, self._kind, self._bounds = devices, view.moves, kind, list(bounds.values())
