"""The HTTP front of calls: ``/function/NAME[/path]``, a plain ASGI application. `calls` runs them."""

import logging
from collections.abc import Callable
from typing import Final

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gpufaas_core.errors import CallCancelled
from gpufaas_gateway.origins import SCOPE_KEY
from gpufaas_gateway.request import Answer, BrokenAnswer, Request, Run
from gpufaas_gateway.whole_messages import cycle_of, send_answer, take_body, tell_gone

log = logging.getLogger("gateway")

PREFIX: Final = b"/function/"


class Invocations:
    """The ASGI application."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, _, path = scope["raw_path"][len(PREFIX) :].partition(b"/")
        method: str = scope["method"]
        cycle = cycle_of(send)
        body = None if cycle is None else take_body(cycle)
        request = Request(
            name.decode("latin-1"), method, "/" + path.decode("latin-1"), scope["query_string"], scope["headers"], body,
            AsgiCaller(receive, cycle), scope.get("client"), scope.get(SCOPE_KEY),
        )  # fmt: skip
        try:
            try:
                answer = await self._run(request)
            except CallCancelled:
                return
            stream = answer.stream
            if stream is None:
                if cycle is not None and send_answer(cycle, answer):
                    return
                await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
                await send({"type": "http.response.body", "body": answer.body})
                return
            with stream:
                await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
                if method == "HEAD":
                    stream.cancel()  # an answer to HEAD has no body, and the function's may have no end
                else:
                    while (piece := await stream.chunk()) is not None:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except BrokenAnswer:
            raise  # the server closes the connection, which is the message
        except Exception:
            log_failure(scope)
            raise


def log_failure(scope: Scope) -> None:
    """Log the exception that is being handled: it is no answer to the request of *scope*, but a bug."""
    log.exception("a request failed in the platform itself: %s", scope.get("path"))


class AsgiCaller:
    """`Caller`: the client of an HTTP request."""

    __slots__ = ("_cycle", "_receive")

    def __init__(self, receive: Receive, cycle: RequestResponseCycle | None = None) -> None:
        self._receive = receive
        self._cycle = cycle

    async def receive(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise CallCancelled("the caller went away")
        return message.get("body", b""), message.get("more_body", False)

    def on_gone(self, tell: Callable[[], None] | None) -> bool:
        return self._cycle is not None and tell_gone(self._cycle, tell)


async def send_whole(send: Send, answer: Answer) -> None:
    """Send an answer that does not stream."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body})
