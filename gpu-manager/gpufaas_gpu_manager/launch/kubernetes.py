"""
Workers that are pods of Kubernetes: CPU functions of images, one pod each, behind the same port as Docker's containers.

Pods and not Deployments: whether a worker that ended is needed again is for our scheduler to say, and so the pods are
never restarted. They are watched; what is seen of one goes to its `Pod`, which tells its worker. A watch that breaks is
taken up where it was, and one that is too old for that begins again with a list. docs/adr/0024 says why it is so.

What the kubelet kills or cannot start comes with Kubernetes' own words, which callers get.
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.frames import FailedHead
from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.units import format_bytes
from gpufaas_gpu_manager.launch.containers import CAPABILITIES, PORT, SECRETS
from gpufaas_gpu_manager.launch.kubernetes_api import Access, ApiError, ApiLost, ApiServer
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.launch.served import Face
from gpufaas_gpu_manager.line_limit import LineLimit
from gpufaas_gpu_manager.worker import KILLED_FOR_MEMORY, Worker
from gpufaas_gpu_manager.worker_calls import Running

log = logging.getLogger(__name__)

_CONTAINER: Final = "function"
_INSTANCE: Final = "gpufaas.io/instance"
_WORKER: Final = "gpufaas.io/worker"
_FUNCTION: Final = "faas_function"
_LABEL_NAME: Final = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_NEVER: Final = frozenset(
    {"InvalidImageName", "ImagePullBackOff", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError",
     "RunContainerError"}
)  # fmt: skip
"""What a container waits for in vain. ErrImagePull is left out: the kubelet tries once more, and then backs off."""
_STAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT")
_KILL_GRACE_S: Final = 1
"""Not 0: that takes the pod from the API server's list before its process is dead, and its memory free."""
_AGAIN_S: Final[Seconds] = 1.0
_CLOSE_S: Final[Seconds] = 10.0
_BOOT_BYTES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Of all pods."""

    gateway: str = ""
    """URL by which pods reach the gateway: their OPENFAAS_URL. Empty: what workers are told otherwise."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Where they may run. The budget of a CPU device is one machine's, so it names that machine."""
    pull_secrets: tuple[str, ...] = ()
    """Names of secrets with logins of registries."""


def settings_from(env: Mapping[str, str]) -> PodSettings:
    """Return what ``GPUFAAS_KUBERNETES_GATEWAY``, ``_NODE`` and ``_PULL_SECRETS`` say."""
    node = env.get("GPUFAAS_KUBERNETES_NODE", "")
    pulls = env.get("GPUFAAS_KUBERNETES_PULL_SECRETS", "")
    return PodSettings(
        gateway=env.get("GPUFAAS_KUBERNETES_GATEWAY", ""),
        node_selector={"kubernetes.io/hostname": node} if node else {},
        pull_secrets=tuple(each.strip() for each in pulls.split(",") if each.strip()),
    )


