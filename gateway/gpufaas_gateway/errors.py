"""
`STATUS`, the one table from errors to HTTP statuses, and the headers of error answers.

To find where the gateway makes a 503: find the errors with that status in the table, then where they are raised.
Clients show the text of an error and decide by its status. `X-OpenFaaS-Internal` says that the platform answered, not
the function.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from gpufaas_core import errors as core
from gpufaas_core.errors import GpufaasError

METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
"""The methods with which functions can be called."""


class MethodNotAllowed(core.InvalidSpec):
    """Functions cannot be called with this method."""


class UnknownCall(GpufaasError):
    """There is no such call, or it ended too long ago."""


class CallEnded(GpufaasError):
    """The call has ended: it cannot be cancelled."""


class Unavailable(GpufaasError):
    """The function is deployed, but its bundle is missing or corrupt: deploy it again."""


class Starting(Unavailable):
    """The platform is starting: its functions are not all loaded."""


class NotReady(GpufaasError):
    """No device has joined, or the node cannot start workers."""


class BadQuery(core.InvalidSpec):
    """A value of the query is malformed."""


class BodyTooSlow(GpufaasError):
    """The body did not arrive in time: send it again."""


class NotEmpty(GpufaasError):
    """The namespace has functions: remove them first."""


class QuotaExceeded(GpufaasError):
    """The namespace would exceed its quota: remove something, or raise the quota."""


class CannotRollBack(GpufaasError):
    """There is no earlier revision, or its files were removed."""


class Overtaken(GpufaasError):
    """Another gateway changed the function at the same moment: try again."""


class KeptByPlan(GpufaasError):
    """The plan in force says how many copies the function has: take it out of the plan first."""


class NoWebSocket(GpufaasError):
    """The function does not speak WebSocket: call it with plain HTTP."""


STATUS: Final[Mapping[type[GpufaasError], int]] = {
    core.InvalidSpec: 400,
    core.NoDeviceFits: 400,
    core.BadPlan: 400,
    core.UnknownArtifact: 400,  # a deployment names it
    QuotaExceeded: 403,  # as Kubernetes answers it
    core.UnknownFunction: 404,
    UnknownCall: 404,
    core.UnknownName: 404,
    core.UnknownPlan: 404,
    MethodNotAllowed: 405,
    BodyTooSlow: 408,
    core.FunctionExists: 409,
    core.NameTaken: 409,
    core.PlanConflict: 409,
    NotEmpty: 409,
    CallEnded: 409,
    CannotRollBack: 409,
    KeptByPlan: 409,
    Overtaken: 409,
    core.BodyTooLarge: 413,
    BadQuery: 422,  # as OpenFaaS answers it
    core.Unsatisfiable: 422,
    core.NotAdmitted: 429,
    core.Overloaded: 429,
    core.CallCancelled: 499,  # nginx's number for a client that hung up; only logs and metrics show it
    NoWebSocket: 501,
    core.LoadFailed: 502,
    core.NestedCall: 508,  # it would wait for a call that waits for it
    core.WorkerCrashed: 502,
    core.BadAnswer: 502,
    core.CheckBroken: 503,
    core.FetchFailed: 503,
    core.GrantRefused: 503,
    core.TooLate: 503,
    core.NoRoom: 503,
    NotReady: 503,
    core.Preempted: 503,
    Unavailable: 503,
    core.DeadlineExceeded: 504,
    core.StorageAway: 503,
    core.StorageFailed: 507,
    core.OutOfMemory: 507,
    core.CorruptArtifact: 500,  # on our disk; an upload with another digest is 400
    GpufaasError: 500,
}

INTERNAL_HEADER: Final = "X-OpenFaaS-Internal"
ERROR_HEADER: Final = "X-Gpufaas-Error"
"""The reason for programs, finer than the status: `code_of`."""
_PASSING: Final = (
    core.CheckBroken, core.FetchFailed, core.GrantRefused, NotReady, core.Preempted, Starting,
)  # fmt: skip
"""They pass by themselves. What people have to change does not."""
RETRY_AFTER_REFUSED_S: Final = 1.0  # a node that restarts is back, or replaced, within seconds
_RETRY_AFTER_AWAY_S: Final = 5.0  # etcd elects a leader, or restarts, within seconds


def status_of(error: GpufaasError | type[GpufaasError]) -> int:
    """Return the HTTP status of *error*, from the first class in its MRO that is in `STATUS`."""
    return STATUS[_row(error if isinstance(error, type) else type(error))]


def code_of(error: GpufaasError) -> str:
    """Return the name of the same class in kebab-case: ``deadline-exceeded``."""
    name = _row(type(error)).__name__
    return "".join(f"-{char.lower()}" if char.isupper() else char for char in name).lstrip("-")


def _row(error: type[GpufaasError]) -> type[GpufaasError]:
    return next(cls for cls in error.__mro__ if cls in STATUS)


def headers_of(error: GpufaasError | None = None) -> dict[str, str]:
    """Return the headers of the platform's answer to *error*, with ``Retry-After`` if another attempt may succeed."""
    headers = {
        INTERNAL_HEADER: "gateway",
        "Content-Type": "text/plain; charset=utf-8",
        "X-Content-Type-Options": "nosniff",
    }
    if error is not None:
        headers[ERROR_HEADER] = code_of(error)
    if isinstance(error, core.NotAdmitted):
        if error.details is not None:
            headers["Content-Type"] = "application/json"
        if error.retry_after_s or not isinstance(error, core.Unsatisfiable):
            headers["Retry-After"] = _whole_seconds(error.retry_after_s or RETRY_AFTER_REFUSED_S)
    elif isinstance(error, core.Overloaded) or (isinstance(error, core.LoadFailed) and error.retry_after_s):
        headers["Retry-After"] = _whole_seconds(error.retry_after_s)
    elif isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(METHODS)
    elif isinstance(error, _PASSING):
        headers["Retry-After"] = _whole_seconds(RETRY_AFTER_REFUSED_S)
    elif isinstance(error, core.StorageAway):
        headers["Retry-After"] = _whole_seconds(_RETRY_AFTER_AWAY_S)
    return headers


def body_of(error: GpufaasError) -> bytes:
    """Return the body of the answer to *error*: its text, or JSON if it has details."""
    details = getattr(error, "details", None)
    return str(error).encode() if details is None else msgspec.json.encode({"error": str(error), **details})


def _whole_seconds(seconds: float) -> str:
    # The header has no fractions, and with 0 clients would repeat at once.
    return str(max(1, math.ceil(seconds)))
