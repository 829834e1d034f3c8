"""Workers that are forked from the fork server: to load a handler, or to become a program that speaks HTTP."""

import asyncio
import contextlib
import os
import resource
import signal
import socket

import msgspec

from gpufaas_core.descriptors import is_lack
from gpufaas_core.model import Bytes
from gpufaas_functions import body_file
from gpufaas_functions.begun import AREAS_AT, UNKNOWN, no_counts, open_counts, shared_in
from gpufaas_functions.runner import WorkerStart
from gpufaas_gpu_manager.areas import Areas
from gpufaas_gpu_manager.cgroup_group import Group
from gpufaas_gpu_manager.confine import real_ids
from gpufaas_gpu_manager.enforcement import WorkerLimits
from gpufaas_gpu_manager.forked import COPIED, Spawn, data_limit
from gpufaas_gpu_manager.forks import ForkServer
from gpufaas_gpu_manager.http_slots import HERE
from gpufaas_gpu_manager.launch.layer import Layer
from gpufaas_gpu_manager.launch.own_process import OwnProcess
from gpufaas_gpu_manager.launch.recipes import STACKS, Recipes
from gpufaas_gpu_manager.launch.served import Ports, Served
from gpufaas_gpu_manager.layers import Layers
from gpufaas_gpu_manager.proc import sizes_of
from gpufaas_gpu_manager.standbys import Standbys
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_connection import WorkerConnection


class ForkedProcess(OwnProcess):
    """`Running`: the runner with the author's handler, forked from the fork server, over one unix socket."""

    def __init__(
        self, worker: Worker, recipes: Recipes, fork_server: ForkServer, standbys: Standbys, layers: Layers
    ) -> None:
        super().__init__(worker, recipes)
        self._fork_server = fork_server
        self._standbys = standbys
        self._layers = layers
        self._layer: Layer | None = None
        """That its process is forked from; None: from the first fork server."""
        self._connection: WorkerConnection | None = None

    @property
    def _may_begin_blank(self) -> bool:
        """Whether a standby may become it."""
        return not self.worker.checks and not self.worker.spec.own_process

    def prepare(self) -> None:
        """The worker waits for memory: have a process for it when that is there."""
        if self._may_begin_blank and not self._layers.has_for(self.worker.spec):
            self._standbys.await_one(self.worker.number, self.recipes.home(self.worker))

    async def start(self) -> None:
        worker = self.worker
        start = await asyncio.to_thread(self.recipes.start, worker)
        weights = self.recipes.attached(worker)
        paths = tuple(os.path.join(start.bundle, each.weights.path) for each in weights)
        counts = self._counts(start.slots)
        start = msgspec.structs.replace(start, weights=paths, counts=bool(counts))
        files = [each.descriptor for each in weights]
        theirs: list[socket.socket] = []
        try:
            await self._connect(start.slots, counts, theirs)
            if start.emulated is not None and (emulation := worker.device.source.emulation) is not None:
                theirs += [emulation.clock(worker.spec, worker.copy, worker.share) for _ in range(start.slots)]
            with worker.output.piped() as ends:
                await self._fork(start, [*(each.fileno() for each in theirs), *counts, *files, *ends])
        finally:
            for descriptor in counts:
                os.close(descriptor)
            for each in theirs:
                each.close()

    def _counts(self, slots: int) -> list[int]:
        """Return the file in which the worker counts what it begins; nothing where memory files are forbidden."""
        try:
            return [open_counts(slots)]
        except OSError as exc:
            if is_lack(exc):
                raise
            return []

    async def _connect(self, slots: int, counts: list[int], theirs: list[socket.socket]) -> None:
        """Make the connection of the worker, and that for files; add its ends to *theirs*."""
        shown, areas = no_counts(slots, UNKNOWN), None
        if counts:
            shown, shared = shared_in(counts[0], slots)
            areas = Areas(shared, self._lent) if len(shared) > AREAS_AT else None
        with contextlib.ExitStack() as failed:
            ours, its = map(failed.enter_context, socket.socketpair())
            files, its_files = map(failed.enter_context, body_file.connected())
            ours.setblocking(False)
            connection = WorkerConnection(self.worker, shown, areas, files)
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
            failed.pop_all()
        theirs += its, its_files
        self._connection = connection
        self.worker.calls.on_slots(connection.slots, connection.wire)

    def _lent(self, held: Bytes) -> None:
        """The worker has mapped *held* bytes of areas, which are not of its memory."""
        if self.worker.limits is not None:
            self.worker.limits.lend(held)

    async def _fork(self, start: WorkerStart, fds: list[int]) -> None:
        worker = self.worker
        self._standbys.forget(worker.number)
        layer = await self._layers.claim(worker, start)
        if layer is not None:
            try:
                self._layer = layer
                self.started(await layer.fork(worker, start, self._limits().confine, fds))
            finally:
                self._layers.release(layer)
        elif not await self._become(start, fds):
            limits = self._limits()
            spawn = Spawn(worker.number, start, limits.confine, bool(worker.spec.own_process))
            self.started(await self._fork_server.fork(spawn, fds))

    async def _become(self, start: WorkerStart, fds: list[int]) -> bool:
        """Have a standby become the worker; False: there is none."""
        worker = self.worker
        if not self._may_begin_blank:
            return False
        standbys, home = self._standbys, self.recipes.home(worker)
        standbys.use(home)
        standby = await standbys.take(worker.number, home)
        if standby is None:
            return False
        try:
            limits = self._limits(standby.group)
        except OSError:  # the group holds more than the worker may
            standbys.end(standby)
            return False
        if await standbys.become(standby, Spawn(worker.number, start, limits.confine), fds):
            self.started(standby.pid.result())
            return True
        limits.close()
        worker.limits = None
        return False

    def _limits(self, group: Group | None = None) -> WorkerLimits:
        limits = self.worker.limits = self.recipes.limits(self.worker, group)
        limits.not_counted = self.recipes.host_cache.files_of(self.worker.number)
        return limits

    def ask(self, kind: int, head: msgspec.Struct | None = None) -> None:
        if self._connection is not None:
            self._connection.ask(kind, head)

    def end(self) -> None:
        """Let it do what its author left for its end, if it is idle; others wait for its memory."""
        worker = self.worker
        if self._connection is None or worker.ready_head is None or worker.calls.exchanges or worker.calls.watch.silent:
            self.kill()
        else:
            self._connection.end()
            self.signal(signal.SIGCONT)  # it may be parked
            worker.timers.later("end", self.recipes.settings.term_grace_s, self.kill)

    def signal(self, number: signal.Signals) -> None:
        """What a layer has said of a process is looked at again: another one may have its number by now."""
        if self._layer is None or self._layer.has(self.worker.pid or 0):
            super().signal(number)

    def said_all(self) -> bool:
        return self._connection is None or self._connection.lost

    def hear_out(self) -> bool:
        return self._connection is not None and self._connection.unread > 0

    def limit_to(self, memory: Bytes) -> None:
        worker = self.worker
        if worker.pid is None or worker.ready_head is None or self._connection is None:
            return
        if not worker.device.source.enforced:  # its allocator does it
            self._connection.limit(memory - worker.calls.memory.uncounted)
        else:
            limit = data_limit(worker.ready_head.data_base, memory, worker.spec.need.slots)
            limit_data(worker.pid, worker.own.uid, limit, self.recipes.enforcement.hard_is_soft)

    def in_use(self) -> Bytes:
        worker = self.worker
        if worker.pid is None or worker.ready_head is None or worker.limits is None:
            return 0
        if not worker.device.source.enforced:
            used = worker.device.source.used_bytes([worker.pid])
            return worker.memory if used is None else used
        data = data_of(worker.pid) - data_limit(worker.ready_head.data_base, COPIED, worker.spec.need.slots) + COPIED
        return max(data, worker.limits.used(worker.pid))

    def close(self) -> None:
        self._standbys.forget(self.worker.number)
        if self._connection is not None:
            self._connection.close()
        super().close()