class Pods:
    """
    The API server, and the pods of this platform.

    :param instance: of which platform they are: those that an earlier run of it left behind are removed by `start`
    """

    def __init__(self, instance: str, access: Access, settings: PodSettings | None = None) -> None:
        # A label's value: names of machines may be longer than that.
        self._instance = (
            instance if _LABEL_VALUE.fullmatch(instance) else hashlib.sha256(instance.encode()).hexdigest()[:32]
        )
        self._access = access
        self.settings = settings or PodSettings()
        self._boot = secrets.token_hex(_BOOT_BYTES)
        """In the names of this run's pods: an earlier run's with the same number may still be ending."""
        self._pods: dict[str, Pod] = {}
        self._starting = asyncio.Lock()
        self._server: ApiServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._nothing_left = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def makes(self) -> str:
        return "pods"

    async def start(self) -> None:
        """
        Connect, and remove what an earlier run left behind. Cheap once it is done.

        :raises InvalidSpec: there is no API server, or we may not do there what we must; says what is missing
        """
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
        """Remove all pods of this platform; those that will not go are left to Kubernetes after a while."""
        self._closing = True
        server = self._server
        if server is None:
            return
        with contextlib.suppress(ApiError, ApiLost):
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
        Images are pulled by the kubelet, when a pod of theirs is made: what is wrong with one is said then.

        :raises InvalidSpec: there is no API server
        """
        try:
            await self.start()
        except InvalidSpec as exc:
            raise InvalidSpec(f"function {spec.name} has only an image ({spec.image}): {exc}") from exc
        return Manifest(kind="server", template="image"), spec

    def running(self, worker: Worker, recipes: Recipes) -> Running:
        return Pod(worker, recipes, self)

    # --- what pods ask for ---

    def name_of(self, worker: Worker) -> str:
        """Return a DNS label that no other pod has."""
        name = re.sub(r"[^a-z0-9-]", "-", worker.spec.name.lower()).strip("-") or "function"
        return f"{name[:40].rstrip('-')}-{self._boot}-{worker.number}"

    async def create(self, pod: "Pod", values: Mapping[str, bytes]) -> None:
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
                await server.ask("POST", server.path("secrets"), self._secret(pod, values))
            await server.ask("POST", server.path("pods"), self._manifest(pod, bool(values)))
        except (ApiError, ApiLost) as exc:
            self.forget(pod)
            # What was asked for may have been done all the same.
            self.delete(pod, 0)
            hint = ": see the quota and limits of its namespace" if getattr(exc, "status", 0) == 403 else ""
            raise GpufaasError(f"Kubernetes did not start a pod of {worker.spec.image}: {exc}{hint}") from exc

    def delete(self, pod: "Pod", grace_s: float) -> None:
        server = self._server
        if server is not None:
            self._do(self._delete(server, pod, int(grace_s)))

    def forget(self, pod: "Pod") -> None:
        if self._pods.pop(pod.name, None) is not None and not self._pods:
            self._nothing_left.set()

    def resize(self, pod: "Pod", memory: Bytes) -> None:
        """Since Kubernetes 1.33 a pod's limits can change while it runs; an older one's stay."""
        server = self._server
        if server is not None:
            resources = {"requests": {"memory": str(memory)}, "limits": {"memory": str(memory)}}
            body = {"spec": {"containers": [{"name": _CONTAINER, "resources": resources}]}}
            self._do(self._ask_once(server, "PATCH", server.path("pods", pod.name, "resize"), body))

    def follow(self, pod: "Pod") -> None:
        if self._server is not None:
            self._do(self._follow(self._server, pod))

    # --- tasks ---

    def _do(self, work: Any) -> None:
        try:
            task = asyncio.get_running_loop().create_task(work)
        except RuntimeError:  # the loop is ending: `close` removes all
            work.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete(self, server: ApiServer, pod: "Pod", grace_s: int) -> None:
        params = {"gracePeriodSeconds": str(grace_s)}
        await self._ask_once(server, "DELETE", server.path("pods", pod.name), params=params)
        if pod.has_secret and pod.dead:
            await self._ask_once(server, "DELETE", server.path("secrets", pod.name))

    async def _ask_once(
        self, server: ApiServer, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> None:
        try:
            await server.ask(method, path, body, params=params)
        except ApiError as exc:
            if exc.status != 404:  # it is gone, which is what was wanted
                log.warning("kubernetes.refused method=%s path=%s status=%d: %s", method, path, exc.status, exc)
        except ApiLost as exc:
            log.warning("kubernetes.not_reached method=%s path=%s: %s", method, path, exc)

    async def _remove_all(self, server: ApiServer) -> None:
        selector = {"labelSelector": f"{_INSTANCE}={self._instance}"}
        await server.ask("DELETE", server.path("pods"), params={**selector, "gracePeriodSeconds": str(_KILL_GRACE_S)})
        await server.ask("DELETE", server.path("secrets"), params=selector)

    async def _list(self, server: ApiServer) -> str:
        """Look at all pods, and return the version of what was seen. One that should be there and is not is gone."""
        expected = [pod for pod in self._pods.values() if pod.created]
        found = await server.ask("GET", server.path("pods"), params={"labelSelector": f"{_INSTANCE}={self._instance}"})
        there = {each["metadata"]["name"]: each for each in found["items"]}
        for each in there.values():
            self._saw(each)
        for pod in expected:
            if pod.name not in there:
                pod.on_gone({})
        return str(found["metadata"]["resourceVersion"])

    async def _watch(self, server: ApiServer, version: str) -> None:
        """As long as the platform runs. Kubernetes keeps the changes of some minutes: older versions are 410."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                if not version:
                    version = await self._list(server)
                params = {"labelSelector": f"{_INSTANCE}={self._instance}", "resourceVersion": version}
                async for event in server.watch(server.path("pods"), params):
                    seen = event["object"]
                    if event["type"] == "ERROR":
                        raise ApiError(int(seen.get("code", 500)), str(seen.get("message", "")))
                    version = str(seen["metadata"]["resourceVersion"])
                    if event["type"] != "BOOKMARK":
                        self._saw(seen, gone=event["type"] == "DELETED")
            except ApiError as exc:
                if exc.status == 410:
                    log.info("kubernetes.listed_again: %s", exc)
                    version = ""
                    continue
                log.warning("kubernetes.watch_refused status=%d: %s", exc.status, exc)
            except (ApiLost, ValueError, LookupError) as exc:
                log.warning("kubernetes.watch_lost: %s", str(exc) or type(exc).__name__)
            if loop.time() - began < _AGAIN_S:
                await asyncio.sleep(_AGAIN_S)  # a server that ends every watch at once is not asked in a circle

    def _saw(self, seen: Mapping[str, Any], gone: bool = False) -> None:
        pod = self._pods.get(seen["metadata"]["name"])
        if pod is None:
            return
        try:
            (pod.on_gone if gone else pod.on_seen)(seen.get("status", {}))
        except Exception:
            log.exception("kubernetes.not_understood pod=%s", pod.name)  # one pod is not to end the watch of all

    async def _follow(self, server: ApiServer, pod: "Pod") -> None:
        """Give *pod* its lines until it has ended. A stream that breaks is opened again behind its last line."""
        last, limit = "", LineLimit(time.monotonic())
        params = {"follow": "true", "container": _CONTAINER, "timestamps": "true"}
        while True:
            ended = pod.dead
            try:
                since = {"sinceTime": last} if last else {}
                async for piece in server.pieces(server.path("pods", pod.name, "log"), params | since):
                    limit.feed(piece)
                    last = await self._give(pod, limit, last)
                ended = True  # it follows the container to its end
            except ApiError as exc:
                log.debug("kubernetes.no_log pod=%s: %s", pod.name, exc)
                ended = ended or exc.status == 404
            except ApiLost as exc:
                log.debug("kubernetes.log_lost pod=%s: %s", pod.name, exc)
            rest, last = _behind(limit.rest(), last)
            if note := limit.note(time.monotonic(), idle=True):
                rest.insert(0, note)
            pod.on_lines(rest)
            if ended:
                break
            await asyncio.sleep(_AGAIN_S)
        pod.on_lines(None)

    async def _give(self, pod: "Pod", limit: LineLimit, last: str) -> str:
        """Give *pod* the lines that have come behind the one of *last*; return the stamp of the newest one."""
        while True:
            now = time.monotonic()
            lines, last = _behind(limit.take(now), last)
            if note := limit.note(now):
                lines.append(note)
            if lines:
                pod.on_lines(lines)
            pause = limit.wait()
            if not pause:
                return last
            await asyncio.sleep(pause)

    # --- what they are made of ---

    def _labels(self, pod: "Pod") -> dict[str, str]:
        worker = pod.worker
        theirs = worker.spec.labels
        usable = {k: v for k, v in theirs.items() if _LABEL_NAME.fullmatch(k) and _LABEL_VALUE.fullmatch(v)}
        return {
            **usable,
            _FUNCTION: worker.spec.name,
            "app.kubernetes.io/managed-by": "gpufaas",
            "app.kubernetes.io/component": "function",
            _INSTANCE: self._instance,
            _WORKER: str(worker.number),
        }

    def _secret(self, pod: "Pod", values: Mapping[str, bytes]) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": pod.name, "labels": self._labels(pod)},
            "type": "Opaque",
            "data": {name: base64.b64encode(value).decode() for name, value in values.items()},
        }

    def _manifest(self, pod: "Pod", has_secrets: bool) -> dict[str, Any]:
        worker, settings = pod.worker, pod.recipes.settings
        spec = worker.spec
        env = pod.recipes.container_env(worker, self.settings.gateway or settings.env.get("OPENFAAS_URL", ""))
        memory = {"memory": str(spec.memory_limit or worker.memory)}
        cpus = {"cpu": f"{round(spec.cpus * 1000)}m"} if spec.cpus else {}
        mounts: list[dict[str, Any]] = []
        volumes: list[dict[str, Any]] = []
        if has_secrets:
            mounts.append({"name": "secrets", "mountPath": SECRETS, "readOnly": True})
            # Readable to all: what user its image runs as is not known, and nobody else is in the pod.
            volumes.append({"name": "secrets", "secret": {"secretName": pod.name, "defaultMode": 0o444}})
        if spec.read_only:
            mounts.append({"name": "tmp", "mountPath": "/tmp"})
            volumes.append({"name": "tmp", "emptyDir": {}})
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod.name, "labels": self._labels(pod)},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": max(1, int(settings.term_grace_s)),
                "nodeSelector": dict(self.settings.node_selector),
                "imagePullSecrets": [{"name": name} for name in self.settings.pull_secrets],
                "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [
                    {
                        "name": _CONTAINER,
                        "image": spec.image,
                        # "$(NAME)" in a value would be replaced by that variable.
                        "env": [{"name": name, "value": value.replace("$(", "$$(")} for name, value in env.items()],
                        "ports": [{"name": "http", "containerPort": PORT}],
                        "resources": {"requests": memory | cpus, "limits": memory | cpus},
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "readOnlyRootFilesystem": spec.read_only,
                            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
                        },
                        "volumeMounts": mounts,
                    }
                ],
                "volumes": volumes,
            },
        }


