"""Calls that come through ASGI: their caller, their answer, and what is said of a bug."""

import logging

from starlette.types import Receive, Scope, Send

from gpufaas_core.errors import CallCancelled
from gpufaas_gateway.call_body import Caller
from gpufaas_gateway.request import Answer

log = logging.getLogger("gateway")


def log_failure(scope: Scope) -> None:
    """Log the exception that is being handled: it is no answer to the request of *scope*, but a bug."""
    log.exception("a request failed in the platform itself: %s", scope.get("path"))


class AsgiCaller(Caller):
    """The client of an HTTP request."""

    __slots__ = ("_receive",)

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def receive(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise CallCancelled("the caller went away")
        return message.get("body", b""), message.get("more_body", False)


async def send_whole(send: Send, answer: Answer) -> None:
    """Send an answer that does not stream."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": bytes(answer.body)})
