"""
A lower bound of what it costs to make room for a load, kept from run to run.

Nearly every call that waits beside idle devices is right to wait: the models that would leave for it are worth more.
To say so, it is enough to know the model of the least worth on the idle devices that would be compared: all victims
together are worth at least as much.
"""

from collections.abc import Sequence
from math import inf

from gpufaas_core.model import Bytes, FunctionId
from gpufaas_scheduler.policies.least_wait.bounds import Bound, Bounds
from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.policies.least_wait.tuning import CANDIDATES
from gpufaas_scheduler.roles import WaitsView
from gpufaas_scheduler.view_nouns import DeviceView, FunctionView


class Floor:
    """See module. It is asked after something has changed (`expire`) and before the next change."""

    __slots__ = (
        "_bounds", "_devices", "_epoch", "_estimates", "_free", "_fresh", "_here", "_kind", "_least", "_moves", "_view",
    )  # fmt: skip

    def __init__(self, view: WaitsView, estimates: Estimates, bounds: Bounds) -> None:
        self._view, self._estimates, self._bounds = view, estimates, bounds
        self._fresh = False
        self._devices: Sequence[DeviceView] = ()
        self._moves = self._epoch = -1
        """As of `_here`."""
        self._kind = ""
        """The kind of all `_devices`; empty: they differ, and nothing is known."""
        self._here: list[Bound] = []
        """The bounds of all functions with a copy on `_devices`."""
        self._free: Bytes = 0
        """The most that one of `_devices` has."""
        self._least = 0.0

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
        view, epoch = self._view, self._bounds.refresh()
        self._fresh = True
        changed = devices is not self._devices or view.moves != self._moves or epoch != self._epoch
        if changed:
            self._gather(devices)
            self._devices, self._moves, self._epoch = devices, view.moves, epoch
        if not self._kind:
            return
        self._free = max([view.free(each) for each in devices])
        for bound in self._here:
            if bound.is_old():
                bound.renew(self._estimates, self._kind)
                changed = True
        if changed:
            self._least = min([each.least for each in self._here], default=inf)

    def _gather(self, devices: Sequence[DeviceView]) -> None:
        """Note the functions on *devices*."""
        kinds = {each.kind for each in devices}
        self._kind = kind = kinds.pop() if len(kinds) == 1 else ""
        here: dict[FunctionId, Bound] = {}
        for device in devices if kind else ():
            for each in self._view.residents(device):
                owner = each.owner
                if owner.id not in here:
                    figures = owner.costs[kind]
                    if figures is not None:
                        here[owner.id] = self._bounds.of(owner, figures)
        self._here = list(here.values())
