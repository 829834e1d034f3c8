"""
Least wait: serve what relieves the most waiting per second of a device, and hold what would cost the most to miss.

*Objective.* The sum of all waits, in seconds of waiting per second, with few calls that wait beyond a bound. Everything
is put into that one unit:

- *A copy* of function f, of k copies, is worth ``rate(f) x (delay(f, k - 1) - delay(f, k))``. ``delay(f, 0)`` adds a
  load, weighted by how much of the cluster's time is in demand; ``delay(f, k)`` is the wait for one of k holders that
  all are busy, by Sakasegawa's approximation of the M/G/k queue: services are even, but a holder is also away for
  loads and for the other functions on it. So the last copy of a function that is called is worth a load for each call,
  a second copy of a busy one a queue, and a twelfth copy next to nothing.
- *Victims* are the models with the least worth that make enough room; a function that has calls waiting keeps its
  last copy if anything else can go.
- *Where to load*: the idle device on which the victims are worth the least; ties go to the less demanded device.
- *Whom to serve* on a device that became free: the oldest call that it holds the model for. Unless a load relieves
  more: n waiting calls of a function that no device holds, or whose holders are all far behind, weigh
  ``n x age / (load + victims + n x service)`` against ``age / service`` of the hit. So loads give way to hits while
  there is much to do, gather calls meanwhile, and cannot starve.
- *Which holder*, if several are idle: the one whose other models would be missed least while it is busy.
- *Wait or load*: a call whose holders are busy waits for them if they are sooner than a load, counting their queues.
  How soon is the mean residual life of what runs there: where times have a heavy tail, it grows while a call runs. If
  it waits, a replica is loaded on an idle device without it, when its worth over the horizon exceeds the load's
  device time and the worth of its victims.
- *Never idle beside work*: the first call of a function that waits beside an idle device is promised the wait that was
  estimated then. When that is over, it is looked at again; a load later, it is loaded, whatever the victims are worth.
- *Bound*: the oldest call, if it would wait for longer than `wait_bound_s`, has an idle device that holds its model, or
  else one that it is loaded on, one device at a time and for a share of all devices' time. Other calls go on.

There are no local queues: a call that waits for a holder waits in the global queue, so that each decision is made when
a device is free and not in advance. Nothing is used but arrivals so far, the profiles, and who holds and runs what.

*Cost* of a decision: O(models on the device + log of the waiting functions) for a hit; a load looks at
`tuning.CANDIDATES` idle devices with their models, and at `tuning.RIVALS` functions, however many there are.
Independent of the number of waiting calls.

`order` says what is done next, `placement` where, `estimates` has the figures that both weigh, `tuning` the constants.
"""

from __future__ import annotations

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.contract import Plan, View, WaitingCall, Why
from gpufaas_scheduler.policies.least_wait.order import Order
from gpufaas_scheduler.policies.least_wait.tuning import DEFAULT_WAIT_BOUND_S


class LeastWait:
    """See module. `wait_bound_s`: see `policies.PolicyOptions`."""

    name = "least-wait"
    pass_limit = 0

    def __init__(self, wait_bound_s: Seconds = DEFAULT_WAIT_BOUND_S) -> None:
        self.wait_bound_s = wait_bound_s

    def plan(self, view: View) -> Plan:
        queue = view.queue
        refused: set[FunctionId] = set()
        while queue and view.idle_count:
            order = Order(view, self.wait_bound_s, refused)
            found = order.action()
            queue.rewind()
            yield from order.promises
            if found is None:
                return order.look_at
            action, function = found
            if (yield action) is not None:
                refused.add(function)  # the engine knows better; it is looked at again in the next run
        return None

    def weigh(self, view: View, call: WaitingCall) -> Why:
        order = Order(view, self.wait_bound_s, set())
        try:
            return order.weigh(call)
        finally:
            view.queue.rewind()
