"""
Reaping in the fork server: when a worker has ended, what it left behind is killed before its end is reported.

A worker inherits the orphans of its children, and the fork server those of workers (confine.inherit_orphans). So a
child of the fork server that is no worker was left by a worker that is dead or dies, or tries to escape from a living
one.
"""

import contextlib
import os
import signal
import time
from typing import Final, NoReturn

from gpufaas_core.units import Seconds
from gpufaas_gpu_manager.proc import children_of

_STUCK_S: Final[Seconds] = 5.0
"""An orphan that lives so long after SIGKILL waits for a dead disk or device: ends of workers do not wait for it."""


class _Ended:
    """A worker that was reaped, and orphans that may be its own."""

    def __init__(self, worker: int, status: int) -> None:
        self.worker = worker
        self.status = status
        self.orphans: set[int] | None = None


class Reaper:
    """See module. Add each forked worker to `workers`, by its process id."""

    def __init__(self) -> None:
        self.workers: dict[int, int] = {}
        self._ended: list[_Ended] = []
        self._orphans: dict[int, Seconds] = {}
        """When each was seen first, by process id."""

    def reap(self) -> list[tuple[int, int]]:
        """
        Reap what has ended, and kill orphans. Call it upon SIGCHLD; the end of an orphan brings one, too.

        :return: workers of which no process is left, and the exit status of each, or minus the signal
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            worker = self.workers.pop(pid, None)
            if worker is not None:
                kill_group(pid)
                self._ended.append(_Ended(worker, os.waitstatus_to_exitcode(status)))
        now = time.monotonic()
        orphans = set(children_of(os.getpid())) - self.workers.keys()
        fresh = orphans - self._orphans.keys()
        self._orphans = {pid: self._orphans.get(pid, now) for pid in orphans}
        for pid in orphans:
            kill_group(pid)
        for each in self._ended:
            if each.orphans is None:
                # Its orphans may have come before it was reaped: its threads end one by one.
                each.orphans = {pid for pid, since in self._orphans.items() if now - since < _STUCK_S}
            else:
                each.orphans = (each.orphans & orphans) | fresh
        gone = [(each.worker, each.status) for each in self._ended if not each.orphans]
        self._ended = [each for each in self._ended if each.orphans]
        return gone

    def end(self) -> NoReturn:
        """Kill all workers, and what becomes a child of this process by that, until none is left; then exit."""
        while True:
            for pid in {*self.workers, *children_of(os.getpid())}:
                kill_group(pid)
            try:
                pid, _ = os.waitpid(-1, 0)
            except ChildProcessError:
                os._exit(0)
            self.workers.pop(pid, None)


def kill_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send signal *number* to the process *pid*, and to the group that it leads after its setsid."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, number)
