"""Which calls start together."""

from msgspec.structs import replace

from gpufaas_scheduler.contract import Start
from gpufaas_scheduler.view_contract import View, WaitingCall


class Waiting:
    """The calls of its function that wait now, up to its batch_max, start with a call."""

    def extend(self, view: View, start: Start, call: WaitingCall) -> Start:
        limit = call.owner.batch_max - len(start.calls)
        if limit <= 0 or call.owner.waiting < 2:
            return start
        others = view.queue.more_of(call, limit)
        return replace(start, calls=(*start.calls, *(each.id for each in others))) if others else start
