"""
What the heap keeps of a storm of calls goes back to the kernel when the storm is over.

Large pieces of bodies and answers lie in it between small things that live on. They are free when their calls have
ended, but glibc gives back the end of a heap only, unless it is asked for all of it.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any, Final

from gpufaas_core.model import Seconds

QUIET: Final = 0.1
"""The share of a second. A process that uses less processor time has no storm."""
BUSY_S: Final[Seconds] = 0.05
"""Processor time after which there may be something to give back. To look for it takes 0.3 ms, and 0.2 ms per MiB."""
_trim: Final[Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # musl has none, and keeps less


class Heap:
    """See module. A thread calls `look` about once a second: the event loop would stand still meanwhile."""

    def __init__(self, trim: Callable[[int], object] = _trim, clock: Callable[[], Seconds] = time.process_time) -> None:
        """:param clock: the processor time of this process"""
        self._trim = trim
        self._clock = clock
        self._seen = self._trimmed = clock()

    def look(self) -> None:
        now = self._clock()
        quiet, self._seen = now - self._seen < QUIET, now
        if quiet and now - self._trimmed > BUSY_S:
            self._trimmed = now
            self._trim(0)
