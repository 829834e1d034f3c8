"""The functions that have waiting calls, and that no device holds."""

from gpufaas_core.model import FunctionId
from gpufaas_scheduler.world.queue import GlobalQueue
from gpufaas_scheduler.world.state import Call, FunctionState


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
            if owner.holders:
                call = None
            elif returned:
                call = self._first_of(owner)
            else:
                call = calls[0] if calls else None
            if call is None:
                stale.append(owner.id)
            elif len(found) < limit:
                found.append(call)
            else:
                break
        for function in stale:
            del self.functions[function]
        return found

    def _first_of(self, owner: FunctionState) -> Call | None:
        first = owner.flow.calls[0] if owner.flow.calls else None
        for call in self._queue.returned:
            if call.owner is owner and (first is None or call.number < first.number):
                return call
        return first
