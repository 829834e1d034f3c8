"""Why a worker is gone, and what follows from it: the error that its calls get, the facts for the scheduler. Pure."""

from dataclasses import dataclass
from typing import Final

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError, LoadFailed, OutOfMemory, WorkerCrashed
from gpufaas_core.messages import CopyFailed, Event, Measured, WorkerExited
from gpufaas_core.model import Bytes, DeviceId
from gpufaas_core.units import format_bytes
from gpufaas_core.wire.heads import FailedHead
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
    """The worker was not started for want of open files, which is no fault of its function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """What follows from the end of a worker."""

    summary: str
    """Its failure, or how its process ended."""
    reason: str
    """For its callers: as `summary`, or why the node killed it; with the limit that it exceeded."""
    blameless: bool
    """It ended, or was not started, through no fault of its function."""
    asked_for: bool
    """The engine had it end, and knows."""
    place_again: bool
    """Its calls may run elsewhere, or here with more memory."""
    loading: bool
    """It had not been ready: no call has run on it."""
    facts: tuple[Event, ...]
    """What the scheduler is told."""
    kind: type[GpufaasError]
    text: str
    shows_output: bool

    def error(self, last_lines: str) -> GpufaasError:
        """Return what one of its calls gets. :param last_lines: of the worker's output, as far as that call may see"""
        return self.kind(self.text + (last_lines if self.shows_output else ""))


def end_of(
    spec: WorkerSpec, device: DeviceId, copy: int, before: WorkerState, how: str, cause: Cause,
    memory: Bytes, capacity: Bytes,
) -> WorkerEnd:  # fmt: skip
    """
    :param how: its process or container ended, in words
    :param memory: its reservation; *capacity* is its device's
    """
    failure, killed_for = cause.failure, cause.killed_for
    loading = before in (WorkerState.STARTING, WorkerState.WAITING)
    asked_for = before in (WorkerState.ENDING, WorkerState.GONE)
    ran_out = failure is not None and failure.out_of_memory
    summary = failure.summary if failure else how
    reason = killed_for or summary
    if ran_out:
        reason += (
            f" at its limit of {format_bytes(memory)} (the device has {format_bytes(capacity)}; "
            "the annotation gpufaas.memory says what it needs)"
        )
    # One that is held to limits.memory gets no more, whatever is reserved for it.
    again_with_more = loading and ran_out and not spec.memory_limit
    facts: tuple[Event, ...] = ()
    if loading:
        kind: type[GpufaasError] = OutOfMemory if ran_out else LoadFailed
        text = f"{spec.name}.{spec.namespace} did not load on {device}: {reason}"
        facts = (CopyFailed(spec.function, device, reason, again_with_more, copy, cause.no_files),)
    else:
        kind = OutOfMemory if ran_out or how.startswith(_KILLED_FOR_MEMORY) else WorkerCrashed
        text = f"the worker of {spec.name}.{spec.namespace} died: {reason}"
        if not asked_for:
            facts = (WorkerExited(spec.function, device, reason, copy),)
            if ran_out:
                facts = (Measured(spec.function, device, 0, copy, out_of_memory=True), *facts)
    return WorkerEnd(
        summary=summary, reason=reason, blameless=cause.no_files or (not failure and not killed_for and how in _KILLED),
        asked_for=asked_for, place_again=again_with_more or cause.no_files, loading=loading, facts=facts,
        kind=kind, text=text, shows_output=not (loading and failure),
    )  # fmt: skip
