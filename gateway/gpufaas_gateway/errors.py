"""
`STATUS`: the one table from the platform's errors to HTTP statuses, and the headers of the answers that tell of them.

To find where a 503 of the gateway is made: look up the errors with that status in the table, and where they are raised.
Clients show the text of an error and decide by its status; `X-OpenFaaS-Internal` tells them that it was not the
function that answered (openfaas.md §5).
"""

import math
from collections.abc import Mapping
from typing import Final

from gpufaas_core.errors import (
    BadAnswer,
    BodyTooLarge,
    CallCancelled,
    CheckBroken,
    CorruptArtifact,
    DeadlineExceeded,
    FetchFailed,
    FunctionExists,
    GpufaasError,
    InvalidSpec,
    LeaseRefused,
    LoadFailed,
    NameTaken,
    NestedCall,
    NoDeviceFits,
    NoRoom,
    OutOfMemory,
    Overloaded,
    StorageAway,
    StorageFailed,
    UnknownArtifact,
    UnknownFunction,
    UnknownName,
    WorkerCrashed,
)

METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
"""Those that functions are called with."""


class MethodNotAllowed(InvalidSpec):
    """Functions are not given this method."""


class UnknownCall(GpufaasError):
    """There is no such call, or it is forgotten."""


class CallEnded(GpufaasError):
    """The call has ended: nothing of it can be changed."""


class Unavailable(GpufaasError):
    """The function is deployed, but its bundle is missing or corrupt: deploy it again."""


class Starting(Unavailable):
    """The platform is starting: its functions are not all loaded."""


class NotReady(GpufaasError):
    """Calls would find no device, or no worker."""


class BadQuery(InvalidSpec):
    """A value of the query is malformed."""


class BadSignature(GpufaasError):
    """The signature is missing, or not of this body."""


class BodyTooSlow(GpufaasError):
    """The body of a management request, or of a call that streams, did not come in time: send it again."""


class NotEmpty(GpufaasError):
    """The namespace has functions: remove them first."""


class QuotaExceeded(GpufaasError):
    """What is asked for is more than its namespace may have: remove something, or raise the quota."""


class NoWebSocket(GpufaasError):
    """The function does not speak WebSocket: call it with plain HTTP."""


STATUS: Final[Mapping[type[GpufaasError], int]] = {
    InvalidSpec: 400,
    NoDeviceFits: 400,
    UnknownArtifact: 400,  # named by a deploy; a route that serves artifacts answers 404 itself
    QuotaExceeded: 403,  # as Kubernetes answers it
    BadSignature: 403,  # and not 401, after which browsers and scripts try a password
    UnknownFunction: 404,
    UnknownCall: 404,
    UnknownName: 404,
    MethodNotAllowed: 405,
    BodyTooSlow: 408,
    FunctionExists: 409,
    NameTaken: 409,
    NotEmpty: 409,
    CallEnded: 409,
    BodyTooLarge: 413,
    BadQuery: 422,  # as OpenFaaS answers it
    Overloaded: 429,
    CallCancelled: 499,  # nginx's number for a caller that went away: nobody reads it but the logs and metrics
    NoWebSocket: 501,
    LoadFailed: 502,
    NestedCall: 508,  # it would wait for a call that waits for it; trying again is no use
    WorkerCrashed: 502,
    BadAnswer: 502,
    CheckBroken: 503,
    FetchFailed: 503,
    LeaseRefused: 503,
    NoRoom: 503,
    NotReady: 503,
    Unavailable: 503,
    DeadlineExceeded: 504,
    StorageAway: 503,
    StorageFailed: 507,
    OutOfMemory: 507,
    CorruptArtifact: 500,  # on our disk; an upload that is not what it says is the client's error: 400
    GpufaasError: 500,
}

INTERNAL_HEADER: Final = "X-OpenFaaS-Internal"
ERROR_HEADER: Final = "X-Gpufaas-Error"
"""What went wrong, for programs: statuses are fewer than reasons. Its values are `code_of`."""
_RETRY_AFTER_REFUSED_S: Final = 1.0  # the node is being restarted or replaced; its lease is over within seconds
_RETRY_AFTER_AWAY_S: Final = 5.0  # etcd elects a leader, or is started again, within seconds


def status_of(error: GpufaasError | type[GpufaasError]) -> int:
    """Return the HTTP status of *error*: that of the nearest class in its MRO that has one."""
    return STATUS[_row(error if isinstance(error, type) else type(error))]


def code_of(error: GpufaasError) -> str:
    """Return the name of the same class in kebab-case: ``deadline-exceeded``."""
    name = _row(type(error)).__name__
    return "".join(f"-{char.lower()}" if char.isupper() else char for char in name).lstrip("-")


def _row(error: type[GpufaasError]) -> type[GpufaasError]:
    return next(cls for cls in error.__mro__ if cls in STATUS)


def headers_of(error: GpufaasError | None = None) -> dict[str, str]:
    """Return the headers of an error answer that the platform makes; with ``Retry-After`` where that would help."""
    headers = {
        INTERNAL_HEADER: "gateway",
        "Content-Type": "text/plain; charset=utf-8",
        "X-Content-Type-Options": "nosniff",
    }
    if error is not None:
        headers[ERROR_HEADER] = code_of(error)
    if isinstance(error, Overloaded) or (isinstance(error, LoadFailed) and error.retry_after_s):
        headers["Retry-After"] = _whole_seconds(error.retry_after_s)
    elif isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(METHODS)
    elif isinstance(error, LeaseRefused | CheckBroken | Starting):
        headers["Retry-After"] = _whole_seconds(_RETRY_AFTER_REFUSED_S)
    elif isinstance(error, StorageAway):
        headers["Retry-After"] = _whole_seconds(_RETRY_AFTER_AWAY_S)
    return headers


def _whole_seconds(seconds: float) -> str:
    # The header has no fractions, and 0 invites the client to a loop.
    return str(max(1, math.ceil(seconds)))
