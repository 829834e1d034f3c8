"""What a copy is worth, and how long a call waits for a holder: the figures that least-wait weighs."""

from itertools import islice
from math import inf, sqrt

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.contract import FunctionView, View, WaitingCall
from gpufaas_scheduler.policies.least_wait.tuning import (
    BUSIEST,
    HOLDERS,
    LOAD_WEIGHT,
    OWN_LOAD,
    SATURATED,
    SPREAD,
    WAITING_WORTH,
)


class Estimates:
    """Made for one action: the figures hold until something is done. Worth is in seconds of waiting per second."""

    __slots__ = ("_view", "_worth", "demand", "devices", "pressure")

    def __init__(self, view: View) -> None:
        self._view = view
        self.demand = min(BUSIEST, view.utilisation)
        """Share of the devices' time that is asked for."""
        self.devices = view.device_count
        self.pressure = len(view.queue) / self.devices
        """Waiting calls for each device."""
        self._worth: dict[FunctionId, float] = {}

    def worth(self, function: FunctionView, kind: str) -> float:
        """What losing one copy costs. It is worked out once, for the *kind* of device that is asked about first."""
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

    def saved(self, function: FunctionView, copies: int, kind: str) -> float:
        """What it saves to have one copy more than *copies*."""
        rate, service_s = self._view.rate(function), function.service_s(kind)
        miss_s, own = self._miss_s(function, kind), rate * service_s
        before_s = self._delay_s(function, copies, own, service_s, miss_s)
        return rate * (before_s - self._delay_s(function, copies + 1, own, service_s, miss_s))

    def _delay_s(self, function: FunctionView, copies: int, own: float, service_s: Seconds, miss_s: Seconds) -> Seconds:
        """
        Mean wait for one of *copies* holders; about what a miss costs at most. *own*: seconds of service that its calls
        ask for in a second.

        Source: H. Sakasegawa, An approximation formula Lq = a rho^b / (1 - rho) (1977), with Kingman's factor.
        """
        if function.exclusive:
            busy = max(own / copies, self.demand + OWN_LOAD * own * (1.0 / copies - 1.0 / self.devices))
        else:
            copies *= function.slots
            busy = own / copies
        if busy >= SATURATED:
            return miss_s * (1.0 + busy - SATURATED)  # no queue has a mean there, but another copy helps still
        power: float = busy ** (sqrt(2.0 * (copies + 1)) - 1.0)
        return min(miss_s, SPREAD * service_s * power / (copies * (1.0 - busy)))

    def _miss_s(self, function: FunctionView, kind: str) -> Seconds:
        load_s = function.load_s(kind)
        if not function.exclusive:
            return load_s  # its load occupies no device
        return load_s * (1.0 + self.pressure + LOAD_WEIGHT * self.demand)

    def wait_s(self, call: WaitingCall, enough_s: Seconds = 0.0) -> Seconds:
        """
        How long *call* waits for a holder by estimate: until one is free, and has served the calls that wait for what
        it holds, as far as they are its share. The first that is less than *enough_s* is answer enough.
        """
        view, owner = self._view, call.owner
        soonest = inf
        for device in islice(view.holders(call), HOLDERS):
            kind = device.kind
            wait_s = view.left_s(device)
            for each in view.residents(device):
                other = each.owner
                if other.waiting and other.exclusive and other.copies:
                    wait_s += other.waiting * other.service_s(kind) / other.copies
            soonest = min(soonest, wait_s - owner.service_s(kind) / owner.copies)
            if soonest < enough_s:
                break
        return soonest
