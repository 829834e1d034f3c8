"""Arrival rates, and the work that arrives for the devices: exponentially weighted sums."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, expm1, inf
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_scheduler.world.function import FunctionState

DEMAND_S: Final = 120.0
"""The time constant: two thirds of the weight is on the last two minutes."""

_LEAST_OBSERVED_S: Final = 3.0
"""A lower bound of the observed time, so that the first call does not make a rate of 1,000 per second."""


class Demand:
    """The arrivals of all functions together. Those of one function are in `FunctionState.called`."""

    __slots__ = ("first_call_at", "observed", "observed_at", "offered_at", "offered_s")

    def __init__(
        self, first_call_at: Seconds | None = None, offered_s: Seconds = 0.0, offered_at: Seconds = 0.0
    ) -> None:
        self.first_call_at = first_call_at
        self.offered_s = offered_s
        """Sum of the service times of the arrivals, weighted as `FunctionState.called`, as of `offered_at`."""
        self.offered_at = offered_at
        self.observed: Seconds = _LEAST_OBSERVED_S
        """The sum of the weights of one call per second since the first call."""
        self.observed_at: Seconds = -inf
        """The time of `observed`: decisions need it many times at one instant."""

    def note_further(self, owner: FunctionState, calls: int, now: Seconds) -> None:
        """In the last moment, this number of *calls* of a direct function came."""
        owner.called = owner.called * exp((owner.called_at - now) / DEMAND_S) + calls
        owner.called_at = now

    def note(self, owner: FunctionState, kinds: Iterable[str], now: Seconds) -> None:
        """
        A call arrives now. Calls of direct functions add to the worth of copies, but not to the work of devices.

        :param kinds: of the present devices
        """
        if self.first_call_at is None:
            self.first_call_at = owner.called_at = self.offered_at = now
            self.observed_at = -inf
        owner.called = owner.called * exp((owner.called_at - now) / DEMAND_S) + 1.0
        owner.called_at = now
        if not owner.placed:
            return
        service_s = 0.0
        for kind in kinds:
            costs = owner.costs[kind]
            if costs is not None:
                service_s = costs.service_s
                break
        self.offered_s = self.offered_s * exp((self.offered_at - now) / DEMAND_S) + service_s
        self.offered_at = now

    def move(self, before: FunctionState, after: FunctionState, arrived_at: Seconds, now: Seconds) -> None:
        """A call that arrived for one function is one of another from now on."""
        weight = exp((arrived_at - now) / DEMAND_S)
        for owner, change in ((before, -weight), (after, weight)):
            owner.called = max(0.0, owner.called * exp((owner.called_at - now) / DEMAND_S) + change)
            owner.called_at = now

    def utilisation(self, devices: int, now: Seconds) -> float:
        """Return the share of their time that this many devices would serve."""
        if now != self.observed_at:
            self.observe(now)
        offered_s = self.offered_s * exp((self.offered_at - now) / DEMAND_S)
        return offered_s / self.observed / max(1, devices)

    def faded(self, since: Seconds, now: Seconds) -> float:
        """Return by what factor the rate of a function has changed that had no call since then. At most 1."""
        if now != self.observed_at:
            self.observe(now)
        return exp((since - now) / DEMAND_S) * self._observed_until(since) / self.observed

    def observe(self, now: Seconds) -> None:
        """Let `observed` be that of *now*."""
        self.observed_at = now
        self.observed = self._observed_until(now)

    def _observed_until(self, now: Seconds) -> Seconds:
        since = 0.0 if self.first_call_at is None else now - self.first_call_at
        return max(_LEAST_OBSERVED_S, DEMAND_S * -expm1(-since / DEMAND_S))
