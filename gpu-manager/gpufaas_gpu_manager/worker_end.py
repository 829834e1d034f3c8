"""Why a worker is gone, and what follows from it: the error that its calls get, the facts for the scheduler. Pure."""

from dataclasses import dataclass
from typing import Final

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError, LoadFailed, OutOfMemory, WorkerCrashed
from gpufaas_core.frames import FailedHead
from gpufaas_core.messages import CopyFailed, Event, Measured, WorkerExited
from gpufaas_core.model import Bytes, DeviceId
from gpufaas_core.units import format_bytes
from gpufaas_gpu_manager.worker_state import WorkerState

_KILLED_FOR_MEMORY: Final = "it was killed: out of memory"
_KILLED: Final = tuple(f"it ended with signal {name}" for name in ("SIGKILL", "SIGTERM"))
"""By somebody else: what a program does wrong ends it with other signals."""


def killed_for_memory(limit: Bytes) -> str:
    """Return in words how a container or pod ended that took more than *limit*."""
    return (
        f"{_KILLED_FOR_MEMORY} at its limit of {format_bytes(limit)} (limits.memory, or the annotation "
        "gpufaas.memory, says what it needs)"
    )


@dataclass(slots=True)
class Cause:
    """What is known of why a worker ends, before it has ended."""

    failure: FailedHead | None = None
    """What it said itself, or what was seen of it."""
    killed_for: str = ""
    """Why the node killed it."""
    no_files: bool = False
    """It was not started for want of open files, which is no fault of its function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    spec: WorkerSpec
    device: DeviceId
    copy: int
    memory: Bytes
    """What was reserved for it."""
    capacity: Bytes
    """Of its device."""
    before: WorkerState
    how: str
    """How its process or container ended, in words."""
    cause: Cause

    @property
    def summary(self) -> str:
        return self.cause.failure.summary if self.cause.failure else self.how

    @property
    def blameless(self) -> bool:
        """It ended, or was not started, through no doing of its function."""
        killed = self.cause.failure is None and not self.cause.killed_for and self.how in _KILLED
        return killed or self.cause.no_files

    @property
    def asked_for(self) -> bool:
        """The engine had it end, and knows."""
        return self.before in (WorkerState.ENDING, WorkerState.GONE)

    @property
    def loading(self) -> bool:
        return self.before in (WorkerState.STARTING, WorkerState.WAITING)

    @property
    def ran_out(self) -> bool:
        return self.cause.failure is not None and self.cause.failure.out_of_memory

    @property
    def again_with_more(self) -> bool:
        # One that is held to limits.memory gets no more, whatever is reserved for it.
        return self.loading and self.ran_out and not self.spec.memory_limit

    @property
    def place_again(self) -> bool:
        """Whether its calls may run elsewhere, or here with more memory."""
        return self.again_with_more or self.cause.no_files

    @property
    def reason(self) -> str:
        reason = self.cause.killed_for or self.summary
        if self.ran_out:
            reason += (
                f" at its limit of {format_bytes(self.memory)} (the device has "
                f"{format_bytes(self.capacity)}; the annotation gpufaas.memory says what it needs)"
            )
        return reason

    def error(self, last_lines: str) -> GpufaasError:
        """
        Return what its calls get.

        :param last_lines: what it printed last
        """
        name = f"{self.spec.name}.{self.spec.namespace}"
        if self.loading:
            text = f"{name} did not load on {self.device}: {self.reason}{'' if self.cause.failure else last_lines}"
            return (OutOfMemory if self.ran_out else LoadFailed)(text)
        out_of_memory = self.ran_out or self.how.startswith(_KILLED_FOR_MEMORY)
        text = f"the worker of {name} died: {self.reason}{last_lines}"
        return (OutOfMemory if out_of_memory else WorkerCrashed)(text)

    def facts(self) -> list[Event]:
        """Return what the scheduler is told."""
        function, device, copy = self.spec.function, self.device, self.copy
        if self.asked_for:
            return []
        if self.loading:
            return [CopyFailed(function, device, self.reason, self.again_with_more, copy, self.cause.no_files)]
        exited = WorkerExited(function, device, self.reason, copy)
        return [Measured(function, device, 0, copy, out_of_memory=True), exited] if self.ran_out else [exited]
