"""Calls that come through ASGI: their caller and their answer."""

from starlette.types import Receive, Send

from gpufaas_core.errors import CallCancelled
from gpufaas_gateway.answering import Answer
from gpufaas_gateway.call_body import Caller


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
