"""
The call book: all calls that wait or run, by id, and the deadlines of those that wait.

The queues know the place of a waiting call (`queue`, `FunctionState.flow`, `DeviceState.local`).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

from gpufaas_core.model import CallId, DeviceId, Seconds
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import ADOPT, ENQUEUE, LEAVE, LOCAL, RETURN, WAIT
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState


class CallBook:
    """
    Each step of a call is checked against `call_state` before anything is changed. The steps of every call, START and
    END, are taken where the rest of their work is done: `grants.start` and `grants.end`.
    """

    __slots__ = ("_deadlines", "by_id", "soonest", "twins", "waiting")

    def __init__(self) -> None:
        self.by_id: dict[CallId, Call] = {}
        """All calls that wait or run, without the twins."""
        self.twins: dict[tuple[CallId, DeviceId], Call] = {}
        """Calls that run on a device, and also wait or run elsewhere. They were told to stop."""
        self.waiting = 0
        self.soonest: Seconds = inf
        """The first of the deadlines that were watched since `Engine.may_wake_before` was True."""
        self._deadlines: list[tuple[Seconds, int, Call]] = []
        """A heap. Entries of calls that no longer wait are dropped when they surface or outnumber the others."""

    # --- steps --------------------------------------------------------------------------------------------------------

    def wait(self, call: Call) -> None:
        """*call* waits, for the first time or again. The caller of this method puts it into a queue."""
        call.state = WAIT[call.state]
        self.by_id[call.id] = call
        owner = call.owner
        if not owner.marked:
            owner.mark()
        owner.waiting += 1
        self.waiting += 1

    def enqueue(self, call: Call, device: DeviceState) -> None:
        """*call* waits for *device* from now on."""
        call.state = ENQUEUE[call.state]
        device.mark()
        call.device = device

    def back(self, call: Call) -> None:
        """*call* waits for any device again."""
        call.state = RETURN[call.state]
        if call.device is not None:
            call.device.mark()
        call.device = call.copy = None

    def adopt(self, call: Call, device: DeviceState, copy: Copy, *, twin: bool) -> None:
        """*call* was found running on *device*."""
        call.state = ADOPT[call.state]
        call.device = device
        call.copy = copy
        if twin:
            self.twins[call.id, device.id] = call
        else:
            self.by_id[call.id] = call
        call.owner.running += 1
        call.owner.mark()
        device.mark()

    def abort(self, call: Call) -> DeviceId:
        """The running *call* has to stop. Return its device."""
        assert call.device is not None
        call.aborted = True
        call.device.mark()
        return call.device.id

    def become(self, call: Call, owner: FunctionState) -> None:
        """The waiting *call* is one of *owner* from now on. The caller of this method moves it from queue to queue."""
        call.owner.waiting -= 1
        call.owner.mark()
        call.owner, call.function = owner, owner.id
        owner.waiting += 1
        owner.mark()

    def leave(self, call: Call) -> None:
        """*call* waits no more. The caller of this method has taken it out of its queue."""
        call.state = LEAVE[call.state]
        del self.by_id[call.id]
        call.owner.mark()
        if call.device is not None:
            call.device.mark()
        call.owner.waiting -= 1
        self.waiting -= 1

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Call]:
        """Yield all calls that wait or run, twins included."""
        yield from self.by_id.values()
        yield from self.twins.values()

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def watch(self, call: Call) -> None:
        """Watch the deadline of a waiting call, if it has one."""
        deadline, deadlines = call.deadline, self._deadlines
        if deadline is None:
            return
        if deadline < self.soonest:
            self.soonest = deadline
        heappush(deadlines, (deadline, call.number, call))
        if len(deadlines) > 2 * self.waiting + 1000:
            alive = {
                entry[2]: entry for entry in deadlines if entry[2].state <= LOCAL and entry[2].deadline == entry[0]
            }
            deadlines[:] = alive.values()
            heapify(deadlines)

    def deadline(self) -> Seconds | None:
        """Return the next deadline of a waiting call."""
        deadlines = self._deadlines
        while deadlines:
            deadline, _, call = deadlines[0]
            if call.state <= LOCAL and call.deadline == deadline:
                return deadline
            heappop(deadlines)
        return None

    def overdue(self, now: Seconds) -> Iterator[Call]:
        """Yield the calls whose deadlines have come, the earliest first. The caller removes each."""
        while (deadline := self.deadline()) is not None and deadline <= now:
            yield heappop(self._deadlines)[2]


def runs_on(copy: Copy, device: DeviceState) -> list[Call]:
    """Return the calls that run on a copy. O(running calls of its device)."""
    return [each for each in device.runs() if each.copy is copy]
