"""A worker that is a pod: what the scheduler's commands ask of it, and what Kubernetes tells of it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from lightkube.models.core_v1 import ContainerState, ContainerStateTerminated, PodStatus

from gpufaas_core.frames import FailedHead
from gpufaas_core.model import Bytes, Seconds
from gpufaas_gpu_manager.launch.container import PORT
from gpufaas_gpu_manager.launch.pod_manifest import CONTAINER
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.launch.served import Face
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_end import killed_for_memory

KILL_GRACE_S: Final = 1
"""Not 0: that removes the pod from the API server before its process is dead and its memory free."""
_NOT_PULLED: Final = frozenset({"InvalidImageName", "ImagePullBackOff", "ErrImageNeverPull"})
_NOT_STARTED: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
"""Why a container waits in vain. ErrImagePull is left out: the kubelet tries once more, and then backs off."""


class PodHost(Protocol):
    """What a pod asks of Kubernetes (kubernetes.Pods); only `create` waits for an answer."""

    async def create(self, pod: "WorkerPod", values: Mapping[str, bytes]) -> None:
        """:param values: of its secrets, by name"""

    def delete(self, pod: "WorkerPod", grace_s: float) -> None: ...

    def forget(self, pod: "WorkerPod") -> None:
        """Nothing of *pod* is left."""

    def resize(self, pod: "WorkerPod", memory: Bytes) -> None: ...

    def follow(self, pod: "WorkerPod") -> None:
        """Give *pod* its lines until it has ended."""


class WorkerPod:
    """`Running`: one pod."""

    death_known_s: Seconds = 3.0  # the kubelet looks once a second, and then reports

    def __init__(self, worker: Worker, recipes: Recipes, pods: PodHost, name: str) -> None:
        self.worker = worker
        self.recipes = recipes
        self.waits_for = ""
        self.name = name
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
        self._delete(KILL_GRACE_S)

    def said_all(self) -> bool:
        return self._told_all and self._face.said_all()

    def limit_to(self, memory: Bytes) -> None:
        if self._runs and not self.worker.spec.memory_limit:
            self._pods.resize(self, memory)

    def in_use(self) -> Bytes:
        return 0  # its limit follows its reservation, and its use is not measured

    def close(self) -> None:
        self._closed = True
        self._face.close()
        self._forget_stall()
        if self.created:
            self._pods.delete(self, 0 if self.dead else KILL_GRACE_S)
        if self.dead:
            self._pods.forget(self)

    def _delete(self, grace_s: float) -> None:
        if self._deleted_with is not None and grace_s >= self._deleted_with:
            return
        self._deleted_with = grace_s
        if self.created:  # else `start` does it
            self._pods.delete(self, grace_s)

    # --- what Kubernetes tells ---

    def on_lines(self, lines: list[str]) -> None:
        self.worker.output.extend(lines)

    def on_told_all(self) -> None:
        """There will be no more lines."""
        self._told_all = True
        self.worker.on_slot_lost()

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
            self._face.open(status.podIP, PORT)

    def on_gone(self, status: PodStatus) -> None:
        """It is not in the list any more."""
        if not self.dead:
            ended = _state_of(status).terminated
            self._died(_how(ended, status, self.worker) if ended else "its pod was deleted", ran=bool(ended))
        self._pods.forget(self)

    def _await(self, what: str) -> None:
        """Give it up if *what* takes too long. Pulls have no such limit: Kubernetes reports when one fails."""
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
        self._forget_stall()
        if not self._runs and ran:
            self._pods.follow(self)  # it ended before it was seen to run
        elif not self._runs:
            self._told_all = True
        self.worker.on_reaped(how)


def _state_of(status: PodStatus) -> ContainerState:
    states = (each.state for each in status.containerStatuses or () if each.name == CONTAINER)
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
