"""
What a caller is answered: the answer of a function, whole or as it comes, or why there is none, without types of a
protocol. Answers of calls are made here only; `call_headers` has the rules of their headers, `errors` the status of
each error.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.errors import GpufaasError
from gpufaas_core.model import Seconds
from gpufaas_core.units import Bytes
from gpufaas_core.wire.heads import AnswerHead
from gpufaas_gateway import call_state as states
from gpufaas_gateway.answer_stream import AnswerStream
from gpufaas_gateway.call import Call
from gpufaas_gateway.call_headers import (
    BODILESS,
    Header,
    answer_headers,
    call_headers,
    head_template,
    placement_headers,
    timing,
)
from gpufaas_gateway.errors import NoWebSocket, body_of, headers_of, status_of
from gpufaas_gateway.ports import CallExchange
from gpufaas_gateway.request import Request

_MOST_LINES: Final = 12
"""An answer with more headers has no template."""


class Answer(Struct):
    """The function's answer, or the platform's own if there is an error."""

    status: int
    headers: list[Header]
    """Empty if there are `lines`."""
    body: bytes | memoryview = b""
    """The whole body, unless there is a `stream`. Memory for large ones is lent: do not keep it."""
    stream: AnswerStream | None = None
    lines: bytes = b""
    """The headers, Content-Length included, as they are sent."""
    error: GpufaasError | None = None
    """Why the function has not answered; `body` is `errors.body_of` it."""


def refusal(error: GpufaasError, more: list[Header]) -> Answer:
    """Return the platform's answer to a call that ends with *error*; *more* are headers beside those of the error."""
    text = body_of(error)
    headers = [(name.lower().encode(), value.encode()) for name, value in headers_of(error).items()]
    return Answer(status_of(error), [*headers, (b"content-length", b"%d" % len(text)), *more], text, error=error)


def let_go(error: BaseException | None) -> None:
    """
    Drop what *error*, which was handled, refers to: the frames that it went through refer to it again, and only the
    garbage collector could free them all.
    """
    while error is not None:
        following = error.__cause__ or error.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None
        error = following


Early = Callable[[Answer], None]
"""
Is given a whole answer before its call is counted, perhaps with its headers as lines. What it does not send, it sends
when the call has ended.
"""
Run = Callable[[Request], Awaitable[Answer]]
"""`Calls.run`, as the fronts use it."""
RunEarly = Callable[[Request, Early], Awaitable[Answer]]
"""The same, for a front whose connection takes the answer at once."""


def whole(call: Call, answer: AnswerHead, body: bytes | memoryview, served_by: Header, *, in_lines: bool) -> Answer:
    """Return an answer that has come whole. *served_by* is one of ours; *in_lines*: its front takes its headers so."""
    exchange = call.exchange
    assert exchange is not None
    call.grant, call.load_s, call.run_s, call.status = exchange.grant, exchange.load_s, answer.run_s, answer.status
    call.exchange = None  # it has ended, and has nothing to release
    if in_lines and (lines := _lines(call, answer, exchange, len(body), served_by)):
        return Answer(answer.status, [], body, lines=lines)
    headers = _headers(call, answer, exchange)
    if answer.status in BODILESS:
        body = b""
    elif call.request.method != "HEAD":
        headers.append((b"content-length", b"%d" % len(body)))
    elif answer.length >= 0:
        headers.append((b"content-length", b"%d" % answer.length))
    return Answer(answer.status, headers, body)


def _lines(call: Call, answer: AnswerHead, exchange: CallExchange, size: Bytes, served_by: Header) -> bytes:
    """Return the headers of an answer as lines, from a template; empty if it is not of the common kind."""
    given, grant = answer.headers, exchange.grant
    if not 0 < len(given) <= _MOST_LINES or call.crossing:
        return b""
    if call.request.method == "HEAD" or answer.status in BODILESS:
        return b""
    if grant.cold or exchange.phases or grant.held_s or grant.load_s or len(grant.calls) > 1:
        return b""
    part = grant.parts[0]
    template = head_template(tuple(given), served_by, part.device, part.share)
    if not template:
        return b""
    run_s, ours = call.run_s, call.ours
    times = (call.queue_s * 1e3, call.load_s * 1e3, run_s * 1e3)
    return template % (run_s, ours[0][1], ours[1][1], *times, size)


def _headers(call: Call, answer: AnswerHead, exchange: CallExchange) -> list[Header]:
    headers = call_headers(answer, call.passed, call.run_s)
    if call.crossing:
        headers = [pair for pair in headers if pair[0] != b"access-control-allow-origin"]
    headers += call.ours
    headers += placement_headers(exchange.grant, exchange.tier)
    grant = exchange.grant
    headers.append(timing(call.queue_s, call.load_s, call.run_s, exchange.phases, grant.held_s, grant.load_s))
    return headers


def refused(call: Call, error: GpufaasError) -> Answer:
    """Return the answer to a call that failed."""
    phases: tuple[tuple[str, Seconds], ...] = ()
    tier = "disk"
    if call.exchange is not None:
        phases, tier = call.exchange.phases, call.exchange.tier
        call.load_s = call.exchange.load_s or call.load_s  # of a load that goes on, the time so far
    more = [*call.ours, timing(call.queue_s or time.perf_counter() - call.began, call.load_s, call.run_s, phases)]
    if call.grant is not None:
        more += [(b"x-duration-seconds", b"%.6f" % call.ran_s), *placement_headers(call.grant, tier)]
    return refusal(error, more)


def streamed(call: Call, answer: AnswerHead, stream: AnswerStream, spool: AnswerSpool) -> Answer:
    """
    Return an answer that has not come whole, or that switches protocols.

    :param spool: where it may wait for a slow reader
    :raises GpufaasError: the call was ended meanwhile, or its function does not speak WebSocket
    """
    exchange = call.exchange
    assert exchange is not None
    call.grant, call.load_s, call.status = exchange.grant, exchange.load_s, answer.status
    if call.error is not None:
        raise call.error
    if call.request.upgrade:
        if answer.status < 300 and not stream.switched:
            assert call.deployed is not None
            raise NoWebSocket(
                f"{call.deployed.name} answered a WebSocket handshake with {answer.status}: it does not speak "
                "WebSocket at this path; call it with plain HTTP"
            )
        headers = [*answer_headers(answer.headers), *call.ours, *placement_headers(exchange.grant, exchange.tier)]
        call.state = states.JOIN[call.state]
        return Answer(answer.status, headers, stream=stream)
    call.watched().listen()
    call.run_s = call.ran_s
    headers = _headers(call, answer, exchange)
    if answer.length >= 0 and answer.status not in BODILESS:
        headers.append((b"content-length", b"%d" % answer.length))
    call.state = states.ANSWER[call.state]
    exchange.keep_for(spool)
    return Answer(answer.status, headers, stream=stream)
