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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from gpufaas_core.files import remove_tree
from gpufaas_core.log_marks import MARK_VARIABLE
from gpufaas_core.model import Bytes
from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import Imported, ReadyHead
from gpufaas_functions.runner import WorkerStart
from gpufaas_gpu_manager import forked
from gpufaas_gpu_manager.confine import Confine, join
from gpufaas_gpu_manager.forked import SCRATCH, Spawn
from gpufaas_gpu_manager.forks import ForkServer
from gpufaas_gpu_manager.isolation.walls import Walls
from gpufaas_gpu_manager.launch.own_process import OwnProcess
from gpufaas_gpu_manager.launch.recipes import Recipes, scratch_at
from gpufaas_gpu_manager.proc import parent_of, state_of
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.zygote import Exited, Forked, FromForkServer, ServerReady

_MORE: Final[Bytes] = 256 * MiB
"""The most memory that it may take beside what its modules hold: for the forks."""

_LEFT: Final[Bytes] = 64 * MiB
"""Files in its root that hold more make it end: no function is charged for them any more."""


class Layer(OwnProcess):
    """
    See module. `Running` of a worker that only checks: its `checked` is done when the modules are imported, and `said`
    has what the process says of them.
    """

    def __init__(
        self, worker: Worker, recipes: Recipes, base: ForkServer, imported: Imported, on_over: Callable[["Layer"], None]
    ) -> None:
        """
        :param base: forks it
        :param imported: what workers have imported; the function's own `preload` comes first
        """
        super().__init__(worker, recipes)
        self.base = base.pid
        """The process that it is forked from."""
        self.said: ServerReady | None = None
        self.claims = 0
        """Starts that are about to ask it for a worker."""
        self.charged: Bytes = 0
        """The bytes of the host tier's budget that it takes."""
        self.serves = False
        """New workers are forked from it."""
        self._fork_server = base
        self._imported = imported
        self._on_over = on_over
        self._start: WorkerStart | None = None
        self._server: LayerServer | None = None
        scratch = recipes.settings.scratch
        self._shown = scratch and scratch.absolute() / f"code-{worker.number}"
        self._views: dict[str, str] = {}
        self._viewing = asyncio.Lock()

    @property
    def idle(self) -> bool:
        return not self.claims and not (self._server is not None and self._server.busy)

    async def start(self) -> None:
        worker, recipes = self.worker, self.recipes
        start = await asyncio.to_thread(recipes.start, worker)
        env = {name: value for name, value in start.env.items() if name != MARK_VARIABLE}
        self._start = start = replace(start, env=env)
        if self._shown is not None and self._walled:
            self._shown.mkdir(0o755, parents=True)
            worker.own = replace(worker.own, read=(*worker.own.read, str(self._shown)))
        worker.limits = recipes.limits(worker)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imported, asked = self._imported, worker.spec.preload
        layer = forked.Layer(worker.number, start, asked, tuple(imported.modules), imported.env, worker.limits.confine)
        with theirs, worker.output.piped() as ends:
            self.started(await self._fork_server.fork(layer, [theirs.fileno(), *ends]))
        if worker.pid is None:
            ours.close()
        else:  # not before: what it says is held against its process
            self._server = LayerServer(worker, ours, self._ready, self._fork_server.on_exited)

    def _ready(self, said: ServerReady) -> None:
        self.said = said
        if (limits := self.worker.limits) is not None and self.worker.memory:
            limits.hold_to(min(self.worker.memory, limits.used(self.worker.pid or 0) + _MORE))
        self.worker.on_ready(ReadyHead(0, []))

    # --- its workers ---

    async def fork(self, worker: Worker, start: WorkerStart, confine: Confine, fds: Sequence[int]) -> int | None:
        """
        Fork *worker*, and return its process as a fork server does. :param fds: as of a `Spawn`

        :raises OSError: it has ended, or this process can have no more open files
        """
        if self._server is None or self.worker.reaped:
            raise OSError("the process with its imports has ended")
        async with self._viewing:
            start = await asyncio.to_thread(self._within, worker, start)
        for each in fds[-2:] if confine.own.uid else ():  # so that a function can open /dev/stdout by its name
            os.fchown(each, confine.own.uid, confine.own.uid)
        held = Confine(cpus=confine.cpus, hard=confine.hard)
        read, write = os.pipe()
        try:
            pid = await self._server.fork(Spawn(worker.number, start, held, waits=True), [read, *fds])
            with contextlib.suppress(OSError):  # it ends when the pipe does
                if pid is not None:
                    await asyncio.to_thread(join, confine.entries, pid)
                    os.write(write, b"1")
            return pid
        finally:
            os.close(read)
            os.close(write)

    def has(self, pid: int) -> bool:
        return self._server is not None and self._server.has(pid)

    @property
    def worn(self) -> bool:
        """Whether the bundle is gone that it began with, or workers have left many files in its root."""
        if self.recipes.settings.isolation.root:
            with contextlib.suppress(OSError):
                files = os.statvfs(f"/proc/{self.worker.pid}/root/tmp")
                if (files.f_blocks - files.f_bfree) * files.f_frsize > _LEFT:
                    return True
        return self._start is not None and not os.path.isdir(self._start.bundle)

    @property
    def _walled(self) -> bool:
        return self.recipes.settings.isolation != Walls()

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

    def kill(self) -> None:
        if self._server is not None:
            self._server.ends()
        super().kill()

    def close(self) -> None:
        super().close()
        if self._server is not None:
            self._server.over()
        if self._shown is not None:
            with contextlib.suppress(OSError):
                remove_tree(self._shown)
        self._on_over(self)


class LayerServer(ForkServer):
    """
    The node's end of a layer. Code of its function has run in it: what it says is believed as far as the kernel agrees.
    When it breaks off it is killed, and its workers are gone when it is: `over`.
    """

    def __init__(
        self, worker: Worker, control: socket.socket, on_ready: Callable[[ServerReady], None],
        on_exited: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """:param worker: that it is to its own fork server"""
        super().__init__(on_exited, lambda _: None)
        self._worker = worker
        self._on_ready = on_ready
        self._begin(worker, control)  # type: ignore[arg-type] # what is used of it, it has

    def has(self, pid: int) -> bool:
        """Whether *pid* is one of its children. A number that it has made up, or that is used again, is not."""
        return pid > 1 and parent_of(pid) == self._worker.pid

    def _read(self) -> None:
        try:
            super()._read()
        except msgspec.DecodeError:
            self._died()

    def _on_message(self, said: FromForkServer) -> None:
        believed = True
        if isinstance(said, Forked):
            believed = said.worker in self._requests and self.has(said.pid)
        elif isinstance(said, Exited):
            pid = self._alive.get(said.worker, 0)
            if not pid and said.worker not in self._requests:
                return  # it has no such worker
            believed = not self.has(pid) or state_of(pid) in ("Z", "X")
        if not believed:
            self._died()
            return
        super()._on_message(said)
        if isinstance(said, ServerReady):
            self._on_ready(said)

    def _replace(self, reason: str) -> None:
        self._worker.kill(f"the process with its imports is stuck: {reason}")

    def _died(self) -> None:
        self._detach()
        if not self._closing:
            self._worker.kill("the process with its imports broke off")

    def ends(self) -> None:
        """The layer is killed, for a reason that was told or because nobody needs it: that it breaks off is no news."""
        self._closing = True

    def over(self) -> None:
        """It and all that it has started are gone."""
        self.ends()
        self._detach()
        self._timers.close()
        for worker in (*self._requests.give_up(list(self._requests)), *self._alive):
            self.on_exited(worker, -9)
        self._alive = {}
