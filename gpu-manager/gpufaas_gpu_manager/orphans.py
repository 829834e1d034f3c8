"""Processes that a dead fork server leaves behind: its workers started them, and they left the workers' groups."""

import contextlib
import os
import signal
import time
from typing import Final

from gpufaas_core.units import Seconds
from gpufaas_gpu_manager.proc import children_of

_WAIT_S: Final[Seconds] = 1.0
"""For processes that were sent SIGKILL; one that waits for a dead disk or device ends when it can."""
_fork_servers: Final[set[int]] = set()


def is_fork_server(pid: int) -> None:
    """Child *pid* of this process is no orphan until `end_orphans` is called with it."""
    _fork_servers.add(pid)


def end_orphans(fork_server: int) -> None:
    """
    Kill and reap what this process, a subreaper, inherited from *fork_server*, which is reaped. Blocks for some ms.

    Workers begin sessions of their own, and no process can join another session: so a child in our session was started
    by this process itself.
    """
    _fork_servers.discard(fork_server)
    ours, until = os.getsid(0), time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        orphans = [pid for pid in children_of(os.getpid()) if pid not in _fork_servers and _session(pid) != ours]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0  # it is about to be reaped
