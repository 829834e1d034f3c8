"""
Finds the calls that are not quick, and has them watched (`call.Watch`).

A quick call costs no timer. Nor does one whose time limit is far away: a timer for each, and a look at calls more often
than needed, wake the process behind models that have filled the caches, where a wake-up costs a part of a call.
"""

import asyncio
import time
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_gateway.call import Call

WATCH_AFTER_S: Final[Seconds] = 0.1
"""A call that takes longer is watched, after twice this time at the latest."""
SHORT_S: Final[Seconds] = 1.0
"""A call with a shorter time limit is watched from its beginning."""
FAR_S: Final[Seconds] = 2.0
"""A time limit that is further away is not counted yet."""


class Watching:
    """See module. One event loop owns it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._young: set[Call] = set()
        """Calls that began after the last sweep."""
        self._older: set[Call] = set()
        """Calls that began before it. The next sweep watches them."""
        self._far: set[Call] = set()
        """Calls that are watched, but for their time limits."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        """Looks at `_far`."""

    def begin(self, call: Call) -> None:
        self._young.add(call)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(WATCH_AFTER_S, self._sweep)

    def end(self, call: Call) -> None:
        """Watch *call* no more."""
        self._young.discard(call)
        self._older.discard(call)
        self._far.discard(call)
        call.stop_watching()

    def _sweep(self) -> None:
        """Watch the calls that began before the last sweep."""
        older, self._older, self._young = self._older, self._young, set()
        far_at = time.perf_counter() + FAR_S
        for call in older:
            if call.attended:
                continue
            call.attend(timed=call.ends <= far_at)
            if call.ends > far_at:
                self._far.add(call)
        if self._far and self._looking is None:
            self._looking = self._loop.call_later(FAR_S / 2, self._look)
        self._sweeping = self._loop.call_later(WATCH_AFTER_S, self._sweep) if self._older else None

    def _look(self) -> None:
        """Count the time limits that are not far any more."""
        far_at = time.perf_counter() + FAR_S
        for call in [call for call in self._far if call.ends <= far_at]:
            self._far.remove(call)
            call.attend()
        self._looking = self._loop.call_later(FAR_S / 2, self._look) if self._far else None
