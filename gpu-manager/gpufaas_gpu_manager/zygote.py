"""
The fork server: a process with torch imported that forks a worker when it is told to.

Run as ``python -P -m gpufaas_gpu_manager.zygote FD``, where FD is one end of a SEQPACKET socket whose other end the
manager holds. It stays single-threaded and never touches CUDA or a tensor, so that a fork of it is a good start of a
worker. (`multiprocessing`'s fork server would re-import the parent's ``__main__``, the CLI, in each child.)

Manager → zygote: `Spawn` and `Exec`, with the worker's sockets and its output's pipes attached; `Prepare`; `Layer`;
`Ping`.
Zygote → manager: first `ZygoteReady`; for each worker `Forked`, later `Exited`; `Pong` to each `Ping`. It is the
workers' parent and reaps them. It also inherits what they leave behind, daemons too (PR_SET_CHILD_SUBREAPER):
`Exited` means that the worker and all that it started are gone, and that the kernel has taken the memory back. The
zygote ends when its socket closes, and no worker outlives it (PR_SET_PDEATHSIG).
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

from gpufaas_core.log_marks import MARK_VARIABLE
from gpufaas_functions import call_lines, chance, exit_hooks, staged, start_env
from gpufaas_functions.answers import in_one_line
from gpufaas_functions.begun import no_counts, shared_in
from gpufaas_functions.imports import import_ahead
from gpufaas_functions.memory import MemoryPoint, make_context, mark_fork_point, stacks, use_small_stacks
from gpufaas_functions.runner import WorkerStart
from gpufaas_functions.thread_state import give_loops
from gpufaas_gpu_manager.confine import (
    NOT_CONFINED,
    Confine,
    bind,
    confine,
    dumpable,
    end_with_parent,
    inherit_orphans,
    name_process,
    set_data_limit,
)
from gpufaas_gpu_manager.huge_pages import collapse_own
from gpufaas_gpu_manager.isolation.entry import enter
from gpufaas_gpu_manager.isolation.root import begin, seen
from gpufaas_gpu_manager.isolation.walls import Walls
from gpufaas_gpu_manager.proc import descendants_of
from gpufaas_gpu_manager.reaper import Reaper, kill_group

PRELOAD: Final = ("numpy", "torch", "safetensors.torch", "gpufaas_functions.author", "gpufaas_functions.runner")
MAX_MESSAGE: Final = 1024 * 1024
COPIED: Final = 8 * 1024 * 1024
"""Memory that a worker takes by writing to pages shared with the zygote: twice the 4 MB of an idle one."""
_MAX_FDS: Final = 253  # SCM_MAX_FD of the kernel


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """
    Fork a worker. Attached: its connection, that for files, its clocks if it is emulated, the file of its counts
    (`begun`), the memory files of `start.weights`, then the write ends of stdout's and stderr's pipe.
    """

    worker: int
    start: WorkerStart
    confine: Confine = NOT_CONFINED
    own_process: bool = False
    """Its environment is read when a process starts (`start_env`): it executes Python anew."""
    waits: bool = False
    """A `Layer` forks it, within its own walls, so the node must move it into its control groups. Attached first: a
    pipe, which has a byte once that is done."""


class Exec(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker that becomes the program `argv`. Attached: the write ends of stdout's and stderr's pipe."""

    worker: int
    argv: list[str]
    env: dict[str, str]
    """All of its environment."""
    cwd: str
    limit: int
    """RLIMIT_DATA in bytes; 0: none."""
    confine: Confine = NOT_CONFINED


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """
    Fork a standby: a blank process that becomes a worker later, once. Attached: a socket over which the `Spawn` of that
    worker comes, with what is attached to it; the standby answers `TAKEN`. It ends when the socket closes before.
    """

    worker: int
    confine: Confine = NOT_CONFINED
    """Of this, `cpus` and `hard` come with the worker."""
    env: dict[str, str] = {}
    """Of the GPU on which it makes its context; empty: on none."""


