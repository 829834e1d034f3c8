"""
Workers that are containers of the Docker engine of this machine.

The SDK blocks, so requests and events of the engine are in threads, and are handed to the event loop. A container is
reached at its own address in our network, not by a published port, which changes when it restarts. The engine never
restarts one: the scheduler decides whether it is needed again.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.origin import GATEWAY_NAMES
from gpufaas_gpu_manager.isolation.walls import PIDS
from gpufaas_gpu_manager.launch import docker_images
from gpufaas_gpu_manager.launch.networks import INSTANCE, Network, Networks, OnNetworks
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.launch.served import Served
from gpufaas_gpu_manager.launch.upstream import listens, upstream_port
from gpufaas_gpu_manager.line_limit import Allowance, LineLimit
from gpufaas_gpu_manager.output import STREAMS
from gpufaas_gpu_manager.running import Running
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_end import killed_for_memory

log = logging.getLogger(__name__)

PORT: Final = 8080
"""Where every OpenFaaS image listens."""
SECRETS: Final = "/var/openfaas/secrets"
_WORKER: Final = "gpufaas.worker"
_GPU_PARTS: Final = ("gpu", "compute", "utility")
"""Parts of the driver that it gets: CUDA, and NVML."""
_ENGINE_S: Final[Seconds] = 60.0
_AGAIN_S: Final[Seconds] = 1.0


class Containers:
    """
    The engine, and the networks and containers of this platform.

    :param instance: the platform that they belong to; `start` removes those that an earlier run of it left behind
    :param gateway: its URL, empty if it has none; its host is this machine, if it is ``gateway.openfaas``
    """

    def __init__(self, instance: str, gateway: str, on_networks: OnNetworks | None = None) -> None:
        self._instance = instance
        self._gateway = gateway
        self._client: Any = None
        self._starting = asyncio.Lock()
        self._ours = {"label": f"{INSTANCE}={instance}"}
        self.networks = Networks(instance, on_networks)
        self._running: dict[str, Container] = {}
        """The containers that run, by the engine's id."""
        self._events: Any = None
        self.closing = False
        self._loop: asyncio.AbstractEventLoop

    @property
    def makes(self) -> str:
        return "containers" if self._client is not None else ""

    async def start(self) -> None:
        """Connect (see `ContainerEngine`). A platform without containers needs no engine; one may be started later."""
        async with self._starting:
            if self._client is None:
                self._loop = asyncio.get_running_loop()
                self._client = self.networks.client = await asyncio.to_thread(self._open)
                threading.Thread(target=self._hear, name="docker-events", daemon=True).start()

    async def close(self) -> None:
        """Remove all containers and networks of this platform."""
        self.closing = True
        if self._client is None:
            return
        with contextlib.suppress(Exception):  # the engine has gone: the next run removes them
            await asyncio.to_thread(self._remove_all, self._client)
        if self._events is not None:
            with contextlib.suppress(Exception):
                self._events.close()
        await asyncio.to_thread(self._client.close)

    async def pull(self, spec: WorkerSpec) -> tuple[Manifest, WorkerSpec]:
        """
        Have the image of *spec* here (`docker_images.pull`), and the network of its namespace. Return *spec* with the
        paths of the image's labels for readiness and health, where the function names none.

        :raises InvalidSpec: it cannot be had; says why, in plain words
        """
        try:
            await self.start()
        except InvalidSpec as exc:
            raise InvalidSpec(f"function {spec.name} has only an image ({spec.image}): {exc}") from exc
        async with self.networks.joined(spec.namespace):
            labels = await asyncio.to_thread(docker_images.pull, self._client, spec.image)
        spec = replace(
            spec,
            ready_path=spec.ready_path or labels.get(docker_images.READY_LABEL, ""),
            health_path=spec.health_path or labels.get(docker_images.HEALTH_LABEL, ""),
        )
        return Manifest(kind="server", template="image"), spec

    def running(self, worker: Worker, recipes: Recipes) -> Running:
        return Container(worker, recipes, self)

    # --- in threads ---

    def _open(self) -> Any:
        try:
            import docker
            from docker.errors import DockerException
        except ModuleNotFoundError:
            raise InvalidSpec("the Docker SDK is not installed: pip install 'gpufaas[docker]'") from None
        try:
            client = docker.from_env(timeout=_ENGINE_S)
            client.ping()
            self._remove_all(client)
        except (DockerException, OSError) as exc:
            raise InvalidSpec(f"the Docker engine does not answer ({exc}): start it, or set DOCKER_HOST") from exc
        return client

    def _remove_all(self, client: Any) -> None:
        from docker.errors import APIError

        for container in client.containers.list(all=True, filters=self._ours, ignore_removed=True):
            with contextlib.suppress(APIError):
                container.remove(force=True, v=True)
        with contextlib.suppress(APIError):  # one is being made
            client.networks.prune(self._ours)

    def create(
        self, container: "Container", secrets: str, labels: Mapping[str, str], network: Network
    ) -> tuple[str, str, int, int]:
        """Create and start it; return its id, address, process id, and the port behind its watchdog (0: none)."""
        from docker.errors import DockerException

        worker = container.worker
        spec = worker.spec
        hosts = dict.fromkeys(GATEWAY_NAMES, network.host)
        if (host := urlsplit(self._gateway).hostname) and host not in hosts:
            with contextlib.suppress(OSError):  # it is not known now
                hosts = dict.fromkeys(GATEWAY_NAMES, socket.gethostbyname(host))
        made = None
        try:
            made = self._client.containers.create(
                spec.image,
                name=f"{spec.name}.{spec.namespace}-{self._instance}-{worker.number}",
                labels={**labels, INSTANCE: self._instance, _WORKER: str(worker.number)},
                network=network.id,
                extra_hosts=hosts,
                security_opt=["no-new-privileges"],
                cap_drop=["ALL"],
                cap_add=list(spec.capabilities),
                pids_limit=PIDS,
                init=True,  # SIGTERM ends a program that has no handler for it, which it would not as process 1
                healthcheck={"test": ["NONE"]},  # we look ourselves
                log_config={"type": "json-file", "config": {"max-size": "10m", "max-file": "1"}},
                **self._given(container, secrets),
            )
            self._running[made.id] = container  # before it can end
            made.start()
            made.reload()
            if self.closing:
                raise OSError("the platform is stopping")  # `close` may have looked before this one was there
            (joined,) = made.attrs["NetworkSettings"]["Networks"].values()
            upstream = upstream_port(made.attrs["Config"]["Env"] or ())
            return made.id, joined["IPAddress"], made.attrs["State"]["Pid"], upstream
        except (DockerException, OSError) as exc:
            if made is not None:
                self._running.pop(made.id, None)
                with contextlib.suppress(DockerException, OSError):
                    made.remove(force=True, v=True)
            reason = docker_images.explanation(exc)
            if "could not select device driver" in reason:
                reason += ": give the engine NVIDIA's Container Toolkit, and restart it"
            raise GpufaasError(f"the Docker engine did not start a container of {spec.image}: {reason}") from exc

    def _given(self, container: "Container", secrets: str) -> dict[str, Any]:
        """Return what its function and device give a container: environment, device, memory, processors, files."""
        from docker.types import DeviceRequest

        worker = container.worker
        spec = worker.spec
        env = container.recipes.container_env(worker, self._gateway)
        given: dict[str, Any] = {"environment": env}
        memory = spec.memory_limit or worker.memory
        if uuid := getattr(worker.device.source, "uuid", ""):
            env.pop("CUDA_VISIBLE_DEVICES", None)  # it sees that one alone, as number 0
            gpu = DeviceRequest(driver="nvidia", device_ids=[uuid], capabilities=[list(_GPU_PARTS)])
            given["device_requests"], memory = [gpu], spec.memory_limit
        if memory:
            given.update(mem_limit=memory, memswap_limit=memory)
        if cpus := container.recipes.cpus(worker):
            given["nano_cpus"] = int(cpus * 1e9)
        if secrets:
            given["volumes"] = {secrets: {"bind": SECRETS, "mode": "ro"}}
        if spec.read_only:
            given.update(read_only=True, tmpfs={"/tmp": ""})
        return given

    def _hear(self) -> None:
        """Report containers that end, as long as the platform runs. When the engine goes away, wait for it."""
        since = time.time()
        while not self.closing:
            try:
                self._events = self._client.events(
                    decode=True,
                    since=int(since),
                    filters={**self._ours, "event": ["die", "oom"]},
                )
                for event in self._events:
                    self._tell(event)
                    since = event.get("timeNano", 0) / 1e9 or since
            except Exception as exc:
                if self.closing:
                    return
                log.warning("docker.events_lost error=%s", exc)
            if not self.closing:
                time.sleep(_AGAIN_S)  # a thread of its own
                with contextlib.suppress(Exception):
                    self._find_dead()

    def _tell(self, event: dict[str, Any]) -> None:
        container = self._running.get(event.get("id", ""))
        if container is None or self._loop.is_closed():
            return
        if event["Action"] == "oom":
            container.out_of_memory = True
        else:
            status = event.get("Actor", {}).get("Attributes", {}).get("exitCode", "?")
            self.post(container.on_died, status)

    def _find_dead(self) -> None:
        """Report containers that do not run: their events may have been missed."""
        alive = {each.id for each in self._client.containers.list(filters=self._ours)}
        for each in list(self._running):
            if each not in alive:
                self._tell({"id": each, "Action": "die"})

    def post(self, action: Callable[..., None], *arguments: object) -> None:
        """Have *action* called on the event loop; from a thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action, *arguments)

    def lines(self, engine_id: str, stream: str, since: float) -> Iterator[bytes]:
        """Yield what a container prints to *stream*, from *since* (Unix time; 0: the beginning) until it ends."""
        more = {"since": since} if since else {}
        which = {each: each == stream for each in STREAMS}
        yield from self._client.api.logs(engine_id, stream=True, follow=True, **which, **more)

    def is_running(self, engine_id: str) -> bool:
        try:
            return bool(self._client.api.inspect_container(engine_id)["State"]["Running"])
        except Exception:
            return False

    def ask(self, request: str, engine_id: str, **options: object) -> None:
        """Make *request* of the engine's API about a container, unless that is gone already."""
        with contextlib.suppress(Exception):
            getattr(self._client.api, request)(engine_id, **options)

    def remove(self, engine_id: str) -> None:
        self._running.pop(engine_id, None)
        self.ask("remove_container", engine_id, force=True, v=True)


