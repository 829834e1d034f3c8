"""
A watcher of memory, used where there are no control groups: it ends a worker that holds too much.

A thread looks at every worker and its descendants in /proc, more often the less memory a worker has left. It takes at
most a fiftieth of one CPU, or a third while a worker grows. So it is late by some hundredths of a second, in which a
worker can take more than its reservation. It does not see memory that no process has mapped or open: files left in a
tmpfs, detached System V segments, memory files on their way over a socket. Nor does it see what the kernel keeps for
processes: page tables, and buffers of sockets and pipes.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpufaas_core.units import Bytes, MiB, Seconds
from gpufaas_functions.staged import Identity, Unchanged, unchanged_of
from gpufaas_gpu_manager.proc import children_of, descendants_of, sizes_of

_LONGEST_S: Final[Seconds] = 0.5
_SHORTEST_S: Final[Seconds] = 0.01
_FILL_BYTES_PER_S: Final = 4_000 * MiB
"""How fast memory is taken at most: zeroing pages, on two cores of a server of 2026."""
_SHARE: Final = 50
_SHARE_GROWING: Final = 2
"""A round is followed by a pause of so many times its length at least; the second one while a worker grows."""
_GROWS: Final = 4 * MiB
_COPIED: Final = 8 * MiB
"""Pages of its parent that a process has copied by writing to them, roughly; the cheap figures do not show them."""
_NEAR: Final = 0.7
"""Below this share of its reservation, the cheap figures suffice for a worker."""


@dataclass(slots=True)
class _Watched:
    pid: int
    memory: Bytes
    fork_server: int | None
    over: Callable[[Bytes, Bytes], None]
    base: Bytes
    not_counted: frozenset[Identity]
    used: Bytes = 0


class MemoryWatch:
    """See module."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._strays: set[int] = set()
        self._growing = False
        self.spare: frozenset[int] = frozenset()
        """Processes beside the workers that their fork server has forked."""

    def add(
        self, worker: int, pid: int, memory: Bytes, fork_server: int | None, over: Callable[[Bytes, Bytes], None],
        not_counted: frozenset[Identity] = frozenset(),
    ) -> None:  # fmt: skip
        """
        Watch process *pid* and its descendants; *over* is called once, in the watcher's thread, with used and reserved.

        :param fork_server: the process that it was forked from: memory shared with that does not count
        :param not_counted: see `used_by`
        """
        with self._lock:
            base = _status(fork_server)[0] if fork_server is not None else 0
            self._watched[worker] = _Watched(pid, memory, fork_server, over, base, not_counted)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
                self._thread.start()
        self._wake.set()

    def limit(self, worker: int, memory: Bytes) -> None:
        with self._lock:
            if worker in self._watched:
                self._watched[worker].memory = memory

    def remove(self, worker: int) -> None:
        with self._lock:
            self._watched.pop(worker, None)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            began = time.monotonic()
            pause = self._round()
            share = _SHARE_GROWING if self._growing else _SHARE
            pause = max(pause, share * (time.monotonic() - began))
            with self._lock:
                idle = not self._watched
            self._wake.clear()
            self._wake.wait(None if idle and not self._closed else pause)

    def _round(self) -> Seconds:
        """Look at all workers once; return for how long none can reach its limit."""
        with self._lock:
            watched = dict(self._watched)
        pause = _LONGEST_S
        self._growing = False
        for worker, each in watched.items():
            used = used_by(each.pid, each.base, each.memory, each.not_counted)
            self._growing = self._growing or used > each.used + _GROWS
            each.used = used
            if used > each.memory:
                self.remove(worker)
                each.over(used, each.memory)
            else:
                pause = min(pause, max(_SHORTEST_S, (each.memory - used) / _FILL_BYTES_PER_S))
        self._end_strays(watched)
        return pause

    def _end_strays(self, watched: dict[int, _Watched]) -> None:
        """A process that escaped from its worker is the fork server's child: make that look, and kill it."""
        fork_servers = {each.fork_server for each in watched.values() if each.fork_server is not None}
        workers = {each.pid for each in watched.values()}
        strays = {pid for fork_server in fork_servers for pid in children_of(fork_server)} - workers - self.spare
        if strays & self._strays:  # a worker that was just forked is known in the next round
            for fork_server in fork_servers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(fork_server, signal.SIGCHLD)
        self._strays = strays


def used_by(pid: int, base: Bytes = 0, memory: Bytes = 0, not_counted: frozenset[Identity] = frozenset()) -> Bytes:
    """
    Return the bytes that process *pid* and its descendants hold: private memory, shared memory, open memory files.

    :param base: private memory that *pid* had when it was forked, which it shares with its parent
    :param memory: a cheap estimate suffices where it is clearly less than this; 0: look closely
    :param not_counted: sealed memory files of the platform's: only pages that the processes have changed count
    """
    family = descendants_of(pid)
    cheap = [_status(each) for each in family]
    rough = sum(anonymous + shared + _COPIED for anonymous, shared in cheap) - min(base, cheap[0][0])
    if rough < _NEAR * memory:
        return max(rough, _open_memory(family, not_counted))
    # Pages that were written to and that only it has mapped, and its share of shared memory.
    looks = [_look(each, figures[0], figures[1], not_counted) for each, figures in zip(family, cheap, strict=True)]
    mappers = sum(shm > 0 for _, shm, _, _ in looks)
    private = inherited = mapped = 0
    for anonymous, shm, dirty, share in looks:
        # `dirty` contains shared memory that only this process has mapped: all, unless several of the family share it.
        alone = shm if mappers < 2 else max(0, shm - (shm - share) * mappers // (mappers - 1))
        mine = max(0, dirty - alone)
        private += mine
        mapped += share
        # What children share with the worker is counted once; what all share with the fork server, not at all.
        inherited = max(inherited, anonymous - base - mine)
    return private + (inherited if len(family) > 1 else 0) + max(mapped, _open_memory(family, not_counted))


def _status(pid: int) -> list[Bytes]:
    """Return its private and its shared resident memory."""
    return sizes_of(pid, "status", b"RssAnon", b"RssShmem")


def _look(
    pid: int, anonymous: Bytes, shm: Bytes, not_counted: frozenset[Identity]
) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Return its private, shared and private dirty memory, and its share of the shared one, all that counts."""
    dirty, share = sizes_of(pid, "smaps_rollup", b"Private_Dirty", b"Pss_Shmem")
    theirs = unchanged_of(pid, not_counted) if shm else Unchanged()
    return anonymous, max(0, shm - theirs.resident), max(0, dirty - theirs.private), max(0, share - theirs.share)


def _open_memory(family: list[int], not_counted: frozenset[Identity]) -> Bytes:
    """Return the size of the memory files (memfd, /dev/shm) that *family* has open, mapped or not, each once."""
    sizes: dict[tuple[int, int], Bytes] = {}
    for pid in family:
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{name}").startswith(("/memfd:", "/dev/shm/")):
                        stat = os.stat(f"{folder}/{name}")
                        if (stat.st_dev, stat.st_ino) not in not_counted:
                            sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())
