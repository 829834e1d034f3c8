"""
Workers that are pods of Kubernetes: CPU functions of images, one pod each, behind the same port as Docker's containers.

Pods and not Deployments: the scheduler decides whether a worker that ended is needed again, so pods are never
restarted. One watch sees all of them and tells each `WorkerPod`. A watch that breaks resumes where it was; when
Kubernetes has forgotten that version, it begins again with a list (docs/adr/0024).

Callers get Kubernetes' own words about what the kubelet kills or cannot start.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

from lightkube.models.core_v1 import ContainerState, ContainerStateTerminated, PodStatus
from lightkube.resources.core_v1 import Pod, Secret

from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.wire.heads import FailedHead
from gpufaas_gpu_manager.launch import pod_manifest
from gpufaas_gpu_manager.launch.containers import PORT
from gpufaas_gpu_manager.launch.kubernetes_api import Access, ApiError, ApiLost, ApiServer
from gpufaas_gpu_manager.launch.pod_log import PodLog
from gpufaas_gpu_manager.launch.pod_manifest import PodSettings
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.launch.served import Served
from gpufaas_gpu_manager.running import Running
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_end import killed_for_memory

log = logging.getLogger(__name__)

_AGAIN_S: Final[Seconds] = 1.0
_CLOSE_S: Final[Seconds] = 10.0
_RUN_BYTES: Final = 3
_KILL_GRACE_S: Final = 1
"""Not 0: that removes the pod from the API server before its process is dead and its memory free."""
_NOT_PULLED: Final = frozenset({"InvalidImageName", "ImagePullBackOff", "ErrImageNeverPull"})
_NOT_STARTED: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
"""Why a container waits in vain. ErrImagePull is left out: the kubelet tries once more, and then backs off."""


class Pods:
    """
    The API server, and the pods of this platform.

    :param instance: the platform that they belong to; `start` removes those that an earlier run of it left behind
    """

    makes = "pods"

    def __init__(self, instance: str, access: Access, settings: PodSettings | None = None) -> None:
        if not pod_manifest.LABEL_VALUE.fullmatch(instance):  # names of machines may be longer
            instance = hashlib.sha256(instance.encode()).hexdigest()[:32]
        self._instance = instance
        self._labels = {pod_manifest.INSTANCE: instance}
        self._access = access
        self._settings = settings or PodSettings()
        self._run = secrets.token_hex(_RUN_BYTES)
        """In the names of this run's pods: a pod of an earlier run with the same number may still be ending."""
        self._pods: dict[str, WorkerPod] = {}
        self._starting = asyncio.Lock()
        self._server: ApiServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._nothing_left = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Connect (see `ContainerEngine`). What is missing may be rights of our service account, too."""
        async with self._starting:
            if self._server is not None:
                return
            server = ApiServer(self._access)
            try:
                await self._remove_all(server)
                version = await self._list(server)
            except ApiError as exc:
                await server.close()
                raise InvalidSpec(
                    f"Kubernetes at {self._access.url} refuses ({exc.status}: {exc}): the service account needs to "
                    "get, list, watch, create and delete pods and collections of them, to get pods/log, to patch "
                    f"pods/resize and to create and delete secrets in namespace {self._access.namespace}"
                ) from exc
            except ApiLost as exc:
                await server.close()
                raise InvalidSpec(
                    f"Kubernetes at {self._access.url} does not answer ({exc}): see that it is reached from "
                    "here, with GPUFAAS_KUBERNETES_CA_FILE if its certificate is its own"
                ) from exc
            self._server = server
            self._watching = asyncio.get_running_loop().create_task(self._watch(server, version))

    async def close(self) -> None:
        """Remove all pods of this platform, and wait for their end for `_CLOSE_S` at most."""
        self._closing = True
        server = self._server
        if server is None:
            return
        with contextlib.suppress(ApiError, ApiLost, TimeoutError):
            await self._remove_all(server)
            async with asyncio.timeout(_CLOSE_S):
                while self._pods:
                    self._nothing_left.clear()
                    await self._nothing_left.wait()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None
        await server.close()

    async def pull(self, spec: WorkerSpec) -> tuple[Manifest, WorkerSpec]:
        """
        Connect. The kubelet pulls the image when a pod of it is made, and reports then what is wrong with it.

        :raises InvalidSpec: there is no API server
        """
        try:
            await self.start()
        except InvalidSpec as exc:
            raise InvalidSpec(f"function {spec.name} has only an image ({spec.image}): {exc}") from exc
        return Manifest(kind="server", template="image"), spec

    def running(self, worker: Worker, recipes: Recipes) -> Running:
        return WorkerPod(worker, recipes, self, pod_manifest.pod_name(worker, self._run))

    # --- what pods ask for ---

    async def create(self, pod: "WorkerPod", values: Mapping[str, bytes]) -> None:
        """:raises GpufaasError: Kubernetes refused it"""
        server = self._server
        if server is None or self._closing:
            raise GpufaasError("the platform is stopping")
        worker = pod.worker
        if getattr(worker.device.source, "uuid", ""):
            raise GpufaasError(
                f"{worker.spec.name} is to run on {worker.device.id}, and pods of functions get no GPU: for that take "
                "a node with --functions docker"
            )
        self._pods[pod.name] = pod  # before there is anything to see of it
        try:
            if values:
                await server.create(pod_manifest.secret_of(pod.name, self._instance, worker, values))
            await server.create(
                pod_manifest.pod_of(
                    pod.name, self._instance, worker, pod.recipes, self._settings, has_secret=bool(values)
                )
            )
        except (ApiError, ApiLost) as exc:
            self.forget(pod)
            self.delete(pod, 0)  # the request may have been executed all the same
            hint = ": see the quota and limits of its namespace" if getattr(exc, "status", 0) == 403 else ""
            raise GpufaasError(f"Kubernetes did not start a pod of {worker.spec.image}: {exc}{hint}") from exc

    def delete(self, pod: "WorkerPod", grace_s: float) -> None:
        self._do(lambda server: _delete(server, pod, int(grace_s)))

    def forget(self, pod: "WorkerPod") -> None:
        if self._pods.pop(pod.name, None) is not None and not self._pods:
            self._nothing_left.set()

    def resize(self, pod: "WorkerPod", memory: Bytes) -> None:
        """Since Kubernetes 1.33 a pod's limits can change while it runs; an older one's stay."""
        change = pod_manifest.memory_change(memory)
        self._do(lambda server: _logged("resize", pod, server.resize(pod.name, change)))

    def follow(self, pod: "WorkerPod") -> None:
        """Give *pod* its lines until it has ended."""
        self._do(lambda server: _follow(server, pod))

    # --- tasks ---

    def _do(self, work: Callable[[ApiServer], Coroutine[Any, Any, None]]) -> None:
        """Start *work*, unless there is no server any more or the loop is ending: `close` removes all."""
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            if self._server is not None:
                task = loop.create_task(work(self._server))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _remove_all(self, server: ApiServer) -> None:
        await server.delete_all("pods", self._labels, _KILL_GRACE_S)
        await server.delete_all("secrets", self._labels)

    async def _list(self, server: ApiServer) -> str:
        """Look at all pods, and return the version to watch from. A pod that was created and is not there has ended."""
        expected = [pod for pod in self._pods.values() if pod.created]
        found, version = await server.list(self._labels)
        for name, status in found.items():
            self._saw(name, status)
        for pod in expected:
            if pod.name not in found:
                pod.on_gone(PodStatus())
        return version

    async def _watch(self, server: ApiServer, version: str) -> None:
        """As long as the platform runs. Kubernetes keeps the changes of some minutes: older versions are 410."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                if not version:
                    version = await self._list(server)
                async for change in server.watch(self._labels, version):
                    version = change.version
                    self._saw(change.pod, change.status, gone=change.kind == "DELETED")
            except ApiError as exc:
                if exc.status == 410:
                    log.info("kubernetes.listed_again: %s", exc)
                    version = ""
                    continue
                log.warning("kubernetes.watch_refused status=%d: %s", exc.status, exc)
            except (ApiLost, ValueError) as exc:
                log.warning("kubernetes.watch_lost: %s", str(exc) or type(exc).__name__)
            if loop.time() - began < _AGAIN_S:
                await asyncio.sleep(_AGAIN_S)  # a server that ends every watch at once is not asked in a circle

    def _saw(self, name: str, status: PodStatus, gone: bool = False) -> None:
        pod = self._pods.get(name)
        if pod is None:
            return
        try:
            (pod.on_gone if gone else pod.on_seen)(status)
        except Exception:
            log.exception("kubernetes.not_handled pod=%s", name)  # one pod must not end the watch of all