class ServedProcess(Served, OwnProcess):
    """
    `Running`: a program that speaks HTTP on the port that it is given in PORT, or on the unix socket whose path is in
    GPUFAAS_SOCKET. Forked from the fork server, then exec.
    """

    def __init__(self, worker: Worker, recipes: Recipes, fork_server: ForkServer, ports: Ports) -> None:
        super().__init__(worker, recipes)
        self._ports = ports
        self._claim: socket.socket | None = None
        self._unix = ""
        self._fork_server = fork_server

    async def start(self) -> None:
        worker = self.worker
        port, self._claim = self._ports.take()
        self.waits_for = f"to listen on port {port}, which PORT says"
        self._unix = self.recipes.socket_of(worker)
        program = await asyncio.to_thread(self.recipes.program, worker, port, self._unix)
        worker.limits = self.recipes.limits(worker)
        program = msgspec.structs.replace(program, confine=worker.limits.confine)
        with worker.output.piped() as ends:
            self.started(await self._fork_server.fork(program, ends))
        self.serve(HERE, port, unix=self._unix)

    def end(self) -> None:
        worker = self.worker
        if worker.pid is None or worker.reaped:
            return  # it is killed when it has a process, or has ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(worker.pid, signal.SIGTERM)
        worker.timers.later("end", self.recipes.settings.term_grace_s, self.kill)

    def limit_to(self, memory: Bytes) -> None:
        worker = self.worker
        if worker.pid is not None and worker.device.source.enforced:
            limit_data(worker.pid, worker.own.uid, memory + STACKS, self.recipes.enforcement.hard_is_soft)

    def in_use(self) -> Bytes:
        pid, limits = self.worker.pid, self.worker.limits
        if pid is None or limits is None or not self.worker.device.source.enforced:
            return 0
        return max(data_of(pid) - STACKS, limits.used(pid))

    def close(self) -> None:
        if self._claim is not None:
            self._claim.close()
        super().close()


def limit_data(pid: int, uid: int, limit: Bytes, hard_is_soft: bool) -> None:
    """
    Change the RLIMIT_DATA of *pid*.

    :param uid: its own; 0: that of the platform
    :param hard_is_soft: the process may not raise it itself; else the hard limit stays as it is
    """
    with contextlib.suppress(ProcessLookupError, PermissionError), real_ids(uid):
        hard = limit if hard_is_soft else resource.prlimit(pid, resource.RLIMIT_DATA)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (soft, hard))


def data_of(pid: int) -> Bytes:
    """Return the private writable memory of process *pid*, which RLIMIT_DATA limits; 0: it is gone."""
    return sizes_of(pid, "status", b"VmData")[0]


def describe_status(status: int) -> str:
    """Return in words an exit status, or minus the number of a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
