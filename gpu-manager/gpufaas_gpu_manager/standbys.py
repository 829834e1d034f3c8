"""
Standbys: blank processes that wait to become workers, so that a start does not wait until one is forked and confined.

A standby is forked from the fork server with torch imported, and has joined its control group, which takes some 12 ms
on version 1. A worker takes one, once: it gets its start and its sockets over the standby's own socket, and is limited
as one that was forked for it. Until then a standby belongs to no function, and no author's code has run in it.

A pool has `size` of them for each home. It is filled one by one and not beside loads on a small machine; one that is
about to be needed, since its worker waits for memory, is forked at once. One that ends by itself is replaced after a
pause that doubles.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.cgroup_group import Group
from gpufaas_gpu_manager.confine import CAP_SYS_ADMIN, Confine, may
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.forked import TAKEN, Prepare, Spawn
from gpufaas_gpu_manager.forks import ForkServer
from gpufaas_gpu_manager.isolation.walls import Walls
from gpufaas_gpu_manager.proc import private_of
from gpufaas_gpu_manager.timers import Timers


class Home(NamedTuple):
    """
    What is settled about the worker when a standby is forked. `device` and `cores`: the device whose cores it will
    share, and their number, for its control group. `env`: of the GPU on which it has its context.
    """

    device: str = ""
    cores: float = 0.0
    env: tuple[tuple[str, str], ...] = ()


ANYWHERE: Final = Home()

_PAUSE_S: Final[Seconds] = 0.05
"""Between a start and the fork of the standby that replaces its own, and between two forks."""
_LOADS_S: Final[Seconds] = 1.0
"""On a small machine a pool waits so long for a moment in which nothing loads."""
_SMALL: Final = 4
"""CPUs of a small machine."""
_FAILED_S: Final[Seconds] = 1.0
_FAILED_MOST_S: Final[Seconds] = 60.0
_TAKEN_S: Final[Seconds] = 1.0
"""One that does not answer within this is stopped, or stuck: its worker is forked."""
_CONTEXT_S: Final[Seconds] = 10.0
"""As `_TAKEN_S`, of one that may still make its context."""


_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(eq=False)
class Standby:
    """One of them."""

    number: int
    home: Home
    group: Group | None
    """Its control group, if there is one."""
    door: socket.socket
    pid: asyncio.Future[int]
    """Set when it is forked; cancelled when it has ended."""
    taken: bool = False
    """A worker has it."""

    @property
    def ready(self) -> bool:
        return self.pid.done() and not self.pid.cancelled()

    async def accepts(self, spawn: Spawn, fds: Sequence[int]) -> bool:
        """Whether it has become the worker of *spawn*, with *fds*."""
        try:
            socket.send_fds(self.door, [_encode(spawn)], list(fds))
            async with asyncio.timeout(_CONTEXT_S if self.home.env else _TAKEN_S):
                return await asyncio.get_running_loop().sock_recv(self.door, len(TAKEN)) == TAKEN
        except TimeoutError:
            with contextlib.suppress(OSError):
                os.kill(self.pid.result(), signal.SIGKILL)
            with contextlib.suppress(OSError):  # it may have answered just now: then this is the end of the worker
                return self.door.recv(len(TAKEN)) == TAKEN
        except OSError:
            pass
        return False


class Standbys:
    """See module. `begin` fills the pool."""

    def __init__(
        self, forks: ForkServer, groups: Enforcement, size: int, next_number: Callable[[], int],
        loads: Callable[[], bool], walls: Walls,
    ) -> None:  # fmt: skip
        """
        :param size: of each home; 0: there are no standbys
        :param next_number: returns a number that no worker has
        :param loads: returns whether a worker loads now
        :param walls: what is in force on this node
        """
        self.size = size
        self.taken = 0
        """The number of workers that were standbys."""
        self.missed = 0
        """The number of workers that were forked, since no standby was there."""
        self._forks = forks
        self._groups = groups
        self._next_number = next_number
        self._loads = loads
        self._homes: list[Home] = []
        self._pool: dict[int, Standby] = {}
        self._awaited: dict[int, Home] = {}
        """The homes of workers that wait for memory, by worker."""
        self._closed = False
        self._failures = 0
        self._waited_s = 0.0
        self._timers = Timers()
        self._tasks: set[asyncio.Task[None]] = set()
        self._own_shm = may(CAP_SYS_ADMIN)
        self._walls = walls
        self._small = len(os.sched_getaffinity(0)) <= _SMALL

    # --- the pool ---

    def begin(self, homes: Sequence[Home]) -> None:
        """Have `size` of them for each of *homes* from now on."""
        self._homes = list(dict.fromkeys(homes)) if self.size else []
        self._later(0.0)

    def use(self, home: Home) -> None:
        """Have `size` of them for *home*, too."""
        if self.size and not self._closed and home not in self._homes:
            self._homes.append(home)
            self._later(0.0)

    def await_one(self, worker: int, home: Home) -> None:
        """*worker* waits for memory: have a process for it when that is there."""
        if home in self._homes:
            self._awaited[worker] = home
            if self._lacks(home, 0) and not self._failures:
                self._add(home)

    def on_exited(self, number: int) -> None:
        """A standby has ended, or could not be forked; not through us, who take one out of the pool before."""
        standby = self._pool.pop(number, None)
        if standby is not None:
            self._discard(standby)
            self._failed()

    @property
    def pids(self) -> list[int]:
        """Return the processes that no worker has taken."""
        return [each.pid.result() for each in self._pool.values() if each.ready and not each.taken]

    def _tell(self) -> None:
        self._groups.stand_by(self, [each.pid.result() for each in self._pool.values() if each.ready])

    def status(self) -> dict[str, int]:
        """
        Return it for people, by name: how many there are, the memory that would be free without them, how many starts
        had one and how many not. Takes milliseconds.
        """
        memory = sum(map(private_of, self.pids))
        return {"ready": len(self.pids), "memory": memory, "taken": self.taken, "missed": self.missed}

    def close(self) -> None:
        self._closed = True
        self._homes = []
        self._timers.close()
        for task in self._tasks:
            task.cancel()
        for each in self._pool.values():
            self._discard(each)
        self._pool.clear()

    def _later(self, delay: Seconds) -> None:
        if self._homes:
            self._timers.later("fill", delay, self._fill)

    def _fill(self) -> None:
        lacking = next((each for each in self._homes if self._lacks(each, self.size)), None)
        if lacking is None:
            return
        if self._small and self._loads() and self._waited_s < _LOADS_S:
            self._waited_s += _PAUSE_S
        elif all(each.pid.done() for each in self._pool.values()):  # one at a time
            self._waited_s = 0.0
            self._add(lacking)
        self._later(_PAUSE_S)

    def _lacks(self, home: Home, spare: int) -> bool:
        there = sum(each.home == home and not each.taken for each in self._pool.values())
        return there < spare + sum(each == home for each in self._awaited.values())

    def _add(self, home: Home) -> None:
        number, group = self._next_number(), None
        try:
            group = self._groups.group(f"standby-{number}", home.device, home.cores)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # no groups, or open files, are left: workers need them more
            self._groups.remove(group)
            self._failed()
            return
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        standby = self._pool[number] = Standby(number, home, group, ours, loop.create_future())
        task = loop.create_task(self._fork(standby, theirs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fork(self, standby: Standby, theirs: socket.socket) -> None:
        entries = standby.group.entries if standby.group is not None else ()
        prepare = Prepare(standby.number, Confine(entries, self._own_shm, walls=self._walls), dict(standby.home.env))
        with theirs:
            pid = await self._forks.fork(prepare, [theirs.fileno()])
        if pid is not None and not standby.pid.done():
            standby.pid.set_result(pid)
            self._tell()

    def _failed(self) -> None:
        self._failures = min(self._failures + 1, 16)
        self._later(min(_FAILED_MOST_S, _FAILED_S * 2 ** (self._failures - 1)))

    def _discard(self, standby: Standby) -> None:
        standby.pid.cancel()
        standby.door.close()  # by which it ends
        self._tell()
        self._groups.remove(standby.group)

    # --- a start ---

    async def take(self, worker: int, home: Home) -> Standby | None:
        """Return a standby for *worker* alone, which `become` or `end` gets next; None: it must be forked."""
        self.forget(worker)
        if home not in self._homes:
            return None
        free = [each for each in self._pool.values() if each.home == home and not each.taken]
        found = next((each for each in free if each.ready), None) or next(iter(free), None)
        self._later(_PAUSE_S)
        if found is not None:
            found.taken = True
            await asyncio.wait([found.pid])  # it was asked for before, if it is not there yet
        if found is None or not found.ready:
            self.missed += 1
            return None
        return found

    def forget(self, worker: int) -> None:
        """*worker* does not wait for a standby any more."""
        self._awaited.pop(worker, None)

    async def become(self, standby: Standby, spawn: Spawn, fds: Sequence[int]) -> bool:
        """
        Have *standby* become the worker of *spawn*, with *fds*: it has the standby's control group from now on. False:
        it did not; then it has ended, or is about to, and its group with it.
        """
        if await standby.accepts(spawn, fds) and self._forks.adopt(standby.number, spawn.worker):
            del self._pool[standby.number]
            self._tell()
            standby.door.close()
            self.taken += 1
            self._failures = 0
            return True
        self.missed += 1
        self.end(standby)
        return False

    def end(self, standby: Standby) -> None:
        if self._pool.pop(standby.number, None) is not None:
            self._discard(standby)
