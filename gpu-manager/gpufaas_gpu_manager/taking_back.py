"""Calls that a worker was given, and has certainly not begun, are taken back: they are placed again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from gpufaas_functions.begun import GRACE_S
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.timers import Timers
from gpufaas_gpu_manager.waiting_room import Group, WaitingRoom
from gpufaas_gpu_manager.worker_slot import WorkerSlot
from gpufaas_gpu_manager.worker_wire import WorkerWire


@dataclass(eq=False)
class TakingBack:
    """
    See module. The node marks in shared memory what it takes back from a slot. The worker drops what is marked, and
    says so; or the node finds a moment later that the worker has not come to it.
    """

    timers: Timers
    waiting: WaitingRoom
    place_again: Callable[[Group, str, WorkerSlot | None], None]
    """Called with calls that were not begun, why they are placed again, and the slot that had them, if one had."""
    slots: Sequence[WorkerSlot] = ()
    """The slots of the worker; none, if it cannot be told to drop a call."""
    wire: WorkerWire | None = None
    """Their connection."""
    why: str = ""
    """Why calls are taken back."""

    @property
    def unbegun(self) -> bool:
        """Whether the worker has not begun all that it was given to run now."""
        return any(each.turns.unbegun for each in self.slots)

    @property
    def pinged(self) -> bool:
        """Whether the worker owes the answer to a ping."""
        return self.wire is not None and self.wire.pings > 0

    def ping(self) -> bool:
        """Ask the worker for a sign of life. False: it gives none when it is asked."""
        if self.wire is not None:
            self.wire.ping()
        return self.wire is not None

    def take_back(self, exchange: Exchange, reason: str) -> None:
        """Take back a call that waits here or went ahead, and its batch, unless its worker has begun it."""
        if exchange.ahead:
            self.mark(cast(WorkerSlot, exchange.slot), reason)
        elif back := self.waiting.take(exchange):
            self.place_again(back, reason, None)

    def take_all_back(self, reason: str) -> None:
        """Take back all that the worker has not begun."""
        waiting = list(self.waiting.line)
        self.waiting.line.clear()
        for group in waiting:
            self.place_again(group, reason, None)
        for each in self.slots:
            self.mark(each, reason, all_of_it=True)

    def mark(self, slot: WorkerSlot, reason: str, *, all_of_it: bool = False) -> None:
        """Take back what waits at *slot*, unless the worker has begun it. :param all_of_it: see `mark` there"""
        if slot.mark(all_of_it=all_of_it):
            self.why = reason
            self.timers.later("taken", GRACE_S, self._look)

    def dropped(self, slot: WorkerSlot, exchanges: list[Exchange]) -> None:
        """The worker says that it has dropped what was marked."""
        self.place_again(exchanges, self.why, slot)

    def _look(self) -> None:
        for slot in self.slots:
            if back := slot.take_back():
                self.place_again(back, self.why, slot)
