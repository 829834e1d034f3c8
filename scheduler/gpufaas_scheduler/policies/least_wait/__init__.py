"""
Least wait: serve the call that relieves the most waiting per second of a device, and keep the copies that would cost
the most to miss.

*Objective.* The sum of all waits, in seconds of waiting per second, with few calls that wait beyond a bound. All costs
are in that unit:

- *A copy* of function f, of k copies, is worth ``rate(f) x (delay(f, k - 1) - delay(f, k))``. ``delay(f, 0)`` adds a
  load, weighted by how much of the cluster's time is in demand; ``delay(f, k)`` is the wait for one of k busy holders,
  by Sakasegawa's approximation of the M/G/k queue: service times are even, but a holder is also busy with loads and
  with other functions. So the last copy of a function that is called is worth a load for each call, a second copy of a
  busy one is worth a queue, and a twelfth copy next to nothing.
- *Victims* are the models with the least worth that make enough room. A function with waiting calls keeps its last copy
  if anything else can be evicted.
- *Where to load*: the idle device on which the victims are worth the least; ties go to the less demanded device.
- *Which call* a free device serves: the oldest one whose model it holds, unless a load relieves more. n waiting calls
  of a function that no device holds, or whose holders are all far behind, weigh
  ``n x age / (load + victims + n x service)`` against ``age / service`` of the hit. So loads give way to hits in
  busy times, gather calls meanwhile, and cannot starve.
- *Which holder*, if several are idle: the one whose other models would be missed least while it is busy.
- *Wait or load*: a call whose holders are busy waits for them if they are free sooner than a load takes, with their
  queues. The estimate is the mean residual life of the running calls: with heavy tails, it grows while a call runs. If
  the call waits, a replica is loaded on an idle device without its model, when the worth of the replica over the
  horizon exceeds the load's device time and the worth of its victims.
- *Never idle beside work*: when a call waits beside an idle device, its wait is estimated and promised, for the first
  call of each function. Once that time is over, the call is examined again. One load later it is loaded, whatever the
  victims are worth.
- *Bound*: if the oldest call would wait for longer than `wait_bound_s`, it gets an idle device that holds its model, or
  one to load it on, one device at a time and for a share of all devices' time. Other calls go on.

There are no local queues: a call that waits for a holder waits in the global queue, so each decision is made when a
device is free, not in advance. The policy uses only past arrivals, the profiles, and which devices hold and run what.

*Cost* of a decision: O(models on the device + log of the waiting functions) for a hit; a load examines
`tuning.CANDIDATES` idle devices with their models, and `tuning.RIVALS` functions. It does not depend on the number of
waiting calls. Where calls wait beside idle devices, nearly every decision is that they go on waiting: `bounds` and
`floor` keep from run to run what says so at once.

`Relief` is the order, and `LeastMissed` the placement, which other orders can have, too. `order` finds what to do next,
`placement` the device, `estimates` the figures for both, `bounds` and `floor` bounds of these; `tuning` has constants.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Final

from msgspec import Meta, Struct

from gpufaas_core.model import Seconds
from gpufaas_scheduler.contract import Plan, Start, Wake, Why, start_on
from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.policies.least_wait.order import HIT, Order
from gpufaas_scheduler.policies.least_wait.placement import Rooms
from gpufaas_scheduler.policies.least_wait.tuning import DEFAULT_WAIT_BOUND_S
from gpufaas_scheduler.roles import WaitsView
from gpufaas_scheduler.view_contract import WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView

NAME: Final = "least-wait"
_HELD: Final = Why("an idle device held the model, and its other models would be missed least")
_PROMISE: Final = "promise"
"""The key of the wake for when the next promise to a waiting call is over."""


class ReliefOptions(Struct, frozen=True):
    wait_bound_s: Annotated[
        Seconds, Meta(ge=0, description="a call that waits so long has a device reserved, one call at a time")
    ] = DEFAULT_WAIT_BOUND_S


class Relief:
    """The call whose hit or load relieves the most waiting per second of a device; replicas where they pay."""

    Options = ReliefOptions
    placements = (NAME,)
    follows = HIT

    def __init__(self, options: ReliefOptions) -> None:
        self.wait_bound_s = options.wait_bound_s
        self._order: Order | None = None
        """The order of the last run: the next one goes on with it if the view is the same."""

    def plan(self, view: WaitsView, placement: LeastMissed) -> Plan:
        queue, order = view.queue, self._order
        if order is None or order.view is not view:
            self._order = order = Order(view, self.wait_bound_s, placement.rooms(view))
        refused = order.refused
        if refused:
            refused.clear()
        look_at = inf
        while queue.count and view.idle_count:
            found = order.action()
            queue.rewind()
            if order.promises:
                yield from order.promises
            if found is None:
                look_at = inf if order.look_at is None else order.look_at
                break
            action, function = found
            if (yield action) is not None:
                refused.add(function)  # the next run examines it again
        if view.wakes.get(_PROMISE, inf) != look_at:
            yield Wake(look_at, _PROMISE)

    def weigh(self, view: WaitsView, call: WaitingCall) -> Why:
        order = Order(view, self.wait_bound_s, Rooms(view, Estimates(view)))
        try:
            return order.weigh(call)
        finally:
            view.queue.rewind()


class LeastMissed:
    """Where the model is, or will be sooner than a load takes; else where the victims are worth the least."""

    def __init__(self) -> None:
        self._rooms: Rooms | None = None

    def rooms(self, view: WaitsView) -> Rooms:
        """Return what compares devices. Its figures are those of the last action until it expires."""
        if self._rooms is None or self._rooms.view is not view:
            self._rooms = Rooms(view, Estimates(view))
        return self._rooms

    def place(self, view: WaitsView, call: WaitingCall, device: DeviceView) -> Start | None:  # noqa: ARG002
        """Return the start of *call* on the best idle device. It waits for a holder in the global queue."""
        rooms, owner = self.rooms(view), call.owner
        rooms.expire()
        holder = rooms.idle_holder(call)
        if holder is not None:
            return start_on(holder, call, _HELD)
        room = rooms.cheapest(owner) or rooms.cheapest(owner, view.idle_count)
        if room is None or rooms.estimates.comes(owner):
            return None
        load_s = owner.load_on(room.device)
        wait_s = rooms.estimates.wait_s(call, load_s) if owner.copies else inf
        if wait_s < load_s:
            return None
        options = (("load", room.device.id, load_s), ("wait", call.function, wait_s))
        return Start((call.id,), None, room.device.part, room.victims, Why("no holder was free before a load", options))
