"""
The fork server: a process with torch imported that forks a worker when it is told to.

Run as ``python -P -m gpufaas_gpu_manager.zygote FD``, where FD is one end of a SEQPACKET socket whose other end the
manager holds. It stays single-threaded and never touches CUDA or a tensor, so that a fork of it is a good start of a
worker. (`multiprocessing`'s fork server would re-import the parent's ``__main__``, the CLI, in each child.)

Manager → fork server: `Spawn` and `Exec`, with the worker's sockets and its output's pipes attached; `Prepare`;
`Layer`; `Ping`.
Fork server → manager: first `ServerReady`; for each worker `Forked`, later `Exited`; `Pong` to each `Ping`. It is the
workers' parent and reaps them. It also inherits what they leave behind, daemons too (PR_SET_CHILD_SUBREAPER):
`Exited` means that the worker and all that it started are gone, and that the kernel has reclaimed the memory. The
fork server ends when its socket closes, and no worker outlives it (PR_SET_PDEATHSIG).
"""

import array
import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NoReturn

import msgspec

from gpufaas_functions import call_lines, chance, exit_hooks, staged, start_env
from gpufaas_functions.imports import import_ahead
from gpufaas_functions.memory import MemoryPoint, use_small_stacks
from gpufaas_functions.thread_state import give_loops
from gpufaas_gpu_manager import forked
from gpufaas_gpu_manager.confine import dumpable, end_with_parent, inherit_orphans, name_process
from gpufaas_gpu_manager.forked import MAX_FDS, MAX_MESSAGE, SCRATCH, Fork, Layer
from gpufaas_gpu_manager.huge_pages import collapse_own
from gpufaas_gpu_manager.isolation.root import seen
from gpufaas_gpu_manager.isolation.walls import Walls
from gpufaas_gpu_manager.proc import descendants_of
from gpufaas_gpu_manager.reaper import Reaper, kill_group


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Pong`."""


class KillWithManager(msgspec.Struct, frozen=True, tag=True):
    """
    Kill `pids` when the manager is gone, each with the group that it leads: an earlier fork server, which is stopped
    and would not notice, and its workers. Replaces the pids of an earlier message.
    """

    pids: list[int]


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """The fork server is ready. `missing`: modules that are not there, and why (without torch CPU functions run)."""

    threads: int
    missing: list[str]
    fault: str = ""
    """Says why a layer cannot be used."""
    packages: tuple[str, ...] = ()
    """Of a layer: what importing its modules has brought, by the first part of the names."""
    memory: int = 0
    """Of a layer: what it holds by that, in bytes."""
    seconds: float = 0.0
    """The seconds that a layer took to import its modules."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    worker: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The worker and its descendants were reaped. `status`: exit status, or minus the signal that killed it."""

    worker: int
    status: int
    fault: str = ""
    """Why it could not be forked at all: no memory, no processes left."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ping`."""


FromForkServer = ServerReady | Forked | Exited | Pong
_NAMES: Final = {"Prepare": "standby", "Layer": "layer"}
ToForkServer = Fork | Ping | KillWithManager


class _Held(msgspec.Struct, frozen=True):
    """Of `Confine`, what the fork server must know."""

    walls: Walls = Walls()


class _Asked(msgspec.Struct, frozen=True):
    """Of a `ToForkServer`, what the server must know. The child reads it all: later ones inherit what is read here."""

    type: str
    worker: int = 0
    confine: _Held = _Held()
    pids: tuple[int, ...] = ()


_decode: Final = msgspec.msgpack.Decoder(_Asked).decode
_decode_fork: Final[Callable[[bytes | memoryview], Fork]] = msgspec.msgpack.Decoder(Fork).decode


def main() -> None:
    use_small_stacks()  # of all workers' threads: forks inherit the default
    call_lines.install()  # before what is imported keeps the streams that were there
    give_loops()
    ours = socket.socket(fileno=int(sys.argv[1]))
    if forked.ALONE in sys.argv:
        forked.end_with(lambda: forked.work_alone(ours))
    # Not SIGKILL: when the manager dies, the fork server ends the workers and what they started.
    end_with_parent(signal.SIGTERM)
    inherit_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the platform, which then ends the fork server
    missing = forked.preload()
    _settle()
    server = _ForkServer(ours)
    server.serve(ServerReady(_threads(), missing), collapse_own())


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _settle(keep_hooks: bool = False) -> None:
    """Make what is in memory ready for forks of this process. :param keep_hooks: of their end: they do them, too"""
    if not keep_hooks:
        exit_hooks.forget()
    gc.collect()
    chance.find_generators()
    gc.freeze()  # else a collection in a child would write to, and so copy, every page of the fork server's


class _ForkServer:
    """Carries out what the manager asks for on the socket *control*, and reaps the workers. See module."""

    def __init__(self, control: socket.socket, scratch: str = "") -> None:
        """:param scratch: a directory in which each worker has its own, by its number; empty: it has none there"""
        self._control = control
        self._scratch = scratch
        self._message = bytearray(MAX_MESSAGE)
        """The last one, while it is looked at."""
        with open("/proc/self/comm") as comm:
            self._name = comm.read().strip()
        self._reaper = Reaper()
        self._guarded: tuple[int, ...] = ()
        self._before_children: Iterator[None] = iter(())
        self._held: list[tuple[_Asked, list[int], bytes]] = []
        """Asked for, and forked when `_before_children` is at its end."""
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # The closed socket says that the manager has died. This lets a stopped server go on, so that it looks.
        end_with_parent(signal.SIGCONT)

    def serve(self, ready: ServerReady, before_children: Iterable[None] = ()) -> NoReturn:
        """
        Say *ready*, and serve the manager until it is gone; then kill the workers and exit.

        :param before_children: work in small steps, for when nothing is asked; a standby waits for its end, and the
            fork of anything else ends it
        """
        self.say(ready)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self._before_children = iter(before_children)
        while True:
            events = poll.poll(0)
            if not events and self._step():
                continue
            for fd, event in events or poll.poll():
                if fd == self._wake_read:
                    self._reap()
                elif event & select.POLLHUP:
                    self._end()  # unread messages are dropped: another fork server may have them by now
                else:
                    self._receive()

    def _step(self) -> bool:
        """Do a piece of what comes before all children; then fork those that waited. Return whether to go on."""
        for _ in self._before_children:
            return True
        while self._held:
            self._fork(*self._held.pop(0))
        return False

    def say(self, message: FromForkServer) -> None:
        """Tell the manager; when it is gone, kill the workers and exit."""
        try:
            self._control.send(msgspec.msgpack.encode(message))
        except OSError:
            self._end()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        for worker, status in self._reaper.reap():
            if self._scratch:
                shutil.rmtree(os.path.join(self._scratch, str(worker)), ignore_errors=True)
            self.say(Exited(worker, status))

    def _receive(self) -> None:
        size, fds = 0, array.array("i")
        with contextlib.suppress(ConnectionError):
            room = socket.CMSG_LEN(MAX_FDS * fds.itemsize)
            size, attached, _, _ = self._control.recvmsg_into([self._message], room)
            for *_, data in attached:
                fds.frombytes(data)
        if not size:
            self._end()
        message = memoryview(self._message)[:size]
        asked = _decode(message)
        match asked.type:
            case "Ping":
                self.say(Pong())
            case "KillWithManager":
                self._guarded = asked.pids
            case "Prepare":
                self._held.append((asked, list(fds), bytes(message)))  # until there is nothing else to do
            case _:
                self._before_children = iter(())
                self._fork(asked, list(fds), message)
        message[:] = bytes(size)

    def _fork(self, spawn: _Asked, fds: list[int], message: bytes | memoryview) -> None:
        """:param message: what is asked for, as it came"""
        born = _NAMES.get(spawn.type)
        if born is not None:  # before the fork: else it would be taken for a worker until it has named itself
            name_process(born)
        _make_ready(spawn.confine.walls)
        try:
            pid = os.fork()
        except OSError as exc:
            self.say(Exited(spawn.worker, -9, str(exc)))
            pid = -1
        if pid == 0:
            forked.end_with(lambda: self._become(_decode_fork(message), fds))
        if born is not None:
            name_process(self._name)
        for each in fds:
            os.close(each)
        if pid > 0:
            self._reaper.workers[pid] = spawn.worker
            self.say(Forked(spawn.worker, pid))

    def _end(self) -> NoReturn:
        # The manager may have been killed just after it sent `KillWithManager`.
        with contextlib.suppress(OSError):
            while data := self._control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT):
                if (asked := _decode(data)).type == "KillWithManager":
                    self._guarded = asked.pids
        for pid in [each for guarded in self._guarded for each in descendants_of(guarded)]:
            kill_group(pid)
        self._reaper.end()

    def _become(self, spawn: Fork, fds: list[int]) -> int:
        """Return the exit status."""
        self._leave()
        if not isinstance(spawn, Layer):
            return forked.become(spawn, fds)
        if forked.go_within(spawn, fds):
            _become_layer(spawn, socket.socket(fileno=fds[0]))
        return 1

    def _leave(self) -> None:
        """Cut what ties a child to this server, and begin a session of its own."""
        end_with_parent(signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._control.close()
        for fd in (self._wake_read, self._wake_write, *(each for _, fds, _ in self._held for each in fds)):
            os.close(fd)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def _make_ready(walls: Walls) -> None:
    """Do what a child that is held by *walls* needs of this process; but for the first time, that is nothing."""
    if walls != Walls():
        seen(walls)
        # Else Landlock keeps workers, which have our uid, from looking into us, and the manager is to do so.
        if walls.root == "mount" or not walls.landlock:
            dumpable(False)


def _become_layer(layer: Layer, control: socket.socket) -> NoReturn:
    end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chance.seed_afresh()  # what its modules draw when they are imported is its own
    forked.forget_what_is_in(os.path.join(layer.start.bundle, "site"))
    before, memory, began = set(sys.modules), MemoryPoint.read().anonymous, time.perf_counter()
    start = layer.start
    # More threads than one would be started when a library of them is loaded; workers set their number.
    env = {**start.env, **layer.env, **start_env.with_threads({}, 1)}
    fault = import_ahead(start.bundle, env, layer.asked, layer.modules)
    seconds = time.perf_counter() - began
    staged.install()
    threads = _threads()
    if threads > 1:
        fault = fault or "importing them starts threads, and a process with threads cannot be forked"
    elif "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        fault = fault or "importing them uses the GPU, and a process that uses it cannot be forked"
    packages = {name.partition(".")[0] for name in sys.modules.keys() - before}
    grown = max(0, MemoryPoint.read().anonymous - memory)
    _settle(keep_hooks=True)
    ready = ServerReady(threads, [], fault, tuple(sorted(packages)), grown, seconds)
    _ForkServer(control, start.env.get(SCRATCH, "")).serve(ready)


if __name__ == "__main__":
    main()
