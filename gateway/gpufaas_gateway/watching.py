"""Finds the calls that are not quick, and has them watched (`call.Watch`). A quick call costs no timer."""

import asyncio
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_gateway.call import Call

WATCH_AFTER_S: Final[Seconds] = 0.1
"""A call that takes longer is watched, after twice this time at the latest."""
SHORT_S: Final[Seconds] = 1.0
"""A call with a shorter time limit is watched from its beginning."""


class Watching:
    """See module. One event loop owns it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._young: set[Call] = set()
        """Calls that began after the last sweep."""
        self._older: set[Call] = set()
        """Calls that began before it. The next sweep watches them."""
        self._sweeping: asyncio.TimerHandle | None = None

    def begin(self, call: Call) -> None:
        self._young.add(call)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(WATCH_AFTER_S, self._sweep)

    def end(self, call: Call) -> None:
        """Watch *call* no more."""
        self._young.discard(call)
        self._older.discard(call)
        call.stop_watching()

    def _sweep(self) -> None:
        """Watch the calls that began before the last sweep."""
        older, self._older, self._young = self._older, self._young, set()
        for call in older:
            if call.watch is None or not call.watch.attends:
                call.watched().attend()
        self._sweeping = self._loop.call_later(WATCH_AFTER_S, self._sweep) if self._older else None