class Pod:
    """`Running`: one pod."""

    death_known_s: Seconds = 3.0  # the kubelet looks once a second, and then tells

    def __init__(self, worker: Worker, recipes: Recipes, pods: Pods) -> None:
        self.worker = worker
        self.recipes = recipes
        self.waits_for = ""
        self.name = pods.name_of(worker)
        self.created = self.dead = self.has_secret = False
        self._pods = pods
        self._face = Face(worker)
        self._runs = self._told_all = self._closed = False
        self._deleted_with: float | None = None
        """The grace of the deletion that was asked for."""
        self._pull_error = ""
        self._stall: asyncio.TimerHandle | None = None

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
        return self._told_all and self._face.said_all()

    def limit_to(self, memory: Bytes) -> None:
        if self._runs and not self.worker.spec.memory_limit:
            self._pods.resize(self, memory)

    def in_use(self) -> Bytes:
        return 0  # its limit is moved by what has it, and nobody measures it

    def close(self) -> None:
        self._closed = True
        self._face.close()
        self._forget_stall()
        if self.created:
            self._pods.delete(self, 0 if self.dead else _KILL_GRACE_S)
        if self.dead:
            self._pods.forget(self)

    def _delete(self, grace_s: float) -> None:
        if self._deleted_with is not None and grace_s >= self._deleted_with:
            return
        self._deleted_with = grace_s
        if self.created:  # else when it is there
            self._pods.delete(self, grace_s)

    # --- what Kubernetes tells ---

    def on_lines(self, lines: list[str] | None) -> None:
        """Lines that it printed; None: there will be no more."""
        if lines is not None:
            self.worker.output.extend(lines)
        else:
            self._told_all = True
            self.worker.on_slot_lost()

    def on_seen(self, status: Mapping[str, Any]) -> None:
        if self.dead:
            return
        state = _state_of(status)
        if waiting := state.get("waiting"):
            reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
            if reason == "ErrImagePull":
                self._pull_error = message  # what comes after it says only that it was tried
            elif reason in _NEVER:
                self._fail(reason, message)
                return
        for condition in status.get("conditions") or ():
            if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
                self._await(f"to be given a machine: {condition.get('message', '')}")
        if ended := state.get("terminated"):
            self._died(_how(ended, status, self.worker), ran=True)
        elif status.get("phase") in ("Failed", "Succeeded"):
            self._died(f"Kubernetes ended its pod: {status.get('reason', '')}: {status.get('message', '')}")
        elif "running" in state and status.get("podIP") and not self._runs:
            self._runs = True
            self._await(f"to listen on port {PORT}")
            self._pods.follow(self)
            self._face.open(str(status["podIP"]), PORT)

    def on_gone(self, status: Mapping[str, Any]) -> None:
        """It is not in the list any more."""
        if not self.dead:
            ended = _state_of(status).get("terminated")
            self._died(_how(ended, status, self.worker) if ended else "its pod was deleted", ran=bool(ended))
        self._pods.forget(self)

    def _await(self, what: str) -> None:
        """It is given up if nothing comes of this. A pull is not: Kubernetes says when it fails, and may take long."""
        if what == self.waits_for:
            return
        self.waits_for = what
        self._forget_stall()
        self._stall = asyncio.get_running_loop().call_later(self.worker.spec.stall_s, self._stalled)

    def _stalled(self) -> None:
        if self.worker.ready_head is None and not self.dead:
            self.worker.kill(
                f"its load made no progress for {self.worker.spec.stall_s:g} s (its pod is {self.name}), and has yet "
                f"{self.waits_for}"
            )

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()

    def _fail(self, reason: str, message: str) -> None:
        """Its container will never run."""
        image = self.worker.spec.image
        if reason in ("InvalidImageName", "ImagePullBackOff", "ErrImageNeverPull"):
            text = (
                f"image {image} cannot be pulled ({reason}): {self._pull_error or message}: check its name and tag, "
                "and GPUFAAS_KUBERNETES_PULL_SECRETS if its registry wants a login"
            )
        else:
            text = f"Kubernetes does not start a container of {image} ({reason}): {message}"
        self.worker.on_failed(FailedHead(text, ""))
        self._died(text)

    def _died(self, how: str, *, ran: bool = False) -> None:
        """:param ran: its container began, so that there may be something that it printed"""
        self.dead = True
        self._forget_stall()
        if not self._runs and ran:
            self._pods.follow(self)  # it ended before it was seen to run
        elif not self._runs:
            self._told_all = True
        self.worker.on_reaped(how)


