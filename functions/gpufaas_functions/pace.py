"""
Whether the handler of a worker answers so quickly that the thread which waits for calls may run it itself. Pure.

The calls before tell: after some quick ones in a row the handler counts as quick, after a slow one as slow. A handler
that is slow again and again has to be quick for longer each time.
"""

from typing import Final

from gpufaas_core.model import Seconds

QUICK_S: Final[Seconds] = 0.001
"""A call that takes longer is slow."""
FIRST: Final = 4
"""The quick calls in a row that are enough for a new worker."""
AGAIN: Final = 32
"""As `FIRST`, after a slow call."""
_MOST: Final = 4096
_RELAPSE: Final = 8
"""A slow call within this many times the calls that it took to be quick doubles their number."""


class Pace:
    """See module. Several threads may tell of their calls at once: what is lost then is a count or two."""

    def __init__(self) -> None:
        self.quick = False
        self._needed = FIRST
        self._row = 0
        """Quick calls since the last slow one."""

    def took(self, seconds: Seconds) -> None:
        """A call has ended."""
        if seconds <= QUICK_S:
            self._row += 1
            self.quick = self._row >= self._needed
            return
        relapse = self._needed <= self._row < self._needed * _RELAPSE
        self._needed = min(_MOST, self._needed * 2) if relapse and self._needed >= AGAIN else AGAIN
        self._row = 0
        self.quick = False
