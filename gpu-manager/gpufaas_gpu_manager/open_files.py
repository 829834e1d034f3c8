"""The open files of this process that workers take: no more than their share, so that calls still get connections."""

import errno
import os
import time
from collections.abc import Callable
from typing import Final

from gpufaas_core.descriptors import limit, workers_share
from gpufaas_core.model import Seconds

_BESIDE: Final = 4
"""Open files of each worker, beside its connections: two of its output, one of its memory limit, one of its port."""
_SAY_EVERY_S: Final[Seconds] = 10.0


class OpenFiles:
    """:param on_said: gets a line for people"""

    def __init__(self, on_said: Callable[[str], None]) -> None:
        self._on_said = on_said
        self._said_at = -_SAY_EVERY_S
        self._taken: dict[int, int] = {}

    def take(self, worker: int, connections: int) -> None:
        """
        Give *worker* the files that it needs for calls over so many *connections*.

        :raises OSError: the other workers have too much of the share
        """
        wanted = connections + _BESIDE
        if sum(self._taken.values()) + wanted > workers_share():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._taken[worker] = wanted

    def give_back(self, worker: int) -> None:
        self._taken.pop(worker, None)

    def say_lack(self) -> str:
        """Return why no worker can be started, for its callers; log it, at most every `_SAY_EVERY_S`."""
        reason = (
            f"this node may have {limit()} files open, too few for one more worker: raise its limit of open files "
            "(ulimit -Hn, LimitNOFILE= of systemd), or remove functions"
        )
        now = time.monotonic()
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            self._on_said(f"descriptors.exhausted: {reason}")
        return reason
