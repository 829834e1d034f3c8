"""
Requests and answers in one piece, without ASGI's messages: a quick call needs six coroutines and five dicts less.

The `send` that the server (uvicorn) gives an application is a method of the request's cycle: `cycle_of` finds it.
Everything here may say no: then `receive` and `send` do the same, piece by piece.
"""

from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gpufaas_core.units import Bytes, KiB
from gpufaas_gateway.request import Answer

_TOLD: Final = "gpufaas_told"
"""The attribute of a cycle with what is called when its caller goes away."""
_COPIED: Final[Bytes] = 64 * KiB
"""A larger body is written by itself: to join it to its head would copy it."""


def cycle_of(send: Callable[..., Any]) -> RequestResponseCycle | None:
    """Return the server's own state of the request that *send* answers; None: it is another server, or wrapped."""
    cycle = getattr(send, "__self__", None)
    return cycle if type(cycle) is RequestResponseCycle else None


def take_body(cycle: RequestResponseCycle) -> bytes | None:
    """Return the body if all of it has come. None: it has not, or the caller went away; `receive` it."""
    if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.flow.resume_reading()
    cycle.message_event.clear()
    return body


def tell_gone(cycle: RequestResponseCycle, tell: Callable[[], None] | None) -> bool:
    """Have *tell* called when the caller goes away (`gone`). False: it is gone."""
    if cycle.disconnected:
        return False
    cycle.flow.resume_reading()  # else nobody notices the end of the connection
    vars(cycle)[_TOLD] = tell
    return True


def gone(cycle: RequestResponseCycle | None) -> None:
    """The connection of *cycle* is lost."""
    tell = None if cycle is None else vars(cycle).pop(_TOLD, None)
    if tell is not None:
        tell()


def send_answer(cycle: RequestResponseCycle, answer: Answer) -> bool:
    """
    Send an answer that does not stream. False: nothing was sent, `send` it.

    It is for answers that end their headers with Content-Length: those of functions.
    """
    headers = answer.headers
    if cycle.flow.write_paused or not headers or headers[-1][0] != b"content-length":
        return False
    lines = [STATUS_LINE[answer.status]]
    for name, value in cycle.default_headers:
        lines += (name, b": ", value, b"\r\n")
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    head = b"".join(lines)
    ends = len(headers) + len(cycle.default_headers) + (2 if cycle.keep_alive else 3)
    if head.count(b"\n") != ends or head.count(b"\r") != ends:
        return False  # a header has a line break: `send` refuses it
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    if not cycle.disconnected:
        body = b"" if cycle.scope["method"] == "HEAD" else answer.body
        if len(body) <= _COPIED:
            cycle.transport.write(head + body)
        else:
            cycle.transport.write(head)
            cycle.transport.write(body)
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
    return True