class Container(Served):
    """One container. Its limit follows its reservation, and its use is not measured."""

    waits_for = f"to listen on port {PORT}"
    death_known_s = 2.0  # the engine takes its time over events, on a busy machine most of all

    def __init__(self, worker: Worker, recipes: Recipes, containers: Containers) -> None:
        self.worker = worker
        self.recipes = recipes
        self.out_of_memory = False
        self.dead = False
        self._containers = containers
        self._id = ""
        self._streams = set(STREAMS)
        """Streams that have not ended."""
        self._closed = False

    async def start(self) -> None:
        worker, containers = self.worker, self._containers
        secrets = await asyncio.to_thread(self.recipes.mounted_secrets, worker, for_container=True)
        async with containers.networks.joined(worker.spec.namespace) as network:
            creating = asyncio.to_thread(containers.create, self, secrets, worker.spec.labels, network)
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
        self.serve(address, PORT, lambda: not upstream or listens(pid, address, upstream))

    def end(self) -> None:
        if self._id:  # else `Worker.on_started` kills it
            self._in_thread(self._containers.ask, "stop", self._id, timeout=int(self.recipes.settings.term_grace_s))

    def kill(self) -> None:
        if self._id:
            self._in_thread(self._containers.ask, "kill", self._id)

    def said_all(self) -> bool:
        return not self._streams and super().said_all()

    def limit_to(self, memory: Bytes) -> None:
        if self._id and not self.worker.spec.memory_limit and self.worker.device.source.enforced:
            limits = {"mem_limit": memory, "memswap_limit": memory}
            self._in_thread(self._containers.ask, "update_container", self._id, **limits)

    def close(self) -> None:
        self._closed = True
        super().close()
        if self._id:
            self._in_thread(self._containers.remove, self._id)

    # --- what the engine tells ---

    def on_lines(self, lines: list[str] | None, stream: str) -> None:
        """Lines that it printed to *stream*; None: there will be no more."""
        if lines is not None:
            self.worker.output.extend(lines, stream)
        else:
            self._streams.discard(stream)
            self.worker.last_words.on_lost()

    def on_died(self, status: str) -> None:
        if self.dead:
            return
        self.dead = True
        if self.out_of_memory:
            how = killed_for_memory(self.worker.spec.memory_limit or self.worker.memory)
        else:
            how = f"its container ended with exit status {status}"
        self.worker.on_reaped(how)

    def _in_thread(self, action: Callable[..., None], *arguments: object, **more: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is ending: `Containers.close` removes all
            asyncio.get_running_loop().run_in_executor(None, partial(action, *arguments, **more))


class ContainerLog:
    """One stream of a container, read in a thread. When an engine that restarts breaks it, it is opened again."""

    def __init__(
        self, containers: Containers, container: Container, engine_id: str, stream: str, allowance: Allowance
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
