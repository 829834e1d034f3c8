"""
A fork server that does not answer: when it counts as stuck, and what becomes of its workers when another replaces it.

Its workers run on. To kill it would kill them (PR_SET_PDEATHSIG), with their calls and their models. So it is stopped,
its workers are watched one by one, and it is killed when the last of them has ended.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import Final

from gpufaas_gpu_manager.orphans import end_orphans
from gpufaas_gpu_manager.proc import Progress, children_of, descendants_of, stat_of, state_of
from gpufaas_gpu_manager.reaper import kill_group

LOOK_S: Final = 1.0
"""Between two looks at a fork server."""
_STOPPED_LOOKS: Final = 3
_ASLEEP_LOOKS: Final = 10
_STARTS_ASLEEP_LOOKS: Final = 60
"""An import may wait for a disk or a network; a fork server that runs waits only for its socket."""
_SILENT_LOOKS: Final = 60
_ORPHAN_LOOK_S: Final = 0.01
_ORPHAN_LOOKS: Final = 500


class Silence:
    """
    How long a process owes an answer. Counted in looks and not by the clock: a manager that was held up itself, or
    suspended, has looked only once meanwhile.

    A process that is only slow, on a loaded machine, is runnable or waits for a disk; it gets a minute.
    """

    def __init__(self) -> None:
        self.looks = 0
        self._stopped = 0
        self._asleep = 0
        self._seen: Progress = ()

    def broken(self) -> None:
        """The process has answered."""
        self.looks = self._stopped = self._asleep = 0

    def look(self, state: str, progress: Progress, starting: bool) -> str:
        """
        Return why it is stuck; empty: it is not, or not yet.

        :param state: the letter of proc(5): T is stopped, S asleep
        :param starting: it still imports, and has no deadline while it makes progress
        """
        self.looks += 1
        self._stopped = self._stopped + 1 if state in ("T", "t") else 0
        self._asleep = self._asleep + 1 if state == "S" and progress == self._seen else 0
        self._seen = progress
        if self._stopped >= _STOPPED_LOOKS:
            return "it is stopped (SIGSTOP, or a debugger)"
        if self._asleep >= (_STARTS_ASLEEP_LOOKS if starting else _ASLEEP_LOOKS):
            return f"it sleeps and has not answered for {self._asleep * LOOK_S:g} s"
        if self.looks >= _SILENT_LOOKS and not starting:
            return f"it has not answered for {self.looks * LOOK_S:g} s"
        return ""


class Replaced:
    """A stuck fork server whose workers live. The processes `pids` must not outlive the platform."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        workers: Mapping[int, int],
        on_exited: Callable[[int, int], None],
        on_over: Callable[["Replaced"], None],
    ) -> None:
        """:param workers: worker to process id; `on_exited(worker, status)` is called for each of them"""
        self._process = process
        self._on_exited = on_exited
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._workers = dict(workers)
        self._watched: dict[int, int] = {}
        """The pidfd of each worker that is watched, by its process."""
        self._ending: dict[int, asyncio.TimerHandle | None] = {}
        """Workers that have ended, and whose remaining processes are being killed."""
        os.kill(process.pid, signal.SIGSTOP)  # if it recovers, it must not fork what another one forks now
        for pid in set(children_of(process.pid)) - set(workers.values()):
            kill_group(pid)  # it was forked, and not reported
        for worker, pid in workers.items():
            try:
                self._watched[worker] = fd = os.pidfd_open(pid)
            except OSError:  # gone, or a kernel without pidfd: the worker ends with the fork server
                kill_group(pid)
                self._loop.call_soon(self._ended, worker)
            else:
                self._loop.add_reader(fd, self._ended, worker)
        if not workers:
            self._loop.call_soon(self._end)

    @property
    def pids(self) -> list[int]:
        return [*self._workers.values(), self._process.pid]

    def close(self) -> None:
        """End all of them."""
        for worker in list(self._watched):
            self._unwatch(worker)
        for later in self._ending.values():
            if later is not None:
                later.cancel()
        for pid in [*self.pids, *descendants_of(self._process.pid)]:
            kill_group(pid)
        self._process.wait()
        end_orphans(self._process.pid)

    def _ended(self, worker: int) -> None:
        pid = self._workers.pop(worker, None)
        if pid is None:
            return
        self._unwatch(worker)
        status = _exit_status(pid)
        kill_group(pid)  # its group: the process id is not reused before it is reaped
        self._ending[worker] = None
        self._end_orphans(worker, status)

    def _end_orphans(self, worker: int, status: int, left: int = _ORPHAN_LOOKS) -> None:
        """What the worker started is now a child of the fork server, which is stopped: kill it and its descendants."""
        others = set(children_of(self._process.pid)) - set(self._workers.values())
        orphans = [pid for pid in others if state_of(pid) not in ("Z", "")]
        for pid in orphans:
            kill_group(pid)
        if orphans and left:
            self._ending[worker] = self._loop.call_later(_ORPHAN_LOOK_S, self._end_orphans, worker, status, left - 1)
            return
        del self._ending[worker]
        self._on_exited(worker, status)
        if not self._workers and not self._ending:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()  # it is stopped: it dies at once
        end_orphans(self._process.pid)
        self._on_over(self)

    def _unwatch(self, worker: int) -> None:
        fd = self._watched.pop(worker, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            os.close(fd)


def _exit_status(pid: int) -> int:
    """Return the status of a process that ended and is not reaped, as `subprocess` has it; -9 if it is unknown."""
    fields = stat_of(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if len(fields) > 49 else -signal.SIGKILL  # field 52, exit_code
