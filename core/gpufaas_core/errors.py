"""
The errors of the platform, named for what the caller can do about them.

They know no HTTP: `gpufaas_gateway.errors` has the one table from errors to statuses. The OpenAPI document shows the
first paragraph of their docstrings to users.
"""

from typing import Any

from gpufaas_core._types import Seconds


class GpufaasError(Exception):
    """The base of all errors. The message tells the user what was asked, what is the case, and what to do."""


class InvalidSpec(GpufaasError):
    """What is asked for is malformed: correct it, then ask again."""


class NoDeviceFits(InvalidSpec):
    """The function needs more memory than any device has: use a smaller model, or a larger device."""


class UnknownFunction(GpufaasError):
    """The function is not deployed: deploy it first."""


class FunctionExists(GpufaasError):
    """The function is deployed already: update it (PUT), or remove it first."""


class UnknownName(GpufaasError):
    """There is no namespace, secret or node of this name."""


class NameTaken(GpufaasError):
    """A namespace or secret of this name exists: update it, or remove it first."""


class BadPlan(InvalidSpec):
    """The plan cannot be: the message names its first mistake."""


class UnknownPlan(GpufaasError):
    """There is no plan of this version, or it is not kept any more."""


class PlanConflict(GpufaasError):
    """Another plan was applied in between: look at it, then apply again."""


class BodyTooLarge(GpufaasError):
    """The body is over its limit."""


class Overloaded(GpufaasError):
    """A queue or a quota of calls is full: try again later."""

    def __init__(self, message: str, retry_after_s: Seconds = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(GpufaasError):
    """The caller's time limit is over."""


class CallCancelled(GpufaasError):
    """The caller hung up."""


class LoadFailed(GpufaasError):
    """The function did not load. The message has the end of its stderr."""

    def __init__(self, message: str, retry_after_s: Seconds = 0.0) -> None:
        """:param retry_after_s: until it is tried again at the earliest; 0.0: not known"""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfMemory(GpufaasError):
    """A call, or a load on the largest device, needs more memory than it may use."""


class WorkerCrashed(GpufaasError):
    """The worker ended during the call. The message has the end of its stderr."""


class CheckBroken(GpufaasError):
    """The check of a deployment was ended from outside, without a result: deploy again."""


class BadAnswer(GpufaasError):
    """The function's answer cannot be passed on: correct the function."""


class GrantRefused(GpufaasError):
    """The node took nothing of the call: it may be placed again."""


class NoRoom(GpufaasError):
    """Copies that are never evicted hold the memory: lower their minimum."""


class NotAdmitted(GpufaasError):
    """The scheduling policy refused the call: the message says why."""

    def __init__(self, message: str, retry_after_s: Seconds = 0.0, details: dict[str, Any] | None = None) -> None:
        """
        :param retry_after_s: until the caller may try again; 0.0: it is not said
        :param details: what the caller is told in JSON beside the message
        """
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.details = details


class Unsatisfiable(NotAdmitted):
    """Nothing that is there is what the call asks for: ask for less."""


class TooLate(NotAdmitted):
    """The call could not be answered in time: call again later."""


class Preempted(GpufaasError):
    """The scheduling policy stopped the call for others: call again."""


class NestedCall(GpufaasError):
    """A call of a function by a function can never start: the message says why."""


class CorruptArtifact(GpufaasError):
    """Bytes on disk or on the wire have another digest than expected."""


class UnknownArtifact(GpufaasError):
    """There are no bytes of this digest: upload them."""


class FetchFailed(GpufaasError):
    """Another node has the bytes, but they could not be read: try again."""


class StorageFailed(GpufaasError):
    """A write failed: the data directory is full or read-only, or etcd refused it."""


class StorageAway(StorageFailed):
    """The storage does not answer: try again later."""
