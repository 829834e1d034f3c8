"""
A Kubernetes API server for tests: it speaks the real wire format, keeps objects in memory, and its kubelet "runs" pods
as processes of this machine, so that calls really reach them.

What a client can tell it by: LIST with the version of what was seen, WATCH with bookmarks, resumption by version and
410 where that was compacted, label selectors, deletion in two steps with a grace, collections, ``Status`` for what is
refused, logs with timestamps that can be followed, tokens. kubectl and Helm talk to it as to any other.

A pod has an address of its own in 127.0.0.0/8, which HOST tells its process; the program that stands for its image is
run; who takes more memory than its limit is killed. There is no isolation: secrets are files that secret_mount_path
tells.
"""

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

Object = dict[str, Any]
Key = tuple[str, str, str, str]
"""Group and version, plural, namespace, name."""

# What discovery tells of: plural, kind, whether it is in a namespace.
RESOURCES: dict[str, list[tuple[str, str, bool]]] = {
    "v1": [
        ("pods", "Pod", True), ("secrets", "Secret", True), ("services", "Service", True),
        ("configmaps", "ConfigMap", True), ("serviceaccounts", "ServiceAccount", True),
        ("persistentvolumeclaims", "PersistentVolumeClaim", True), ("namespaces", "Namespace", False),
    ],
    "apps/v1": [("deployments", "Deployment", True), ("daemonsets", "DaemonSet", True),
                ("statefulsets", "StatefulSet", True)],
    "policy/v1": [("poddisruptionbudgets", "PodDisruptionBudget", True)],
    "autoscaling/v2": [("horizontalpodautoscalers", "HorizontalPodAutoscaler", True)],
    "rbac.authorization.k8s.io/v1": [("roles", "Role", True), ("rolebindings", "RoleBinding", True)],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy", True), ("ingresses", "Ingress", True)],
    "monitoring.coreos.com/v1": [("servicemonitors", "ServiceMonitor", True)],
}  # fmt: skip
KINDS = {(version, plural): kind for version, all_ in RESOURCES.items() for plural, kind, _ in all_}


