"""
What a fork of a fork server becomes: a worker, a standby, a program, or a layer. All of it runs in the child.
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from gpufaas_core.log_marks import MARK_VARIABLE
from gpufaas_functions import call_lines, chance, exit_hooks, staged, start_env
from gpufaas_functions.answers import in_one_line
from gpufaas_functions.begun import no_counts, shared_in
from gpufaas_functions.memory import MemoryPoint, make_context, mark_fork_point, stacks
from gpufaas_functions.runner import WorkerStart
from gpufaas_gpu_manager.confine import NOT_CONFINED, Confine, bind, confine, name_process, set_data_limit
from gpufaas_gpu_manager.isolation.entry import enter
from gpufaas_gpu_manager.isolation.root import begin

PRELOAD: Final = ("numpy", "torch", "safetensors.torch", "gpufaas_functions.author", "gpufaas_functions.runner")
MAX_MESSAGE: Final = 1024 * 1024
COPIED: Final = 8 * 1024 * 1024
"""Memory that a worker takes by writing to pages shared with the fork server: twice the 4 MB of an idle one."""
MAX_FDS: Final = 253  # SCM_MAX_FD of the kernel
SCRATCH: Final = "GPUFAAS_SCRATCH"
"""The variable with the path of a worker's scratch directory."""
TAKEN: Final = b"taken"
ALONE: Final = "alone"
"""The argument of a fork server's program that is no fork server, but one worker."""


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
    """The variables that choose the GPU on which it makes its context; empty: it makes none."""


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


Fork = Spawn | Exec | Prepare | Layer


def preload() -> list[str]:
    """Import what workers need. Return what is not there, and why."""
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


def become(spawn: Spawn | Exec | Prepare, fds: list[int]) -> int:
    """Return the exit status."""
    if isinstance(spawn, Prepare):
        return _stand_by(spawn, socket.socket(fileno=fds[0]))
    if not go_within(spawn, fds):
        return 1
    if isinstance(spawn, Exec):
        _become_program(spawn)
    if spawn.own_process:
        _execute_anew(spawn, fds[:-2])
    return _work(spawn, fds[:-2], mark_fork_point())


def go_within(spawn: Spawn | Exec | Layer, fds: list[int]) -> bool:
    """Print to the pipes among *fds*, and be confined. False: this process must end."""
    _print_to(*fds[-2:])
    if isinstance(spawn, Spawn) and spawn.waits and not _may_go_on(fds.pop(0), spawn.start.env.get(SCRATCH, "")):
        return False
    confine(spawn.confine)
    return _enter(spawn.confine)


def end_with(work: Callable[[], int]) -> NoReturn:
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


def _enter(confine: Confine, begun: bool = False) -> bool:
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
    data, fds, _, _ = socket.recv_fds(door, MAX_MESSAGE, MAX_FDS)
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
    if not _enter(spawn.confine, begun=True):
        return 1
    return _work(spawn, fds[:-2], fork_point)


def _may_go_on(door: int, scratch: str) -> bool:
    """Wait until the node has moved this process; False: it is not wanted any more."""
    moved = os.read(door, 1)
    os.close(door)
    if scratch:
        os.makedirs(scratch, 0o700, exist_ok=True)
    return bool(moved)


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
    `work_alone`. It stays confined, and all of its private memory counts as its own, that of torch, too.
    """
    ours, door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(ours, [msgspec.msgpack.encode(spawn)], fds)
    for each in fds:
        os.close(each)
    door.set_inheritable(True)
    asked = start_env.with_threads(spawn.start.env, spawn.start.threads)
    for name in ("PYTHONPATH", MARK_VARIABLE):  # `_work` sets them: the platform's modules are the operator's, and the
        asked.pop(name, None)  # children of the worker must not find the mark
    argv = [sys.executable, "-P", "-m", f"{__package__}.zygote", str(door.fileno()), ALONE]
    _become_program(Exec(spawn.worker, argv, {**os.environ, **asked}, os.path.join(spawn.start.bundle, "function"), 0))


def work_alone(door: socket.socket) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    preload()
    data, fds, _, _ = socket.recv_fds(door, MAX_MESSAGE, MAX_FDS)
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
        forget_what_is_in(site)
    sys.argv = [f"gpufaas-worker {start.function}"]
    name_process(f"{start.label} {start.function}")
    if start.limit:
        set_data_limit(*(data_limit(fork_point.data, each, start.slots) for each in (start.limit, hard)))
    pid = os.getpid()
    status = runner.run(start, connection, files, counts, clocks, shared)
    if os.getpid() == pid:  # not in a process that the author's code has forked
        exit_hooks.run()
    return status


def forget_what_is_in(site: str) -> None:
    """Forget the platform's modules that a function brings itself, so that they are imported from *site*."""
    with contextlib.suppress(OSError):
        own = {name.partition(".")[0] for name in os.listdir(site)} - sys.stdlib_module_names
        for name in [each for each in sys.modules if each.partition(".")[0] in own]:
            del sys.modules[name]


def data_limit(base: int, memory: int, slots: int) -> int:
    """
    Return the RLIMIT_DATA in bytes of a worker that may occupy *memory* bytes over its fork point of *base*.

    The kernel counts private writable memory, touched or not. Stacks of the slots' threads are counted whole although
    hardly touched, so they come on top; pages of the fork server that the worker copies are not, so they come off.
    """
    return base + max(memory - COPIED, 0) + stacks(slots)
