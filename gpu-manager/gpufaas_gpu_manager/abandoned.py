"""
Ends a worker that does not let go of calls that nobody waits for, or that stands still meanwhile.

It looks only while an abandoned call runs. Time is counted in looks, not by the clock: a node that was held up itself,
or suspended, has looked only once meanwhile.

All calls of an async handler run on one event loop, and those of threads share the GIL. Nobody can tell from outside
whether a call that goes on waits, or blocks all others. So a worker with several slots owes an answer to a ping, which
its event loop, or the thread that waits for calls, gives.
"""

from collections.abc import Callable, Iterable
from typing import Final, cast

from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.exchange import Exchange, PingSlot
from gpufaas_gpu_manager.timers import Timers

LOOKS: Final = 10
"""Within the grace of an abandoned call."""


class AbandonedCalls:
    """
    Of one worker.

    :param bound: returns the calls that slots of the worker have
    :param kill: ends the worker, for a reason
    """

    def __init__(
        self,
        timers: Timers,
        grace_s: Seconds,
        bound: Callable[[], Iterable[Exchange]],
        kill: Callable[[str], None],
    ) -> None:
        self.pings = False
        """The worker answers pings while calls run."""
        self._timers = timers
        self._grace_s = grace_s
        self._bound = bound
        self._kill = kill
        self._looks: dict[Exchange, int] = {}
        """At abandoned calls, since their callers went."""
        self._owed = 0
        """Looks since the ping that the loop has not answered; 0: it has answered all."""

    def watch(self) -> None:
        """A call that runs was abandoned."""
        if not self._looks:
            self._go_on(list(self._bound()))

    def on_pong(self) -> None:
        """The worker has answered: it lives."""
        self._owed = 0

    def _look(self) -> None:
        bound = list(self._bound())
        grace = f"{self._grace_s:g} s"
        if self._owed >= LOOKS:
            self._looks.clear()
            self._kill(
                f"it stood still for {grace}, while a call ran that nobody waits for: its code holds the GIL, or "
                "blocks the event loop of an async handler (asyncio.to_thread runs what does)"
            )
        elif all(each.abandoned for each in bound) and any(self._looks.get(each, 0) >= LOOKS for each in bound):
            self._looks.clear()
            self._kill(f"a call that nobody waits for ran on for {grace}")
        else:
            self._go_on(bound)

    def _go_on(self, bound: list[Exchange]) -> None:
        """Look again, if an abandoned call runs."""
        self._looks = {each: self._looks.get(each, 0) + 1 for each in bound if each.abandoned}
        if not self._looks:
            self._owed = 0
            return
        if self._owed:
            self._owed += 1
        elif self.pings:
            self._owed = 1
            cast(PingSlot, next(iter(self._looks)).slot).ping()
        self._timers.later("abandoned", self._grace_s / LOOKS, self._look)