class WorkerPod(Served):
    """One pod. Its limit follows its reservation, and its use is not measured."""

    death_known_s = 3.0  # the kubelet looks once a second, and then reports

    def __init__(self, worker: Worker, recipes: Recipes, pods: Pods, name: str) -> None:
        self.worker = worker
        self.recipes = recipes
        self.name = name
        self.created = self.dead = self.has_secret = False
        self._pods = pods
        self._runs = self._told_all = self._closed = False
        self._deleted_with: float | None = None
        """The grace of the deletion that was asked for."""
        self._pull_error = ""

    async def start(self) -> None:
        worker = self.worker
        folder = await asyncio.to_thread(self.recipes.mounted_secrets, worker)
        values = await asyncio.to_thread(_read, folder) if folder else {}
        self.has_secret = bool(values)
        await asyncio.shield(asyncio.ensure_future(self._pods.create(self, values)))
        self.created = True
        if self._closed or self.dead:
            self._pods.delete(self, 0)
        elif self._deleted_with is not None:
            self._pods.delete(self, self._deleted_with)

    def end(self) -> None:
        self._delete(self.recipes.settings.term_grace_s)

    def kill(self) -> None:
        self._delete(_KILL_GRACE_S)

    def said_all(self) -> bool:
        return self._told_all and super().said_all()

    def limit_to(self, memory: Bytes) -> None:
        if self._runs and not self.worker.spec.memory_limit:
            self._pods.resize(self, memory)

    def close(self) -> None:
        self._closed = True
        super().close()
        if self.created:
            self._pods.delete(self, 0 if self.dead else _KILL_GRACE_S)
        if self.dead:
            self._pods.forget(self)

    def _delete(self, grace_s: float) -> None:
        if self._deleted_with is not None and grace_s >= self._deleted_with:
            return
        self._deleted_with = grace_s
        if self.created:  # else `start` does it
            self._pods.delete(self, grace_s)

    # --- what Kubernetes tells ---

    def on_told_all(self) -> None:
        """There will be no more lines."""
        self._told_all = True
        self.worker.last_words.on_lost()

    def on_seen(self, status: PodStatus) -> None:
        if self.dead:
            return
        state = _state_of(status)
        if waiting := state.waiting:
            reason, message = waiting.reason or "", waiting.message or ""
            if reason == "ErrImagePull":
                self._pull_error = message  # later messages say only that it was tried
            elif reason in _NOT_PULLED or reason in _NOT_STARTED:
                self._fail(reason, message)
                return
        for condition in status.conditions or ():
            if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
                self._await(f"to be given a machine: {condition.message or ''}")
        if state.terminated:
            self._died(_how(state.terminated, status, self.worker), ran=True)
        elif status.phase in ("Failed", "Succeeded"):
            self._died(f"Kubernetes ended its pod: {status.reason or ''}: {status.message or ''}")
        elif state.running and status.podIP and not self._runs:
            self._runs = True
            self._await(f"to listen on port {PORT}")
            self._pods.follow(self)
            self.serve(status.podIP, PORT)

    def on_gone(self, status: PodStatus) -> None:
        """The pod is not in the list any more."""
        if not self.dead:
            ended = _state_of(status).terminated
            self._died(_how(ended, status, self.worker) if ended else "its pod was deleted", ran=bool(ended))
        self._pods.forget(self)

    def _await(self, what: str) -> None:
        """Give it up if *what* takes too long. Pulls have no such limit: Kubernetes reports when one fails."""
        if what == self.waits_for:
            return
        self.waits_for = what
        self.worker.timers.later("stall", self.worker.spec.stall_s, self._stalled)

    def _stalled(self) -> None:
        if self.worker.ready_head is None and not self.dead:
            self.worker.kill(
                f"its load made no progress for {self.worker.spec.stall_s:g} s (its pod is {self.name}), and has yet "
                f"{self.waits_for}"
            )

    def _fail(self, reason: str, message: str) -> None:
        """Its container will never run."""
        image = self.worker.spec.image
        if reason in _NOT_PULLED:
            text = (
                f"image {image} cannot be pulled ({reason}): {self._pull_error or message}: check its name and tag, "
                "and GPUFAAS_KUBERNETES_PULL_SECRETS if its registry wants a login"
            )
        else:
            text = f"Kubernetes does not start a container of {image} ({reason}): {message}"
        self.worker.on_failed(FailedHead(text, ""))
        self._died(text)

    def _died(self, how: str, *, ran: bool = False) -> None:
        """:param ran: its container began, so that it may have printed something"""
        self.dead = True
        if not self._runs and ran:
            self._pods.follow(self)  # it ended before it was seen to run
        elif not self._runs:
            self._told_all = True
        self.worker.on_reaped(how)


