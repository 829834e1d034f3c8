"""By what name an error travels between services."""

from typing import Final

from gpufaas_core._types import Seconds
from gpufaas_core.errors import (
    BadAnswer,
    CallCancelled,
    CheckBroken,
    CorruptArtifact,
    DeadlineExceeded,
    FetchFailed,
    GpufaasError,
    InvalidSpec,
    LeaseRefused,
    LoadFailed,
    NestedCall,
    NoDeviceFits,
    NoRoom,
    OutOfMemory,
    Overloaded,
    StorageAway,
    StorageFailed,
    UnknownArtifact,
    UnknownFunction,
    WorkerCrashed,
)

_ERRORS: Final[dict[str, type[GpufaasError]]] = {
    each.__name__: each
    for each in (
        BadAnswer, CallCancelled, CheckBroken, CorruptArtifact, DeadlineExceeded, FetchFailed, GpufaasError,
        InvalidSpec, LeaseRefused, LoadFailed, NestedCall, NoDeviceFits, NoRoom, OutOfMemory, Overloaded, StorageAway,
        StorageFailed, UnknownArtifact, UnknownFunction, WorkerCrashed,
    )
}  # fmt: skip


def error_name(error: GpufaasError) -> str:
    """Return by what name *error* travels: of its nearest class that the other end knows."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)


def make_error(name: str, message: str, retry_after_s: Seconds = 1.0) -> GpufaasError:
    cls = _ERRORS.get(name, GpufaasError)
    if cls is Overloaded or cls is LoadFailed:
        return cls(message, retry_after_s)
    return cls(message)
