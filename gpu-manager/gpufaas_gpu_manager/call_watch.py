"""
Looks at a worker while it has calls: whether it gives signs of life, and lets go of calls that nobody waits for.

A worker is silent that owes a sign of life for `_SILENT` looks: the begin of a call, or the answer to a ping. It gets
no new calls then, and what it has not begun is placed again. All calls of an async handler run on one event loop, and
those of threads share the GIL. Nobody can tell from outside whether a call that goes on waits, or blocks all others. So
a worker with several slots is pinged, and its event loop, or the thread that waits for calls, answers. One that runs a
call in its only thread owes nothing meanwhile, unless it is stopped.

To be silent costs little, and ends with the next sign. It costs a load to end a worker: that is for what stays silent,
or runs on, with no caller who waits.

Time is counted in looks, not by the clock: a node that was held up itself, or suspended, has looked only once
meanwhile. Quick calls share a timer: it is set if there is none, and looks once more after the last of them.
"""

import time
from math import ceil
from typing import Final

from gpufaas_core.messages import CopySilent
from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.calls_ports import CallsHost, CallsWorker
from gpufaas_gpu_manager.exchange import CallOwner, Exchange
from gpufaas_gpu_manager.taking_back import TakingBack

LOOK_S: Final[Seconds] = 0.25
LATE: Final = 4
"""Looks: a call may run on for so long beyond its time limit."""
_SILENT: Final = 3
"""Looks: the sign before was given, at the earliest, a look before the first of them."""


class CallWatch:
    """The watch of one worker. See module."""

    def __init__(self, worker: CallsWorker, host: CallsHost, calls: CallOwner, back: TakingBack) -> None:
        self.pings = False
        """The worker answers pings while calls run."""
        self.answered = False
        """The worker has ended a call since the last look."""
        self.silent = False
        self.looks = False
        """A look comes."""
        self._worker = worker
        self._host = host
        self._calls = calls
        self._back = back
        self._grace = ceil(host.settings.abort_grace_s / LOOK_S)
        self._ages: dict[Exchange, int] = {}
        """Looks at abandoned calls, since their callers went."""
        self._asked = False
        """The worker was pinged, and has not answered."""
        self._owed = 0
        """Looks at which it owed a sign of life, in a row."""
        self._patience = _SILENT
        """The looks after which the worker is silent. Doubled each time that it was only slow and has ended no call
        since: else calls could be given to it and taken back for ever."""

    def begin(self) -> None:
        """The worker has a call to run, or one that runs was abandoned."""
        if not self.looks:
            self.looks = True
            self._worker.timers.later("watch", LOOK_S, self._look)

    def say(self, silent: bool) -> None:
        """Tell the scheduler that its worker gives no sign of life, or does again."""
        worker = self._worker
        if not worker.replaced:
            self._host.report(CopySilent(worker.spec.function, worker.device.id, worker.copy, silent))
        if worker.takes_calls:
            self._calls.bind_waiting()

    def _look(self) -> None:
        self.looks = False
        if not self._worker.serves:
            self.silent = False
            return
        bound = list(self._calls.bound())
        self._count(bound)
        self._ages = {each: self._ages.get(each, 0) + 1 for each in bound if each.abandoned}
        if reason := self._why_end(bound):
            self._worker.kill(reason)
        elif bound or self._asked or self.silent:
            self.begin()

    def _count(self, bound: list[Exchange]) -> None:
        """Count what it owes. It is silent, or heard again."""
        worker, back = self._worker, self._back
        if self._asked and not back.pinged:
            self._asked, self._owed = False, 0
        if self.answered:
            self._patience, owes = _SILENT, False
        else:
            owes = self._asked or back.unbegun or (not self.pings and worker.stopped)
        self.answered = False
        self._owed = self._owed + 1 if owes else 0
        late = self._owed >= self._patience or (self._owed >= _SILENT and worker.stopped)
        if self.silent != owes and (self.silent or late):
            self.silent = owes
            if owes:
                self._patience = min(2 * self._patience, self._grace)
            self.say(owes)
        if bound and not self._asked and (self.pings or self.silent):
            self._asked = back.ping()
        if self.silent:
            back.take_all_back("its worker gives no sign of life")

    def _why_end(self, bound: list[Exchange]) -> str:
        """Return why the worker ends; empty: it does not."""
        due = [looks for each, age in self._ages.items() if age >= (looks := self._grace_of(each))]
        if due and min(due) <= self._owed:
            return (
                f"it stood still for {min(due) * LOOK_S:g} s, while a call ran that nobody waits for: its code holds "
                "the GIL, or blocks the event loop of an async handler (asyncio.to_thread runs what does)"
            )
        if len(self._ages) < len(bound):
            return ""
        if due:
            return f"a call that nobody waits for ran on for {max(self._ages.values()) * LOOK_S:g} s"
        return f"it gave no sign of life for {self._owed * LOOK_S:g} s" if self._owed >= self._grace else ""

    def _grace_of(self, exchange: Exchange) -> int:
        """Return for how many looks *exchange*, which was abandoned, may go on."""
        limit_s = exchange.timeout_s
        is_over = limit_s and time.monotonic() - exchange.bound_at >= limit_s
        return min(LATE, self._grace) if is_over else self._grace
