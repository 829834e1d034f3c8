"""
A layer: a fork server that has imported what workers of one function import. It is confined as they are, before that.

The node makes it as it makes the worker that checks a function at deploy: it has limits, a uid, an own root and output
like any. Workers that are forked from it are within its walls, and share its /tmp, /dev/shm and home. Each has control
groups of its own, to which the node moves it, and a scratch directory. A later revision of the function is shown to it
in a directory of its own, by hard links.
"""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Final, Protocol

from msgspec.structs import replace

from gpufaas_core.files import remove_tree
from gpufaas_core.frames import Imported, ReadyHead
from gpufaas_core.log_marks import MARK_VARIABLE
from gpufaas_core.model import Bytes
from gpufaas_core.units import MiB
from gpufaas_functions.runner import WorkerStart
from gpufaas_gpu_manager import zygote
from gpufaas_gpu_manager.confine import Confine
from gpufaas_gpu_manager.forks import LayerServer, Zygote
from gpufaas_gpu_manager.isolation.walls import Walls
from gpufaas_gpu_manager.launch.recipes import Recipes, scratch_at
from gpufaas_gpu_manager.reaper import kill_group
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.zygote import SCRATCH, Spawn, ZygoteReady

_MORE: Final[Bytes] = 256 * MiB
"""The most memory that it may take beside what its modules hold: for the forks."""

_LEFT: Final[Bytes] = 64 * MiB
"""Files in its root that hold more make it end: no function is charged for them any more."""


class Forks(Protocol):
    """Is told of workers that a layer has forked, and that have ended."""

    def on_forked(self, number: int, pid: int) -> None: ...

    def on_exited(self, number: int, status: int) -> None: ...


