"""The error that the caller of a rejected call gets."""

from collections.abc import Mapping
from typing import Final

from gpufaas_core import messages as m
from gpufaas_core.errors import (
    DeadlineExceeded,
    GpufaasError,
    GrantRefused,
    InvalidSpec,
    LoadFailed,
    NestedCall,
    NoRoom,
    NotAdmitted,
    OutOfMemory,
    Overloaded,
    TooLate,
    UnknownFunction,
    Unsatisfiable,
)

_ERRORS: Final[Mapping[str, type[GpufaasError]]] = {
    "deadline": DeadlineExceeded,
    "unknown_function": UnknownFunction,
    "removed": UnknownFunction,
    "no_device": InvalidSpec,
    "no_room": NoRoom,
    "refused": GrantRefused,
    "out_of_memory": OutOfMemory,
    "nested": NestedCall,
    "policy": NotAdmitted,
    "overloaded": Overloaded,
    "load_failed": LoadFailed,
}
_BY_STATUS: Final[Mapping[int, type[NotAdmitted]]] = {422: Unsatisfiable, 503: TooLate}
"""Of calls that a policy refuses; `NotAdmitted` for any other status."""


def rejection(command: m.RejectCall) -> GpufaasError:
    """Return the error that *command* is for its caller."""
    kind = _ERRORS.get(command.code, GpufaasError)
    if kind is NotAdmitted:
        kind = _BY_STATUS.get(command.status, NotAdmitted)
        return kind(command.message, command.retry_after_s, command.details)
    return kind(command.message, command.retry_after_s) if kind in (Overloaded, LoadFailed) else kind(command.message)
