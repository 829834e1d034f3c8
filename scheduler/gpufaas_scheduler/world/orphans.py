"""The functions that have waiting calls, and that no device holds."""

from gpufaas_core.model import FunctionId
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.queue import GlobalQueue


class Orphans:
    """It lists all of them, and some that were such before: these drop out when calls are asked for."""

    __slots__ = ("_queue", "functions")

    def __init__(self, queue: GlobalQueue[Call]) -> None:
        self.functions: dict[FunctionId, FunctionState] = {}
        """In the order in which they lost their last holder or got their first call."""
        self._queue = queue

    def first(self, limit: int) -> list[Call]:
        """Return the first waiting call of each, of up to *limit* functions."""
        found: list[Call] = []
        stale = []
        returned = self._queue.returned
        for owner in self.functions.values():
            calls = owner.flow.calls
            call = None if owner.holders or not calls else calls[0]
            if returned and not owner.holders:
                back = next((each for each in returned if each.owner is owner), None)
                if back is not None and (not calls or back.number < calls[0].number):
                    call = back
            if call is None:
                stale.append(owner.id)
            elif len(found) < limit:
                found.append(call)
            else:
                break
        for function in stale:
            del self.functions[function]
        return found