class Layer(msgspec.Struct, frozen=True, tag=True):
    """
    Fork a fork server of one function, confined as its workers are, which then imports modules and serves the attached
    socket as this one serves its own. Attached, too: the write ends of stdout's and stderr's pipe. To this one it is a
    worker.
    """

    worker: int
    start: WorkerStart
    asked: tuple[str, ...]
    """Modules that have to import."""
    modules: tuple[str, ...]
    """Those that workers have imported."""
    env: dict[str, str]
    """What the author's code has set in workers, beside the environment of `start`."""
    confine: Confine = NOT_CONFINED


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Pong`."""


class KillWithManager(msgspec.Struct, frozen=True, tag=True):
    """
    Kill `pids` when the manager is gone, each with the group that it leads: an earlier fork server, which is stopped
    and would not notice, and its workers. Replaces the pids of an earlier message.
    """

    pids: list[int]


class ZygoteReady(msgspec.Struct, frozen=True, tag=True):
    """The zygote is ready. `missing`: modules that are not there, and why (without torch CPU functions run)."""

    threads: int
    missing: list[str]
    fault: str = ""
    """Of a layer: why it cannot be used."""
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


FromZygote = ZygoteReady | Forked | Exited | Pong
Fork = Spawn | Exec | Prepare | Layer
_NAMES: Final = {"Prepare": "standby", "Layer": "layer"}
ToZygote = Fork | Ping | KillWithManager


class _Held(msgspec.Struct, frozen=True):
    """Of `Confine`, what the fork server must know."""

    walls: Walls = Walls()


class _Asked(msgspec.Struct, frozen=True):
    """Of a `ToZygote`, what the fork server must know. The child reads it all: later ones inherit what is read here."""

    type: str
    worker: int = 0
    confine: _Held = _Held()
    pids: tuple[int, ...] = ()


SCRATCH: Final = "GPUFAAS_SCRATCH"
"""The variable with the path of a worker's scratch directory."""
TAKEN: Final = b"taken"
_decode: Final = msgspec.msgpack.Decoder(_Asked).decode
_decode_fork: Final[Callable[[bytes | memoryview], Fork]] = msgspec.msgpack.Decoder(Fork).decode
_ALONE: Final = "alone"


def main() -> None:
    use_small_stacks()  # of all workers' threads: forks inherit the default
    call_lines.install()  # before what is imported keeps the streams that were there
    give_loops()
    ours = socket.socket(fileno=int(sys.argv[1]))
    if _ALONE in sys.argv:
        _end_with(lambda: _work_alone(ours))
    # Not SIGKILL: when the manager dies, the zygote ends the workers and what they started.
    end_with_parent(signal.SIGTERM)
    inherit_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the platform, which then ends the zygote
    missing = _preload()
    _settle()
    server = _ForkServer(ours)
    server.serve(ZygoteReady(_threads(), missing), collapse_own())


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _preload() -> list[str]:
    missing = []
    for name in PRELOAD:
        try:
            __import__(name)
        except ModuleNotFoundError:
            missing.append(f"{name}: not installed here")
        except ImportError as exc:
            missing.append(f"{name}: {in_one_line(exc)}")
    staged.install()
    return missing


def _settle(keep_hooks: bool = False) -> None:
    """Make what is in memory ready for forks of this process. :param keep_hooks: of their end: they do them, too"""
    if not keep_hooks:
        exit_hooks.forget()
    gc.collect()
    chance.find_generators()
    gc.freeze()  # else a collection in a child would write to, and so copy, every page of the zygote's


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

    def serve(self, ready: ZygoteReady, before_children: Iterable[None] = ()) -> NoReturn:
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

    def say(self, message: FromZygote) -> None:
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
            room = socket.CMSG_LEN(_MAX_FDS * fds.itemsize)
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
            _end_with(lambda: self._become_worker(_decode_fork(message), fds))
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

    def _become_worker(self, spawn: Fork, fds: list[int]) -> int:
        """Return the exit status."""
        self._leave()
        if isinstance(spawn, Prepare):
            return _stand_by(spawn, socket.socket(fileno=fds[0]))
        _print_to(*fds[-2:])
        if isinstance(spawn, Spawn) and spawn.waits and not _may_go_on(fds.pop(0), spawn.start.env.get(SCRATCH, "")):
            return 0
        confine(spawn.confine)
        if not _go_within(spawn.confine):
            return 1
        if isinstance(spawn, Layer):
            _become_layer(spawn, socket.socket(fileno=fds[0]))
        if isinstance(spawn, Exec):
            _become_program(spawn)
        if spawn.own_process:
            _execute_anew(spawn, fds[:-2])
        return _work(spawn, fds[:-2], mark_fork_point())

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


def _end_with(work: Callable[[], int]) -> NoReturn:
    """End this process with the status that *work* returns; 70 if it raises."""
    status = 70
    try:
        status = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        exit_hooks.end_process(status)


def _print_to(stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)


def _make_ready(walls: Walls) -> None:
    """Do what a child that is held by *walls* needs of this process; but for the first time, that is nothing."""
    if walls != Walls():
        seen(walls)
        # Else Landlock keeps workers, which have our uid, from looking into us, and the manager is to do so.
        if walls.root == "mount" or not walls.landlock:
            dumpable(False)


def _go_within(confine: Confine, begun: bool = False) -> bool:
    """Go within the walls, of which some were *begun*; False: that has failed, which is said, and this must end."""
    try:
        if not begun:
            begin(confine.walls)
        for stream in (1, 2) if confine.own.uid else ():  # so that a function can open /dev/stdout by its name
            os.fchown(stream, confine.own.uid, confine.own.uid)
        enter(confine.walls, confine.own)
    except OSError as exc:
        print(f"gpufaas: a worker ends, since it cannot be isolated: {in_one_line(exc)}", file=sys.stderr, flush=True)
        return False
    return True


def _stand_by(prepared: Prepare, door: socket.socket) -> int:
    """Wait for the worker to become. Return the exit status."""
    confine(prepared.confine)
    begin(prepared.confine.walls)
    fork_point = mark_fork_point()
    if prepared.env and prepared.confine.walls.threads_ahead:
        os.environ.update(prepared.env)
        try:
            make_context("cuda:0")
        except Exception as exc:
            print(f"gpufaas: a standby cannot use its GPU: {in_one_line(exc)}", file=sys.stderr, flush=True)
            return 1
    data, fds, _, _ = socket.recv_fds(door, MAX_MESSAGE, _MAX_FDS)
    if not data:
        return 0
    try:
        door.send(TAKEN)
    except BrokenPipeError:
        return 0  # the node has given it up meanwhile, or ends
    door.close()
    spawn = msgspec.msgpack.decode(data, type=Spawn)
    _print_to(*fds[-2:])
    bind(spawn.confine.cpus)
    if not _go_within(spawn.confine, begun=True):
        return 1
    return _work(spawn, fds[:-2], fork_point)


def _may_go_on(door: int, scratch: str) -> bool:
    """Wait until the node has moved this process; False: it is not wanted any more."""
    moved = os.read(door, 1)
    os.close(door)
    if scratch:
        os.makedirs(scratch, 0o700, exist_ok=True)
    return bool(moved)


def _become_layer(layer: Layer, control: socket.socket) -> NoReturn:
    end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chance.seed_afresh()  # what its modules draw when they are imported is its own
    _forget_what_is_in(os.path.join(layer.start.bundle, "site"))
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
    ready = ZygoteReady(threads, [], fault, tuple(sorted(packages)), grown, seconds)
    _ForkServer(control, start.env.get(SCRATCH, "")).serve(ready)


def _become_program(program: Exec) -> NoReturn:
    try:
        os.chdir(program.cwd)
        if program.limit:
            set_data_limit(program.limit, program.confine.hard)
        os.execvpe(program.argv[0], program.argv, program.env)
    except OSError as exc:
        print(f"gpufaas: cannot run {program.argv[0]!r} in {program.cwd}: {exc.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _execute_anew(spawn: Spawn, fds: list[int]) -> NoReturn:
    """
    Become a process that starts with the environment of *spawn* in the function's directory, and goes on in
    `_work_alone`. It stays confined, and all of its private memory counts as its own, that of torch, too.
    """
    ours, door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(ours, [msgspec.msgpack.encode(spawn)], fds)
    for each in fds:
        os.close(each)
    door.set_inheritable(True)
    asked = start_env.with_threads(spawn.start.env, spawn.start.threads)
    for name in ("PYTHONPATH", MARK_VARIABLE):  # `_work` sets them: the platform's modules are the operator's, and the
        asked.pop(name, None)  # children of the worker must not find the mark
    argv = [sys.executable, "-P", "-m", __spec__.name, str(door.fileno()), _ALONE]
    _become_program(Exec(spawn.worker, argv, {**os.environ, **asked}, os.path.join(spawn.start.bundle, "function"), 0))


def _work_alone(door: socket.socket) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _preload()
    data, fds, _, _ = socket.recv_fds(door, MAX_MESSAGE, _MAX_FDS)
    door.close()
    return _work(msgspec.msgpack.decode(data, type=Spawn), fds, mark_fork_point(forked=False))


def _work(spawn: Spawn, fds: list[int], fork_point: MemoryPoint) -> int:
    from gpufaas_functions import runner

    start, hard = spawn.start, spawn.confine.hard
    sockets = len(fds) - len(start.weights)
    staged.attach(start.weights, fds[sockets:])
    ends = fds[:sockets]
    counts, shared = no_counts(start.slots), None
    if start.counts:
        counts, shared = shared_in(ends[-1], start.slots)
        os.close(ends.pop())
    connection, files, *clocks = (socket.socket(fileno=fd) for fd in ends)
    chance.seed_afresh()  # before the author's imports: a seed of theirs counts
    function_dir = os.path.join(start.bundle, "function")
    os.chdir(function_dir)
    start_env.put_in_force(start.env, start.threads, forked=not spawn.own_process)
    call_lines.mark_with(os.environ.pop(MARK_VARIABLE, ""))
    sys.path[:0] = [function_dir, site := os.path.join(start.bundle, "site")]
    if not spawn.waits:  # its layer has done it, and has imported from there since
        _forget_what_is_in(site)
    sys.argv = [f"gpufaas-worker {start.function}"]
    name_process(f"{start.label} {start.function}")
    if start.limit:
        set_data_limit(*(data_limit(fork_point.data, each, start.slots) for each in (start.limit, hard)))
    pid = os.getpid()
    status = runner.run(start, connection, files, counts, clocks, shared)
    if os.getpid() == pid:  # not in a process that the author's code has forked
        exit_hooks.run()
    return status


def _forget_what_is_in(site: str) -> None:
    """Forget the platform's modules that a function brings itself, so that they are imported from *site*."""
    with contextlib.suppress(OSError):
        own = {name.partition(".")[0] for name in os.listdir(site)} - sys.stdlib_module_names
        for name in [each for each in sys.modules if each.partition(".")[0] in own]:
            del sys.modules[name]


def data_limit(base: int, memory: int, slots: int) -> int:
    """
    Return the RLIMIT_DATA in bytes of a worker that may occupy *memory* bytes over its fork point of *base*.

    The kernel counts private writable memory, touched or not. Stacks of the slots' threads are counted whole although
    hardly touched, so they come on top; pages of the zygote that the worker copies are not counted, so they come off.
    """
    return base + max(memory - COPIED, 0) + stacks(slots)


if __name__ == "__main__":
    main()
