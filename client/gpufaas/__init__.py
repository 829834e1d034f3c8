"""
A gateway's API for Python programs.

::

    with gpufaas.Client() as client:
        answer = client.invoke("hello", {"text": "hi"})
        print(answer.json(), answer.timing.start, answer.timing.device)

`Client` blocks, `AsyncClient` has the same methods as coroutines; docs/client.md has examples of all.
"""

from gpufaas.answer import Answer, AsyncStream, Stream, Timing
from gpufaas.call_request import function_path
from gpufaas.client import DEFAULT_GATEWAY, DEFAULT_NAMESPACE, AsyncCall, AsyncClient, Call, Client
from gpufaas.errors import (
    BrokeOff,
    FunctionFailed,
    GatewayUnreachable,
    GpufaasError,
    NotAuthorised,
    NotEnded,
    QuotaExceeded,
    Refused,
    UnknownCall,
    UnknownFunction,
)
from gpufaas.gateway import Hints
from gpufaas.resources import (
    CallStatus,
    Deployment,
    Environment,
    Explanation,
    Function,
    Info,
    LogLine,
    Namespace,
    Node,
    Outcome,
    Plan,
    Quota,
    Secret,
    Status,
)

__all__ = [
    "DEFAULT_GATEWAY", "DEFAULT_NAMESPACE", "Answer", "AsyncCall", "AsyncClient", "AsyncStream", "BrokeOff", "Call",
    "CallStatus", "Client", "Deployment", "Environment", "Explanation", "Function", "FunctionFailed",
    "GatewayUnreachable", "GpufaasError", "Hints", "Info", "LogLine", "Namespace", "Node", "NotAuthorised", "NotEnded",
    "Outcome", "Plan", "Quota", "QuotaExceeded", "Refused", "Secret", "Status", "Stream", "Timing", "UnknownCall",
    "UnknownFunction", "function_path",
]  # fmt: skip
