"""LB, the baseline of GPU-FaaS: the head of the queue goes to each idle device, wherever its model is."""

from typing import Final

from gpufaas_scheduler.contract import Plan, Start, View, Why

_HEAD: Final = Why("it was the first call that the idle device had room for")


class LoadBalance:
    """A call that a device has no room for is left to the others, so that a large model blocks no small device."""

    name = "lb"
    pass_limit = 0

    def plan(self, view: View) -> Plan:
        queue = view.queue
        for device in view.idle():
            while (call := queue.first()) is not None:
                if (view.holds(device, call) or view.fits(device, call)) and (
                    yield Start(call.id, device.id, None, _HEAD)
                ) is None:
                    break
                queue.set_aside(call)
            queue.rewind()
            if not queue:
                break
        return None
