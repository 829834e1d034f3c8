"""
LALB with out-of-order dispatch (O3): wait for the copy when that is sooner than loading another.

Source: M. Zhao, K. Jha, S. Hong, "GPU-enabled Function-as-a-Service for Machine Learning Inference" (IPDPS 2023),
algorithms 1 and 2; the comments number the steps of one scan. The decisions are those of the literal scan
(tests/unit/scheduler/literal.py), at less cost: calls that a scan would pass over are not examined.

Two rules are not in the paper, which knows all times. A holder that is late by the call's load time or more does not
count as a busy holder. A local queue goes back to the global queue when its device is late by the load time of its
first call (docs/adr/0028).
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from gpufaas_scheduler.contract import NEVER, Assign, Plan, Start, Why, start_on
from gpufaas_scheduler.policies.passes import Passes
from gpufaas_scheduler.roles import PassesView, Placement
from gpufaas_scheduler.view_contract import View, WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView

_HIT: Final = Why("the first waiting call whose model the device held")
_IDLE: Final = Why("another idle device held its model")
_ONLY: Final = Why("no device held its model")
_LATE: Final = Why("every holder was late by more than a load takes")


class O3Options(Struct, frozen=True):
    o3_limit: Annotated[int, Meta(ge=0, description="how often one waiting call may be overtaken")] = 25
    """The default is the paper's."""


class O3:
    """The calls in order of arrival, but later ones whose model the device holds overtake them, within a limit."""

    Options = O3Options
    follows = _HIT
    """No call waits before the first one, so none is passed over."""

    def __init__(self, options: O3Options) -> None:
        self.passes = Passes(options.o3_limit)
        self.save, self.load, self.leaving = self.passes.save, self.passes.load, self.passes.of

    def plan(self, view: PassesView, placement: Placement) -> Plan:
        # Step 1 (the local queue) was done when the device became free: an idle device has no local work.
        queue, place, passes = view.queue, placement.place, self.passes
        first_at_limit = passes.first_at_limit
        for device in view.idle():
            hit = view.first_hit(device)
            before = NEVER if hit is None else hit.number
            started = None
            # Step 2: of the calls ahead of the hit, those at the limit are placed (2b), others are passed over (2c).
            while (call := first_at_limit(queue, before)) is not None:
                action = place(view, call, device)
                if action is None or (yield action) is not None:
                    queue.set_aside(call)  # no later call of its function does better in this scan
                elif device.busy:
                    started = call.number
                    break
            # 2a. A start of step 2 that takes no compute (a planned share) may have evicted the copy of the hit.
            if started is None and hit is not None and (copy := device.copies.get(hit.function)) is not None:
                start = Start((hit.id,), copy, (), None, _HIT)
                if (yield start) is None:
                    started = hit.number
            passes.count(queue, NEVER if started is None else started)
            # Step 3: nothing found for this device.
            while started is None and (call := queue.first()) is not None:
                action = place(view, call, device)
                if action is None or (yield action) is not None:
                    queue.set_aside(call)
                elif device.busy:
                    started = call.number
            if queue.aside:
                queue.rewind()
            if not queue.count:
                break


class Locality:
    """Where the model is, when that is sooner than a load on the device that is considered."""

    def place(self, view: View, call: WaitingCall, device: DeviceView) -> Start | Assign | None:
        """
        Return where *call* goes when the idle *device* is considered.

        None: it goes on waiting, since the device has no room for it and no other place is better. A device that it may
        not run on leads to nothing, not even to a holder's local queue, since it could not load here instead.
        """
        if not view.allows(device, call):
            return None
        if not view.held(call):
            return start_on(device, call, _ONLY) if view.fits(device, call) else None
        idle = view.idle_holder(call)
        if idle is not None:
            return start_on(idle, call, _IDLE)
        load_s = view.load_s(device, call)
        soonest = view.soonest_holder(call, load_s)
        if soonest is None:
            return start_on(device, call, _LATE) if view.fits(device, call) else None
        options = (("wait", soonest[0].id, soonest[1]), ("load", device.id, load_s))
        if soonest[1] < load_s:
            why = Why("a holder finishes before a load would", options)
            return Assign(call.id, soonest[0].copies[call.function], why, load_s)
        if view.fits(device, call):
            return start_on(device, call, Why("no holder finishes before a load would", options))
        return None