def _state_of(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for each in status.get("containerStatuses") or ():
        if each.get("name") == _CONTAINER:
            return each.get("state") or {}
    return {}


def _behind(stamped: list[str], last: str) -> tuple[list[str], str]:
    """Return the lines behind the stamp *last*, without stamps, and the last stamp: a broken stream repeats some."""
    lines = []
    for each in stamped:
        stamp, _, text = each.partition(" ")
        if not _STAMP.match(stamp):
            lines.append(each)  # the rest of a line that was cut
        elif not last or stamp > last:
            last = stamp
            lines.append(text)
    return lines, last


def _how(ended: Mapping[str, Any], status: Mapping[str, Any], worker: Worker) -> str:
    """Return in words how a container ended."""
    if ended.get("reason") == "OOMKilled":
        limit = format_bytes(worker.spec.memory_limit or worker.memory)
        return (
            f"{KILLED_FOR_MEMORY} at its limit of {limit} (limits.memory, or the annotation "
            "gpufaas.memory, says what it needs)"
        )
    how = f"its pod ended with exit status {ended.get('exitCode', '?')}"
    if status.get("reason"):  # Evicted, NodeLost, Preempting
        how += f": {status['reason']}: {status.get('message', '')}"
    return how


def _read(folder: str) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(Path(folder).iterdir()) if not each.name.startswith(".")}
