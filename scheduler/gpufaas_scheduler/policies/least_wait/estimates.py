"""The worth of a copy, and the wait of a call for a holder: the figures that least-wait compares."""

from itertools import islice
from math import inf, sqrt

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.policies.least_wait.tuning import (
    BUSIEST,
    FEW,
    HOLDERS,
    HORIZON_S,
    LOAD_WEIGHT,
    OWN_LOAD,
    SATURATED,
    SPREAD,
    WAITING_WORTH,
)
from gpufaas_scheduler.view_contract import View, WaitingCall
from gpufaas_scheduler.view_nouns import FunctionView


class Estimates:
    """Valid for one action, since each action changes the figures. Worth is in seconds of waiting per second."""

    __slots__ = ("_fresh", "_view", "_worth", "dearer", "demand", "devices", "pressure")

    def __init__(self, view: View) -> None:
        self._view = view
        self._fresh = False
        self._worth: dict[FunctionId, float] = {}
        self.demand = self.pressure = self.dearer = 0.0
        self.devices = 0

    def expire(self) -> None:
        """Something has changed: the figures are computed again when they are asked for."""
        self._fresh = False

    def refresh(self) -> None:
        """Compute what the figures share, if something has changed."""
        if self._fresh:
            return
        self._fresh = True
        view = self._view
        self.demand = demand = min(BUSIEST, view.utilisation)
        """The share of the devices' time that calls ask for."""
        self.devices = view.device_count
        self.pressure = len(view.queue) / self.devices
        """Waiting calls per device."""
        self.dearer = 1.0 + self.pressure + LOAD_WEIGHT * demand
        """How much more a load costs than its time, since others wait for the device meanwhile."""
        self._worth.clear()

    def worth(self, function: FunctionView, kind: str) -> float:
        """Return what losing one copy costs. It is computed once, for the *kind* of the first question."""
        if not self._fresh:
            self.refresh()
        worth = self._worth.get(function.id)
        if worth is None:
            copies = function.copies
            if copies > 1:
                worth = self.saved(function, copies - 1, kind)
            elif function.waiting:
                worth = WAITING_WORTH
            else:
                worth = self._view.rate(function) * self._miss_s(function, kind)
            self._worth[function.id] = worth
        return worth

    def saved(self, function: FunctionView, copies: int, kind: str, least_s: Seconds = 0.0) -> float:
        """
        Return what one copy more than *copies* saves. If it saves less than *least_s* over the horizon, that may be an
        upper bound, with which this is still so.
        """
        if not self._fresh:
            self.refresh()
        rate, figures = self._view.rate(function), function.costs[kind]
        if figures is None:
            service_s = miss_s = inf
        else:
            service_s, miss_s = figures.service_s, figures.load_s
        if function.placed:
            miss_s *= self.dearer
        own = rate * service_s
        before_s = self._delay_s(function, copies, own, service_s, miss_s, self.demand)
        most = rate * before_s
        if HORIZON_S * most <= least_s:
            return most
        return rate * (before_s - self._delay_s(function, copies + 1, own, service_s, miss_s, self.demand))

    def bounds(
        self, function: FunctionView, kind: str, faded: float, demand: float, dearer: float
    ) -> tuple[float, float]:
        """
        Return a lower bound of `worth`, and an upper bound of what one more copy saves, for as long as the rate is not
        below *faded* times that of now, the demand is within *demand* of that of now, and `dearer` within that share
        of it.

        A wait never falls when the rate, the demand or the cost of a miss rises: so it is at least that with the lowest
        of each, and at most that with the highest.
        """
        view, copies = self._view, function.copies
        rate, service_s = view.rate(function), function.service_s(kind)
        low, miss_s = rate * faded, self._miss_s(function, kind)
        least_s, most_s = miss_s * (1.0 - dearer), miss_s * (1.0 + dearer)
        now = most = inf
        if copies:
            now = self._delay_s(function, copies, rate * service_s, service_s, most_s, self.demand + demand)
            more = self._delay_s(function, copies + 1, low * service_s, service_s, least_s, self.demand - demand)
            most = rate * (now - more)
        if copies <= 1:
            return min(WAITING_WORTH, low * least_s), most
        less = self._delay_s(function, copies - 1, low * service_s, service_s, least_s, self.demand - demand)
        return low * (less - now), most

    def _delay_s(
        self, function: FunctionView, copies: int, own: float, service_s: Seconds, miss_s: Seconds, demand: float
    ) -> Seconds:
        """
        Return the mean wait for one of *copies* holders, at most about the cost of a miss.

        :param own: seconds of service that its calls ask for per second

        Source: H. Sakasegawa, An approximation formula Lq = a rho^b / (1 - rho) (1977), with Kingman's factor.
        """
        if function.placed:
            busy = own / copies
            shared = demand + OWN_LOAD * own * (1.0 / copies - 1.0 / self.devices)
            if shared > busy:
                busy = shared
        else:
            copies *= function.slots
            busy = own / copies
        if busy >= SATURATED:
            return miss_s * (1.0 + busy - SATURATED)  # such a queue has no mean, but another copy still helps
        power: float = busy ** (sqrt(2.0 * (copies + 1)) - 1.0)
        delay_s = SPREAD * service_s * power / (copies * (1.0 - busy))
        return delay_s if delay_s < miss_s else miss_s

    def _miss_s(self, function: FunctionView, kind: str) -> Seconds:
        load_s = function.load_s(kind)
        if not function.placed:
            return load_s  # its load occupies no device
        return load_s * self.dearer

    def comes(self, function: FunctionView) -> bool:
        """Whether few calls wait, the first copies load, and nobody knows how long calls take: no other is loaded."""
        few = 0 < function.loading == function.copies and function.waiting <= FEW * function.loading
        return few and self._view.unknown(function)

    def wait_s(self, call: WaitingCall, enough_s: Seconds = 0.0) -> Seconds:
        """
        Return the estimated wait of *call* for a holder: until one is free, and has served its share of the calls that
        wait for its models. The first wait below *enough_s* is the answer.
        """
        view, owner = self._view, call.owner
        copies, soonest = owner.copies, inf
        for device in islice(view.holders(call), HOLDERS):
            kind = device.kind
            wait_s = view.left_s(device)
            for each in view.residents(device):
                other = each.owner
                waiting = other.waiting
                if waiting and other.placed and other.copies:
                    served_s = waiting * other.service_s(kind) if other.batch_max < 2 else other.serve_s(kind, waiting)
                    wait_s += served_s / other.copies
            figures = owner.costs[kind]
            if owner.batch_max < 2:
                wait_s -= inf if figures is None else figures.service_s / copies
            else:  # it does not wait for its own batch
                wait_s -= owner.serve_s(kind, min(owner.waiting, owner.batch_size(kind))) / copies
            if wait_s < soonest:
                soonest = wait_s
                if soonest < enough_s:
                    break
        return soonest
