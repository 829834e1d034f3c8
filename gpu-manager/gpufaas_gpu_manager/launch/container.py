"""A worker that is a container: what the scheduler's commands ask of it, and what the engine tells of it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from gpufaas_core.model import Bytes, Seconds
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.launch.served import Face
from gpufaas_gpu_manager.launch.upstream import listens
from gpufaas_gpu_manager.line_limit import Allowance, LineLimit
from gpufaas_gpu_manager.output import STREAMS
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_end import killed_for_memory

log = logging.getLogger(__name__)

PORT: Final = 8080
"""Where every OpenFaaS image listens."""
_AGAIN_S: Final[Seconds] = 1.0


class ContainerHost(Protocol):
    """What a container asks of the engine (containers.Containers). All of it blocks, but for `post`."""

    closing: bool

    def create(self, container: "Container", secrets: str, labels: Mapping[str, str]) -> tuple[str, str, int, int]: ...

    def end(self, engine_id: str, grace_s: Seconds) -> None: ...

    def kill(self, engine_id: str) -> None: ...

    def limit(self, engine_id: str, memory: Bytes) -> None: ...

    def remove(self, engine_id: str) -> None: ...

    def lines(self, engine_id: str, stream: str, since: float) -> Iterator[bytes]: ...

    def is_running(self, engine_id: str) -> bool: ...

    def post(self, action: Callable[..., None], *arguments: object) -> None:
        """Have *action* called on the event loop; from a thread."""


class Container:
    """`Running`: one container."""

    waits_for = f"to listen on port {PORT}"
    death_known_s = 2.0  # the engine takes its time over events, on a busy machine most of all

    def __init__(self, worker: Worker, recipes: Recipes, containers: ContainerHost) -> None:
        self.worker = worker
        self.recipes = recipes
        self.out_of_memory = False
        self.dead = False
        self._containers = containers
        self._face = Face(worker)
        self._id = ""
        self._streams = set(STREAMS)
        """Streams that have not ended."""
        self._closed = False
        self._tasks: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        worker, containers = self.worker, self._containers
        secrets = await asyncio.to_thread(self.recipes.mounted_secrets, worker, for_container=True)
        creating = asyncio.ensure_future(asyncio.to_thread(containers.create, self, secrets, worker.spec.labels))
        self._id, address, pid, upstream = await asyncio.shield(creating)
        allowance = Allowance(time.monotonic())  # two threads may count at once: an error of one turn's lines
        for stream in STREAMS:
            log_ = ContainerLog(containers, self, self._id, stream, allowance)
            threading.Thread(target=log_.follow, name=f"docker-{stream}", daemon=True).start()
        if self._closed:
            self._in_thread(containers.remove, self._id)
        if self.dead:
            return
        if upstream:
            self.waits_for = f"to listen on port {PORT}, and on {upstream} behind its watchdog"
        worker.on_started(pid)
        self._face.open(address, PORT, lambda: not upstream or listens(pid, address, upstream))

    def end(self) -> None:
        if self._id:  # else `Worker.on_started` kills it
            self._in_thread(self._containers.end, self._id, self.recipes.settings.term_grace_s)

    def kill(self) -> None:
        if self._id:
            self._in_thread(self._containers.kill, self._id)

    def said_all(self) -> bool:
        return not self._streams and self._face.said_all()

    def limit_to(self, memory: Bytes) -> None:
        if self._id and not self.worker.spec.memory_limit and self.worker.device.source.enforced:
            self._in_thread(self._containers.limit, self._id, memory)

    def in_use(self) -> Bytes:
        return 0  # its limit follows its reservation, and its use is not measured

    def close(self) -> None:
        self._closed = True
        self._face.close()
        if self._id:
            self._in_thread(self._containers.remove, self._id)

    # --- what the engine tells ---

    def on_lines(self, lines: list[str] | None, stream: str) -> None:
        """Lines that it printed to *stream*; None: there will be no more."""
        if lines is not None:
            self.worker.output.extend(lines, stream)
        else:
            self._streams.discard(stream)
            self.worker.on_slot_lost()

    def on_died(self, status: str) -> None:
        if self.dead:
            return
        self.dead = True
        if self.out_of_memory:
            how = killed_for_memory(self.worker.spec.memory_limit or self.worker.memory)
        else:
            how = f"its container ended with exit status {status}"
        self.worker.on_reaped(how)

    def _in_thread(self, action: Callable[..., None], *arguments: object) -> None:
        try:
            task = asyncio.get_running_loop().run_in_executor(None, action, *arguments)
        except RuntimeError:  # the loop is ending: `Containers.close` removes all
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ContainerLog:
    """One stream of a container, read in a thread. When an engine that restarts breaks it, it is opened again."""

    def __init__(
        self, containers: ContainerHost, container: Container, engine_id: str, stream: str, allowance: Allowance
    ) -> None:
        self._containers = containers
        self._container = container
        self._id = engine_id
        self._stream = stream
        self._limit = LineLimit(time.monotonic(), allowance)

    def follow(self) -> None:
        """Give the container its lines; returns when it has ended."""
        since = 0.0
        while not self._containers.closing:
            try:
                for piece in self._containers.lines(self._id, self._stream, since):
                    since = time.time()
                    self._limit.feed(piece)
                    self._hand_on()
            except Exception as exc:
                log.debug("docker.logs_lost error=%s", exc)
            if self._container.dead or not self._containers.is_running(self._id):
                break
            time.sleep(_AGAIN_S)  # a thread of its own
        self._give(self._limit.end(time.monotonic()))
        self._give(None)

    def _hand_on(self) -> None:
        """Hand on the lines that have come, at the rate that `LineLimit` allows; the engine waits meanwhile."""
        while True:
            if lines := self._limit.turn(time.monotonic()):
                self._give(lines)
            pause = self._limit.wait()
            if not pause or self._containers.closing:
                return
            time.sleep(pause)

    def _give(self, lines: list[str] | None) -> None:
        self._containers.post(self._container.on_lines, lines, self._stream)