def _state_of(status: PodStatus) -> ContainerState:
    states = (each.state for each in status.containerStatuses or () if each.name == pod_manifest.CONTAINER)
    return next(states, None) or ContainerState()


def _how(ended: ContainerStateTerminated, status: PodStatus, worker: Worker) -> str:
    """Return in words how a container ended."""
    if ended.reason == "OOMKilled":
        return killed_for_memory(worker.spec.memory_limit or worker.memory)
    how = f"its pod ended with exit status {ended.exitCode}"
    if status.reason:  # Evicted, NodeLost, Preempting
        how += f": {status.reason}: {status.message or ''}"
    return how


def _read(folder: str) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(Path(folder).iterdir()) if not each.name.startswith(".")}


async def _delete(server: ApiServer, pod: WorkerPod, grace_s: int) -> None:
    await _logged("delete", pod, server.delete(Pod, pod.name, grace_s))
    if pod.has_secret and pod.dead:
        await _logged("delete secret", pod, server.delete(Secret, pod.name))


async def _follow(server: ApiServer, pod: WorkerPod) -> None:
    await PodLog(server, pod.name, pod.worker.output.extend, lambda: pod.dead).follow()
    pod.on_told_all()


async def _logged(what: str, pod: "WorkerPod", work: Coroutine[Any, Any, None]) -> None:
    """Await *work*; a failure is logged, and no more: the pod's watch tells what became of it."""
    try:
        await work
    except ApiError as exc:
        if exc.status != 404:  # it is gone, which is what was wanted
            log.warning("kubernetes.refused what=%s pod=%s status=%d: %s", what, pod.name, exc.status, exc)
    except ApiLost as exc:
        log.warning("kubernetes.not_reached what=%s pod=%s: %s", what, pod.name, exc)
