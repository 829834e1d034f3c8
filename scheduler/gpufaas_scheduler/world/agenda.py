"""
Why the policy runs, when it wants to run again, and what it has asked for beyond the placement of calls: a plan, and
nodes that are procured or released.
"""

from collections.abc import Mapping
from typing import Final

from gpufaas_core import messages as m
from gpufaas_core.model import FunctionId, NodeId, Offer, OrderId, PlacementPlan, Replica, Seconds
from gpufaas_scheduler.policy_contract import ARRIVAL, FINISH, FLEET, LOADED, PLAN, WAKE

CAUSE: Final[Mapping[type[m.Event], int]] = {
    m.Arrived: ARRIVAL,
    m.Finished: FINISH,
    m.CallerLeft: FINISH,
    m.NodeRefused: FINISH,
    m.Loaded: LOADED,
    m.CopyFailed: LOADED,
    m.Measured: LOADED,
    m.Resized: LOADED,
    m.ShareKept: LOADED,
    m.WorkerExited: LOADED,
    m.CopySilent: LOADED,
    m.Staged: LOADED,
    m.Unstaged: LOADED,
    m.Parked: LOADED,
    m.Unparked: LOADED,
    m.DeviceJoined: FLEET,
    m.DeviceLeft: FLEET,
    m.DeviceDrained: FLEET,
    m.FunctionDeployed: FLEET,
    m.FunctionRemoved: FLEET,
    m.Profiled: FLEET,
    m.Scaled: FLEET,
    m.Offered: FLEET,
    m.OrderFailed: FLEET,
    m.Restored: 0,
    m.Serving: FLEET,
    m.Woken: WAKE,
    m.Planned: PLAN,
}
"""The cause of a run that follows from an event."""

WATCHED: Final = {kind: cause | PLAN if cause == WAKE else cause & ~ARRIVAL for kind, cause in CAUSE.items()}
"""The causes for which a policy may run after an event, beside its runs for calls that wait."""

_NO_KEYS: Final[frozenset[str]] = frozenset()
"""No keys of wakes."""


def batch_key(function: FunctionId) -> str:
    """Return the key of the wake for calls of *function* that wait for others of their batch beside an idle device."""
    return f"batch {function}"


class Agenda:
    """See module. `handle.agenda` changes it."""

    def __init__(self) -> None:
        self.watches = 0
        """See `policy_contract.Watching`."""
        self.event: m.Event = m.Serving()
        """The event that is being handled."""
        self._came = _NO_KEYS
        """The keys of the wakes that came with the last `Woken`."""
        self._planning = False
        """The last `Woken` came for a plan."""
        self.wakes: dict[str, Seconds] = {}
        """When the policy wants to run again, by key."""
        self.plan: PlacementPlan | None = None
        self.by_name: dict[str, tuple[Replica, ...]] = {}
        """The replicas of `plan` by the names of their functions."""
        self.planned = False
        """The policy has set a plan, and wants to run for it."""
        self.offers: dict[str, Offer] = {}
        """By kind; `Offer.limit` is what is left of it."""
        self.ordered: dict[OrderId, str] = {}
        """The kinds of the nodes that were procured and have not joined, by order."""
        self.orders = 0
        """The number of the last order."""
        self.unmet: dict[str, str] = {}
        """See `View.unmet`."""
        self.releasing: dict[NodeId, bool] = {}
        """Nodes that are given back once their devices are empty, and whether the provider was told."""

    def set_plan(self, plan: PlacementPlan | None) -> None:
        self.plan, self.by_name = plan, {}
        for each in () if plan is None else plan.replicas:
            self.by_name[each.function] = (*self.by_name.get(each.function, ()), each)

    @property
    def causes(self) -> int:
        """Why the policy runs, as a mask of the contract's constants."""
        cause = CAUSE[type(self.event)]
        return cause | PLAN if cause == WAKE and self._planning else cause

    @property
    def woken(self) -> frozenset[str]:
        """The keys of the wakes that have come now."""
        return self._came if isinstance(self.event, m.Woken) else _NO_KEYS

    def wake(self, now: Seconds) -> bool:
        """Take the wakes that have come. Return whether there are any, or a plan to look at."""
        self._came = came = frozenset(key for key, at in self.wakes.items() if at <= now)
        for key in came:
            del self.wakes[key]
        self._planning, self.planned = self.planned, False
        return bool(came) or self._planning

    def wake_at(self, now: Seconds, waiting: int) -> Seconds | None:
        """Return when the policy wants to run, if it would: *waiting* is the number of calls that wait for it."""
        if self.planned:
            return now
        return min(self.wakes.values()) if self.wakes and (waiting or self.watches & WAKE) else None

    def joined(self, order: OrderId) -> None:
        """A device has joined whose node names *order*; empty: none."""
        if order:
            kind = self.ordered.pop(order, None)
            if kind is not None:
                self.unmet.pop(kind, None)
