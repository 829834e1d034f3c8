"""
Errors between a program and a gateway.

::

    GpufaasError               the root of all errors of gpufaas
    ├── GatewayUnreachable     nothing answers at this URL, or something that is no gateway
    ├── NotAuthorised          the gateway needs a login, or refuses this one
    ├── Refused                the gateway refuses the request
    │   ├── UnknownFunction    the function is not deployed
    │   ├── UnknownCall        the call was never accepted, or ended too long ago
    │   └── QuotaExceeded      the quota of the namespace is used up
    ├── BrokeOff               the answer of a function broke off in the middle
    ├── FunctionFailed         the function answered with a status of 400 or more
    └── NotEnded               an asynchronous call did not end within the time limit
"""

from collections.abc import Mapping
from typing import Any

from gpufaas_core.errors import GpufaasError

__all__ = [
    "BrokeOff", "FunctionFailed", "GatewayUnreachable", "GpufaasError", "NotAuthorised", "NotEnded", "QuotaExceeded",
    "Refused", "UnknownCall", "UnknownFunction",
]  # fmt: skip


class GatewayUnreachable(GpufaasError):
    pass


class NotAuthorised(GpufaasError):
    pass


class BrokeOff(GpufaasError):
    pass


class NotEnded(GpufaasError):
    pass


class FunctionFailed(GpufaasError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the function answered {status}" + (f": {text}" if text else ""))
        self.status = status


class Refused(GpufaasError):
    """
    `status` is the HTTP status; `code` names the reason (``deadline-exceeded``; empty: the gateway does not say);
    `retry_after_s` is the time after which to try again, None: trying again does not help; `details` is what it says
    beside that, as what a function has of what its call asked for.
    """

    def __init__(
        self, status: int, text: str, headers: Mapping[str, str] | None = None, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(text or f"the gateway answered {status} without saying why")
        headers = headers or {}
        after = headers.get("Retry-After", "")
        self.status = status
        self.code = headers.get("X-Gpufaas-Error", "")
        self.retry_after_s = float(after) if after.isdecimal() else None
        self.details = details or {}


class UnknownFunction(Refused):
    pass


class UnknownCall(Refused):
    pass


class QuotaExceeded(Refused):
    pass
