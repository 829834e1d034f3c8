"""LB, the baseline of GPU-FaaS: an idle device takes the first call of the queue, wherever its model is."""

from typing import Final

from gpufaas_scheduler.contract import Plan, View, Why, start_on

_HEAD: Final = Why("it was the first call that the idle device had room for")


class LoadBalance:
    """An idle device takes the first call that it has room for.

    A call without room on a device is left to the other devices, so a large model does not block a small device.
    """

    name = "lb"
    pass_limit = 0

    def plan(self, view: View) -> Plan:
        queue = view.queue
        for device in view.idle():
            while (call := queue.first()) is not None:
                if (view.holds(device, call) or view.fits(device, call)) and (
                    yield start_on(device, call, _HEAD)
                ) is None:
                    break
                queue.set_aside(call)
            queue.rewind()
            if not queue:
                break