class Layer:
    """
    See module. `Running` of a scratch worker; its `checked` is done when the modules are imported, and `said` has what
    the process says of them.
    """

    waits_for = ""
    death_known_s = 0.5

    def __init__(
        self, worker: Worker, recipes: Recipes, base: Zygote, imported: Imported, forks: Forks,
        on_over: Callable[["Layer"], None],
    ) -> None:  # fmt: skip
        """:param imported: what workers have imported; the function's own `preload` comes first"""
        self.worker = worker
        self.base = base.pid
        """The process that it is forked from."""
        self.said: ZygoteReady | None = None
        self.claims = 0
        """Starts that are about to ask it for a worker."""
        self.charged: Bytes = 0
        """The bytes of the host tier's budget that it takes."""
        self.serves = False
        """New workers are forked from it."""
        self._recipes = recipes
        self._zygote = base
        self._imported = imported
        self._forks = forks
        self._on_over = on_over
        self._start: WorkerStart | None = None
        self._server: LayerServer | None = None
        self._doors: dict[int, tuple[tuple[str, ...], int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        scratch = recipes.settings.scratch
        self._shown = scratch and scratch.absolute() / f"code-{worker.number}"
        self._views: dict[str, str] = {}

    @property
    def pid(self) -> int:
        return self.worker.pid or 0

    @property
    def idle(self) -> bool:
        return not self.claims and not (self._server is not None and self._server.busy)

    async def start(self) -> None:
        worker, recipes = self.worker, self._recipes
        start = await asyncio.to_thread(recipes.start, worker)
        env = {name: value for name, value in start.env.items() if name != MARK_VARIABLE}
        self._start = start = replace(start, env=env)
        if self._shown is not None and self._walled:
            self._shown.mkdir(0o755, parents=True)
            worker.own = replace(worker.own, read=(*worker.own.read, str(self._shown)))
        worker.limits = recipes.limits(worker)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = LayerServer(self, ours, self._forked, self._exited)
        imported, asked = self._imported, worker.spec.preload
        layer = zygote.Layer(worker.number, start, asked, tuple(imported.modules), imported.env, worker.limits.confine)
        with theirs, worker.output.piped() as ends:
            await self._zygote.fork(layer, [theirs.fileno(), *ends])
        self._do(self._hear(self._server))

    async def _hear(self, server: LayerServer) -> None:
        self.said = await server.ready()
        if (limits := self.worker.limits) is not None and self.worker.memory:
            limits.hold_to(min(self.worker.memory, limits.used(self.pid) + _MORE))
        self.worker.on_ready(ReadyHead(0, []))

    def _do(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- its workers ---

    async def fork(self, worker: Worker, start: WorkerStart, confine: Confine, fds: Sequence[int]) -> None:
        """
        Fork *worker*. :param fds: as of a `Spawn`

        :raises OSError: it has ended, or this process can have no more open files
        """
        if self._server is None or self.worker.reaped:
            raise OSError("the process with its imports has ended")
        start = await asyncio.to_thread(self._within, worker, start)
        for each in fds[-2:] if confine.own.uid else ():  # so that a function can open /dev/stdout by its name
            os.fchown(each, confine.own.uid, confine.own.uid)
        read, write = os.pipe()
        self._doors[worker.number] = confine.entries, write
        held = Confine(cpus=confine.cpus, hard=confine.hard)
        try:
            await self._server.fork(Spawn(worker.number, start, held, waits=True), [read, *fds])
        except OSError:
            os.close(self._doors.pop(worker.number)[1])
            raise
        finally:
            os.close(read)

    def _forked(self, number: int, pid: int) -> None:
        self._do(self._admit(number, pid, *self._doors.pop(number)))

    async def _admit(self, number: int, pid: int, entries: tuple[str, ...], door: int) -> None:
        """Move the worker to its groups, and let it go on. It ends if that fails."""
        moved = b""
        try:
            with contextlib.suppress(OSError):
                moved = await asyncio.to_thread(_move, pid, entries)
            self._forks.on_forked(number, pid)
            with contextlib.suppress(OSError):
                os.write(door, moved)
        finally:
            os.close(door)

    def _exited(self, number: int, status: int) -> None:
        if (waits := self._doors.pop(number, None)) is not None:
            os.close(waits[1])
        self._forks.on_exited(number, status)

    def has(self, pid: int) -> bool:
        return self._server is not None and self._server.has(pid)

    @property
    def worn(self) -> bool:
        """Whether the bundle is gone that it began with, or workers have left many files in its root."""
        if self._recipes.settings.isolation.root:
            with contextlib.suppress(OSError):
                files = os.statvfs(f"/proc/{self.pid}/root/tmp")
                if (files.f_blocks - files.f_bfree) * files.f_frsize > _LEFT:
                    return True
        return self._start is not None and not os.path.isdir(self._start.bundle)

    @property
    def _walled(self) -> bool:
        return self._recipes.settings.isolation != Walls()

    def _within(self, worker: Worker, start: WorkerStart) -> WorkerStart:
        """Return *start* with what there is within our walls. Blocks."""
        ours = self._start
        if ours is None or not self._walled:
            return start
        bundle = start.bundle if start.bundle == ours.bundle else self._view(start.bundle)
        env = {name: value for name, value in start.env.items() if name != "TMPDIR"}
        env |= {name: ours.env[name] for name in ("HOME", "TORCHINDUCTOR_CACHE_DIR") if name in ours.env}
        if scratch := ours.env.get(SCRATCH, ""):
            env |= scratch_at(os.path.join(scratch, str(worker.number)))
        weights = tuple(bundle + each.removeprefix(start.bundle) for each in start.weights)
        return replace(start, bundle=bundle, env=env, weights=weights)

    def _view(self, bundle: str) -> str:
        """
        Return where we see *bundle*, which has come later.

        :raises OSError: it cannot be linked
        """
        if bundle not in self._views:
            if self._shown is None:
                raise OSError("it has no directory for later revisions")
            view = self._shown / os.path.basename(bundle)
            shutil.copytree(Path(bundle, "function"), view / "function", symlinks=True, copy_function=os.link)
            if (site := Path(bundle, "site")).is_dir():
                (view / "site").symlink_to(os.path.realpath(site))
            self._views[bundle] = str(view)
        return self._views[bundle]

    # --- its end ---

    def fail(self, reason: str) -> None:
        self.worker.kill(reason)

    def end(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self.worker.limits is not None:
            self.worker.limits.kill()
        if self.worker.pid is not None and not self.worker.reaped:
            kill_group(self.worker.pid)

    def said_all(self) -> bool:
        return True

    def hear_out(self) -> bool:
        return False

    def limit_to(self, memory: Bytes) -> None:
        """Nothing: nobody changes its memory."""

    def in_use(self) -> Bytes:
        return 0

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.over()
        self._recipes.drop_own(self.worker)
        if self._shown is not None:
            with contextlib.suppress(OSError):
                remove_tree(self._shown)
        self._on_over(self)


def _move(pid: int, entries: tuple[str, ...]) -> bytes:
    """Return what tells the process that it was moved."""
    for each in entries:
        with open(each, "wb", buffering=0) as procs:
            procs.write(str(pid).encode())
    return b"1"
