"""How an error travels between services."""

from typing import Any, Final

from gpufaas_core import errors
from gpufaas_core._types import Seconds
from gpufaas_core.errors import GpufaasError, LoadFailed, NotAdmitted, Overloaded

_ERRORS: Final[dict[str, type[GpufaasError]]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, GpufaasError)
}


def told(error: GpufaasError) -> tuple[str, str, Seconds]:
    """Return the name of the nearest class of *error* that other services know, too; its message; when to try again."""
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
    return name, str(error), getattr(error, "retry_after_s", 1.0)


def make_error(name: str, message: str, retry_after_s: Seconds, details: dict[str, Any] | None = None) -> GpufaasError:
    """Return the error that was `told`; *details* are those of a `NotAdmitted`."""
    cls = _ERRORS.get(name, GpufaasError)
    if issubclass(cls, NotAdmitted):
        return cls(message, retry_after_s, details)
    if cls is Overloaded or cls is LoadFailed:
        return cls(message, retry_after_s)
    return cls(message)
