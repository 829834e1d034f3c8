"""LB, the baseline of GPU-FaaS: an idle device takes the first call of the queue, wherever its model is."""

from typing import Final

from gpufaas_scheduler.contract import Plan, Start, Why
from gpufaas_scheduler.roles import Placement
from gpufaas_scheduler.view_contract import View, WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView

_HEAD: Final = Why("it was the first call that the idle device had room for")


class Arrival:
    """The calls in order of arrival; one that cannot be placed is left to the next device."""

    def plan(self, view: View, placement: Placement) -> Plan:
        queue, place = view.queue, placement.place
        for device in view.idle():
            while (call := queue.first()) is not None:
                action = place(view, call, device)
                if action is None or (yield action) is not None:
                    queue.set_aside(call)
                elif device.busy:
                    break
            if queue.aside:
                queue.rewind()
            if not queue.count:
                break


class Anywhere:
    """The device that is considered, if it holds the model or has room for it."""

    def place(self, view: View, call: WaitingCall, device: DeviceView) -> Start | None:
        copy = device.copies.get(call.function)
        if copy is not None:
            return Start((call.id,), copy, (), None, _HEAD)
        return Start((call.id,), None, device.part, None, _HEAD) if view.fits(device, call) else None
