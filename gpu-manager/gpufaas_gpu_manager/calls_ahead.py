"""
Calls ahead: the only slot of a worker has the next call or batch, before what its worker runs has ended.

What went ahead is taken back if that does not end in time. docs/adr/0048-batches-ahead.md and 0055-one-call-ahead.md
say what they are for.
"""

import time
from collections.abc import Callable
from math import inf
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_core.steps import Step
from gpufaas_gpu_manager.call_watch import CallWatch
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import GO_AHEAD
from gpufaas_gpu_manager.taking_back import TakingBack
from gpufaas_gpu_manager.timers import Timers
from gpufaas_gpu_manager.waiting_room import Group, WaitingRoom
from gpufaas_gpu_manager.worker_slot import WorkerSlot

_LOOK_S: Final[Seconds] = 0.05
"""The time between two looks whether what runs before a call that went ahead is late."""


class CallsAhead:
    """See module."""

    def __init__(
        self, timers: Timers, waiting: WaitingRoom, back: TakingBack, watch: CallWatch,
        begin: Callable[[WorkerSlot, Group, Seconds, Step[int]], None],
    ) -> None:  # fmt: skip
        self.slot: WorkerSlot | None = None
        """The only slot of the worker; None: it has several, or takes nothing beside what it runs."""
        self._timers = timers
        self._waiting = waiting
        self._back = back
        self._watch = watch
        self._begin = begin
        self._until: Seconds = 0.0
        """When it is taken back, if what runs before it has not ended."""
        self._look_at: Seconds = inf
        """When a timer looks at that."""

    def wait(self, exchange: Exchange) -> None:
        """*exchange* is in line, begins after what runs, and is taken back if that does not end in time."""
        self._until = until = time.monotonic() + exchange.grant.ahead_s
        self.send()
        if until < self._look_at:  # nearly always there is a timer from calls before
            self._look_later(until)

    def send(self) -> None:
        """Send what is next in line to the worker, which begins it as soon as what it runs has ended."""
        slot, line = self.slot, self._waiting.line
        if slot is None or not slot.turns.has_room or not line:
            return
        first = line[0][0]
        if len(line[0]) > 1 or (first.grant.ahead_s and not self._watch.pings and slot.can_wait(first)):
            self._begin(slot, line.popleft(), time.monotonic(), GO_AHEAD)

    def left(self) -> None:
        """Nobody waits for a call that went ahead: take it back, unless that is one of a batch with others."""
        slot = self.slot
        if slot is not None and all(each.abandoned for each in slot.turns.next.calls):
            self._back.mark(slot, "its caller is gone")

    def _look_later(self, until: Seconds) -> None:
        """Look when *until* is over, together with other workers: each look wakes the process."""
        now = time.monotonic()
        self._look_at = at = (until // _LOOK_S + 1.0) * _LOOK_S
        self._timers.later("ahead", at - now, self._look)

    def _look(self) -> None:
        left_s, sent = self._until - time.monotonic(), self.slot.turns.next.calls if self.slot is not None else []
        first = next(iter(sent or [each for each in self._waiting if each.grant.ahead_s]), None)
        self._look_at = inf
        if first is not None and left_s > 0.0:
            self._look_later(self._until)
        elif first is not None:
            self._back.take_back(first, "the call before it takes longer than expected")
