"""
What can go wrong between a program and a gateway.

::

    GpufaasError               of the whole platform
    ├── GatewayUnreachable     nothing answers there, or not as a gateway does
    ├── NotAuthorised          the gateway wants to know who asks, or does not let them
    ├── Refused                the gateway answered, and said no
    │   ├── UnknownFunction    it is not deployed
    │   ├── UnknownCall        it was never accepted, or is forgotten
    │   └── QuotaExceeded      the namespace may not have more
    ├── BrokeOff               a function's answer had begun, and has no end
    ├── FunctionFailed         the function answered, with a status of 400 or more
    └── NotEnded               an asynchronous call did not end in the time that was given
"""

from collections.abc import Mapping

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
    `status` is that of HTTP; `code` says more (``deadline-exceeded``; empty: the gateway does not); `retry_after_s` is
    when to ask again, None where that is no use.
    """

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text or f"the gateway answered {status} without saying why")
        headers = headers or {}
        after = headers.get("Retry-After", "")
        self.status = status
        self.code = headers.get("X-Gpufaas-Error", "")
        self.retry_after_s = float(after) if after.isdecimal() else None


class UnknownFunction(Refused):
    pass


class UnknownCall(Refused):
    pass


class QuotaExceeded(Refused):
    pass