class KubernetesServer:
    """
    :param images: which program each image runs; others cannot be pulled
    """

    def __init__(self, images: Mapping[str, Sequence[str]] | None = None) -> None:
        self.images = dict(images or {})
        self.token = secrets.token_hex(8)
        self.namespace = "functions"
        self.url = ""
        self.objects: dict[Key, Object] = {}
        self.refusals: dict[tuple[str, str], tuple[int, str]] = {}
        """By method and plural: status and message that it gets instead of an answer."""
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.bookmark_s = 0.05
        self.gone_as_status = False
        """Whether a version that is too old is told by the answer's status, rather than by an event in it."""
        self.watched_from: list[int] = []
        self._version = 100
        self._compacted = 0
        self._log: list[tuple[int, str, Key, Object]] = []
        self._changed = asyncio.Condition()
        self._watches: set[web.StreamResponse] = set()
        self._pods: dict[Key, _Running] = {}
        self._addresses = 0
        self._network = 2 + secrets.randbelow(240)
        self._runner: web.AppRunner | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_created: Callable[[Object], None] = lambda _: None

    async def start(self) -> None:
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pod in self._pods.values():
            pod.kill(signal.SIGKILL)
            if pod.process is not None:
                await pod.process.communicate()  # to the end of its output: else it ends in a later test
        self.drop_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- for tests ---

    def pods(self, *, ended: bool = True) -> list[Object]:
        found = [each for (_, plural, _, _), each in self.objects.items() if plural == "pods"]
        return [each for each in found if ended or each["status"].get("phase") not in ("Failed", "Succeeded")]

    def secrets(self) -> list[Object]:
        return [each for (_, plural, _, _), each in self.objects.items() if plural == "secrets"]

    def pid_of(self, name: str) -> int | None:
        for (_, _, _, theirs), pod in self._pods.items():
            if theirs == name and pod.process is not None:
                return pod.process.pid
        return None

    def drop_watches(self) -> None:
        """Break the connection of everyone who watches, or follows a log."""
        for each in list(self._watches):
            transport = each._req.transport if each._req is not None else None
            if transport is not None:
                transport.abort()

    async def compact(self) -> None:
        """Forget the changes until now: a watch that resumes from before must list again."""
        await self._touch()
        self._compacted = self._version
        self._log.clear()

    async def delete_pod(self, name: str, grace_s: int = 1) -> None:
        """As somebody else would: kubectl delete."""
        key = next(each for each in self.objects if each[1] == "pods" and each[3] == name)
        await self._delete(key, grace_s)

    # --- requests ---

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        self.asked.append((request.method, request.path))
        if path == "version":
            return web.json_response({"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"})
        if request.headers.get("Authorization", f"Bearer {self.token}") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        parts = path.split("/")
        if (
            path in ("api", "apis")
            or (len(parts) == 2 and parts[0] == "api")
            or (len(parts) == 3 and parts[0] == "apis")
        ):
            return _discover(path)
        version, rest = (parts[1], parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, sub = (*rest, "", "", "")[:3]
        if (version, plural) not in KINDS:
            return _status(404, "NotFound", "the server could not find the requested resource")
        if refusal := self.refusals.get((request.method, plural)):
            return _status(refusal[0], "Forbidden" if refusal[0] == 403 else "InternalError", refusal[1])
        key = (version, plural, namespace, name)
        match request.method:
            case "GET" if sub == "log":
                return await self._logs(request, key)
            case "GET" if name:
                found = self.objects.get(key)
                return web.json_response(found) if found else _missing(key)
            case "GET" if request.query.get("watch") in ("1", "true"):
                return await self._watch(request, key)
            case "GET":
                return web.json_response(self._list(key, request.query.get("labelSelector", "")))
            case "POST":
                return await self._create(key, json.loads(await request.read()))
            case "PATCH" | "PUT":
                return await self._patch(request, key, sub)
            case "DELETE" if name:
                if key not in self.objects:
                    return _missing(key)
                await self._delete(key, _grace(request, self.objects[key]))
                return web.json_response(
                    self.objects.get(key) or {"kind": "Status", "apiVersion": "v1", "status": "Success"}
                )
            case "DELETE":
                for each in self._selected(key, request.query.get("labelSelector", "")):
                    await self._delete(each, _grace(request, self.objects[each]))
                return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        return _status(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _selected(self, key: Key, selector: str) -> list[Key]:
        return [each for each in self.objects if _within(each, key) and _matches(self.objects[each], selector)]

    def _list(self, key: Key, selector: str) -> Object:
        return {
            "kind": KINDS[key[:2]] + "List",
            "apiVersion": key[0],
            "metadata": {"resourceVersion": str(self._version)},
            # As the real one: kind and version of items in a list are left out.
            "items": [
                {k: v for k, v in self.objects[each].items() if k not in ("kind", "apiVersion")}
                for each in self._selected(key, selector)
            ],
        }

    async def _create(self, key: Key, made: Object) -> web.Response:
        version, plural, namespace, _ = key
        name = made["metadata"].get("name") or made["metadata"].get("generateName", "") + secrets.token_hex(3)
        key = (version, plural, namespace, name)
        if made.get("kind") != KINDS[version, plural]:
            return _status(400, "BadRequest", f"{made.get('kind')} in version {version} cannot be handled as {plural}")
        if key in self.objects:
            return _status(409, "AlreadyExists", f'{plural} "{name}" already exists')
        made["metadata"] |= {
            "name": name, "uid": secrets.token_hex(16), "creationTimestamp": _now(),
            **({"namespace": namespace} if namespace else {}),
        }  # fmt: skip
        self.on_created(made)
        if plural == "pods":
            made["status"] = {"phase": "Pending", "qosClass": "Guaranteed"}
        await self._store(key, made, "ADDED")
        if plural == "pods":
            self._do(self._run(key))
        return web.json_response(self.objects[key], status=201)

    async def _patch(self, request: web.Request, key: Key, sub: str) -> web.Response:
        if key not in self.objects:
            return _missing(key)
        change = json.loads(await request.read())
        changed = change if request.method == "PUT" else _merged(deepcopy(self.objects[key]), change)
        if sub == "resize" and key in self._pods:
            self._pods[key].limit = _memory(changed)
        await self._store(key, changed, "MODIFIED")
        return web.json_response(self.objects[key])

    async def _store(self, key: Key, made: Object, kind: str) -> None:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        if kind == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = made
        self._log.append((self._version, kind, key, deepcopy(made)))
        async with self._changed:
            self._changed.notify_all()

    async def _touch(self) -> None:
        """Something elsewhere in the cluster changed."""
        self._version += 1

    async def _watch(self, request: web.Request, key: Key) -> web.StreamResponse:
        selector = request.query.get("labelSelector", "")
        at = int(request.query.get("resourceVersion") or self._version)
        self.watched_from.append(at)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        if at < self._compacted:
            gone = _failure(410, "Expired", f"too old resource version: {at} ({self._compacted})")
            if self.gone_as_status:
                return web.json_response(gone, status=410)
            await answer.prepare(request)
            await answer.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return answer
        await answer.prepare(request)
        self._watches.add(answer)
        loop = asyncio.get_running_loop()
        end = loop.time() + int(request.query.get("timeoutSeconds", "300"))
        told = at
        try:
            while loop.time() < end:
                for version, kind, theirs, seen in [each for each in self._log if each[0] > at]:
                    at = version
                    if _within(theirs, key) and _matches(seen, selector):
                        event = json.dumps({"type": kind, "object": seen}, ensure_ascii=False)  # as Go's encoder
                        await answer.write(event.encode() + b"\n")
                        told = version
                if request.query.get("allowWatchBookmarks") == "true" and self._version > told:
                    told = at = self._version
                    mark = {
                        "kind": KINDS[key[:2]], "apiVersion": key[0],
                        "metadata": {"resourceVersion": str(at), "creationTimestamp": None},
                        **({"spec": {"containers": None}, "status": {}} if key[1] == "pods" else {}),
                    }  # fmt: skip
                    await answer.write(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(self.bookmark_s, max(0.0, end - loop.time()))), self._changed:
                        await self._changed.wait()
        except (ConnectionError, RuntimeError):
            pass
        finally:
            self._watches.discard(answer)
        return answer

    async def _logs(self, request: web.Request, key: Key) -> web.StreamResponse:
        pod = self._pods.get(key)
        if key not in self.objects:
            return _missing(key)
        if pod is None or not pod.started:
            why = f'container "function" in pod "{key[3]}" is waiting to start: ContainerCreating'
            return _status(400, "BadRequest", why)
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await answer.prepare(request)
        self._watches.add(answer)
        since = request.query.get("sinceTime", "")[:19]  # it knows whole seconds only
        at = 0
        try:
            while True:
                for stamp, line in pod.lines[at:]:
                    at += 1
                    if stamp[:19] >= since:
                        prefix = stamp.encode() + b" " if request.query.get("timestamps") == "true" else b""
                        await answer.write(prefix + line)
                if pod.said_all or request.query.get("follow") != "true":
                    break
                pod.more.clear()
                await pod.more.wait()
        except (ConnectionError, RuntimeError):
            pass
        finally:
            self._watches.discard(answer)
        return answer

    # --- the kubelet ---

    def _do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _say(self, key: Key, **status: Any) -> None:
        """Change the status of a pod that is still there."""
        if key in self.objects:
            made = deepcopy(self.objects[key])
            made["status"] |= status
            await self._store(key, made, "MODIFIED")

    async def _run(self, key: Key) -> None:
        spec = self.objects[key]["spec"]
        container = spec["containers"][0]
        wanted = spec.get("nodeSelector", {})
        if not wanted.items() <= {"kubernetes.io/hostname": "here"}.items():
            why = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
            unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
            await self._say(key, conditions=[unscheduled])
            return
        await self._say(key, conditions=[{"type": "PodScheduled", "status": "True"}])
        await self._say(key, containerStatuses=[_container(container, {"waiting": {"reason": "ContainerCreating"}})])
        if container["image"] not in self.images:
            error = f'failed to pull and unpack image "{container["image"]}": not found'
            for reason, message in (
                ("ErrImagePull", error), ("ImagePullBackOff", f'Back-off pulling image "{container["image"]}"')
            ):  # fmt: skip
                waiting = {"waiting": {"reason": reason, "message": message}}
                await self._say(key, containerStatuses=[_container(container, waiting)])
            return
        pod = self._pods[key] = _Running(_memory(self.objects[key]))
        self._addresses += 1
        address = f"127.{self._network}.{self._addresses >> 8}.{self._addresses & 255}"
        env = {each["name"]: each["value"].replace("$$(", "$(") for each in container.get("env", ())}
        env |= {"PATH": os.environ["PATH"], "HOST": address, "HOSTNAME": key[3]}
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                secret = self.objects[key[0], "secrets", key[2], volume["secret"]["secretName"]]
                folder = tempfile.TemporaryDirectory()
                pod.folders.append(folder)
                for name, value in secret["data"].items():
                    (Path(folder.name) / name).write_bytes(base64.b64decode(value))
                env["secret_mount_path"] = folder.name
        await pod.start(self.images[container["image"]], env)
        if key not in self.objects:  # deleted at once
            pod.kill(signal.SIGKILL)
        running = _container(container, {"running": {"startedAt": _now()}})
        ready = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
        await self._say(key, phase="Running", podIP=address, conditions=ready, containerStatuses=[running])
        code = await pod.ended()
        reason = "OOMKilled" if pod.out_of_memory else "Completed" if code == 0 else "Error"
        ended = {"terminated": {"exitCode": code if code >= 0 else 128 - code, "reason": reason, "finishedAt": _now()}}
        phase = "Succeeded" if code == 0 else "Failed"
        await self._say(key, phase=phase, containerStatuses=[_container(container, ended)])
        if key in self.objects and "deletionTimestamp" in self.objects[key]["metadata"]:
            await self._store(key, deepcopy(self.objects[key]), "DELETED")

    async def _delete(self, key: Key, grace_s: int) -> None:
        made = deepcopy(self.objects[key])
        pod = self._pods.get(key)
        alive = pod is not None and pod.alive
        if key[1] != "pods" or grace_s == 0 or not alive:
            await self._store(key, made, "DELETED")
            if pod is not None and alive:
                pod.kill(signal.SIGKILL)
            return
        assert pod is not None
        made["metadata"] |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": grace_s}
        await self._store(key, made, "MODIFIED")
        pod.kill(signal.SIGTERM)
        asyncio.get_running_loop().call_later(grace_s, pod.kill, signal.SIGKILL)


class _Running:
    """What stands for a container: a process, what it has printed, and its limit of memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lines: list[tuple[str, bytes]] = []
        self.more = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.out_of_memory = self.said_all = False
        self.folders: list[tempfile.TemporaryDirectory[str]] = []

    @property
    def started(self) -> bool:
        return self.process is not None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, program: Sequence[str], env: Mapping[str, str]) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *program, env=dict(env), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, cwd="/",
        )  # fmt: skip

    def kill(self, number: int) -> None:
        if self.alive:
            assert self.process is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    async def ended(self) -> int:
        assert self.process is not None
        guard = asyncio.ensure_future(self._guard())
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append((_now(precise=True), line))
            self.more.set()
        code = await self.process.wait()
        guard.cancel()
        self.said_all = True
        self.more.set()
        for each in self.folders:
            each.cleanup()
        return code

    async def _guard(self) -> None:
        """Kill it when it takes more than its limit: what the kernel does for a container."""
        assert self.process is not None
        page = os.sysconf("SC_PAGESIZE")
        while self.limit:
            with contextlib.suppress(OSError, IndexError):
                resident = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * page
                if resident > self.limit:
                    self.out_of_memory = True
                    self.kill(signal.SIGKILL)
                    return
            await asyncio.sleep(0.005)


def _now(*, precise: bool = False) -> str:
    now = datetime.now(UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%f000Z" if precise else "%Y-%m-%dT%H:%M:%SZ")


def _container(container: Object, state: Object) -> Object:
    return {
        "name": container["name"], "image": container["image"], "imageID": "", "ready": "running" in state,
        "restartCount": 0, "state": state, "lastState": {},
    }  # fmt: skip


def _memory(pod: Object) -> int:
    return int(pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory", "0"))


def _grace(request: web.Request, made: Object) -> int:
    given = request.query.get("gracePeriodSeconds")
    return int(given) if given is not None else int(made.get("spec", {}).get("terminationGracePeriodSeconds", 30))


def _within(key: Key, asked: Key) -> bool:
    return key[:2] == asked[:2] and asked[2] in ("", key[2])


def _matches(made: Object, selector: str) -> bool:
    labels = made["metadata"].get("labels") or {}
    return all(
        labels.get(name.rstrip("=")) == value for name, _, value in map(_halves, filter(None, selector.split(",")))
    )


def _halves(term: str) -> tuple[str, str, str]:
    return term.partition("=")


def _merged(old: Any, change: Any) -> Any:
    """Strategic merge, as far as it goes: lists of named things by name, other lists whole."""
    if isinstance(old, dict) and isinstance(change, dict):
        for name, value in change.items():
            if value is None:
                old.pop(name, None)
            else:
                old[name] = _merged(old[name], value) if name in old else value
        return old
    if (
        isinstance(old, list)
        and isinstance(change, list)
        and all(isinstance(e, dict) and "name" in e for e in old + change)
    ):
        by_name = {each["name"]: each for each in old}
        for each in change:
            by_name[each["name"]] = _merged(by_name.get(each["name"], {}), each)
        return list(by_name.values())
    return change


def _failure(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code,
    }  # fmt: skip


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_failure(code, reason, message), status=code)


def _missing(key: Key) -> web.Response:
    return _status(404, "NotFound", f'{key[1]} "{key[3]}" not found')


def _discover(path: str) -> web.Response:
    if path == "api":
        return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
    groups = [each for each in RESOURCES if "/" in each]
    if path == "apis":
        listed = [
            {
                "name": each.partition("/")[0],
                "versions": [{"groupVersion": each, "version": each.partition("/")[2]}],
                "preferredVersion": {"groupVersion": each, "version": each.partition("/")[2]},
            }
            for each in groups
        ]
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
    version = path.partition("/")[2]
    if version not in RESOURCES:
        return _status(404, "NotFound", "the server could not find the requested resource")
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": inside, "verbs": verbs}
        for plural, kind, inside in RESOURCES[version]
    ]
    return web.json_response(
        {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    )
