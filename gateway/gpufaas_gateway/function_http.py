"""Connections of a gateway: requests for functions are served here, all others by the ASGI application."""

import asyncio
import re
from typing import Any, Final

import httptools
from msgspec import Struct

from gpufaas_core.units import Bytes, KiB
from gpufaas_gateway.call_headers import Header, ReadHead, read_head
from gpufaas_gateway.half_closed import HalfClosed
from gpufaas_gateway.invoke import FunctionCall, FunctionFront, Target
from gpufaas_gateway.protocol import BoundedHttp

_MAX_KNOWN: Final[Bytes] = 4 * KiB
_MAX_DIGITS: Final = 9
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_TRIES: Final = 8
"""A connection that repeats none of so many heads is not likely to repeat one."""


class _Head(Struct, frozen=True):
    """The head of a request that came in one piece, and what was read in it. A connection mostly repeats it."""

    whole: bytes
    size: Bytes
    """Of the request, with its body."""
    start: bytes
    """Up to the digits of its Content-Length; all of it, if it has none."""
    digits: bytes
    rest: bytes
    target: Target
    method: str
    headers: list[Header]
    read: ReadHead

    def ends_in(self, data: bytes) -> tuple[int, bytes]:
        """
        Return where it ends in *data*, and its Content-Length there, if *data* is such a request, whole and no more.
        Else return -1.
        """
        if len(data) == self.size and data.startswith(self.whole):
            return len(self.whole), self.digits
        if not self.rest or not data.startswith(self.start):
            return -1, b""
        at = len(self.start)
        stops = data.find(b"\r", at, at + _MAX_DIGITS)
        digits, end = data[at:stops], stops + len(self.rest)
        same = stops > at and digits.isdigit() and data.startswith(self.rest, stops) and len(data) == end + int(digits)
        return (end if same else -1), digits


class FunctionHttp(BoundedHttp):
    """
    For `uvicorn.Config(http=...)`, with *front* bound. A connection may mix both kinds of requests, and pipeline them.

    A call begins when all bytes that came with its head are parsed: its body is there then, or is waited for.
    """

    def __init__(self, *args: Any, front: FunctionFront, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._front = front
        self._admitted = True
        self._unbegun: FunctionCall | None = None
        """The call whose head has just come."""
        self._answers: Any = None
        """The request that is answered now, or was answered last."""
        self._half: HalfClosed | None = None
        """The caller sends nothing more, but waits for the answers to what he has sent."""
        self._known_url = b""
        self._known_target: Target | None = None
        self._known: _Head | None = None
        self._tries = _TRIES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._admitted = self._front.admits(self.client[0] if self.client else "")

    def eof_received(self) -> Any:
        """Return whether the connection stays: all requests have come whole, and one is not answered yet."""
        last: Any = self.cycle
        if not self._answering() or last.more_body or self.transport.is_closing():
            return False
        if self._half is None:
            last.keep_alive, now = False, self._answers
            half = HalfClosed(self.transport, started=now.response_started, chunked=now.chunked_encoding)
            self._half = self.transport = half  # type: ignore[assignment]
            if type(now) is not FunctionCall:  # which asks the connection
                now.transport = half
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._half is not None:
            self._half.stop()
        for each in {self.cycle, self._answers}:
            if type(each) is FunctionCall:
                each.gone()
        # They refer to it: it would be left, with their bodies, until garbage is collected, which is rare.
        self.cycle = self._answers = self._unbegun = None  # type: ignore[assignment]
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        known, last = self._known, self.cycle
        between = not self._in_head and (last is None or (last.response_complete and not last.more_body))
        if between and known is not None:
            end, digits = known.ends_in(data)
            if end >= 0:
                # The parser is between two requests, and would be there again: it need not see the same twice.
                self._begin_again(known, digits, data[end:])
                return
        super().data_received(data)
        begins, self._unbegun = self._unbegun, None
        if begins is not None:
            if between and self._tries:
                self._learn(begins, data)
            self._begin(begins)

    def _begin_again(self, known: _Head, digits: bytes, body: bytes) -> None:
        self._tries = _TRIES
        headers, read = known.headers, known.read
        if digits != known.digits:
            headers = [(name, digits if name == b"content-length" else value) for name, value in headers]
            read = read_head(headers, self.client)
        call = FunctionCall(self, known.target, known.method, headers, read)
        call.body, call.more_body = body, False
        self.cycle = call  # type: ignore[assignment]
        self._begin(call)

    def _learn(self, call: FunctionCall, data: bytes) -> None:
        """Keep the head of *call* if it and its body are all of *data*. (The parser takes only CRLF to end a line.)"""
        self._tries -= 1
        end = data.find(b"\r\n\r\n") + 4
        if not (
            3 < end <= _MAX_KNOWN
            and len(call.body) == len(data) - end
            and not (call.more_body or self._in_head or self.pipeline or call.waiting_for_100_continue)
            and call.keep_alive
        ):
            return
        start, digits, rest = (head := data[:end]), b"", b""
        if (declared := _LENGTH.search(head)) is not None:
            digits = declared[1]
            start, rest = head[: declared.start(1)], head[declared.end(1) :]
        self._known = _Head(head, len(data), start, digits, rest, call.target, call.method, call.headers, call.read)

    def take_request(self, version: str, *, upgrades: bool) -> None:
        target = None if upgrades else self._target()
        if target is None:
            super().take_request(version, upgrades=upgrades)
            return
        parser, before = self.parser, self._answering()
        self.cycle = call = FunctionCall(  # type: ignore[assignment]
            self, target, parser.get_method().decode(), self.headers, read_head(self.headers, self.client),
            expects=self.expect_100_continue, keep_alive=version != "1.0" and parser.should_keep_alive(),
        )  # fmt: skip
        if before:
            self.flow.pause_reading()
            self.pipeline.appendleft((call, self.app))  # type: ignore[arg-type]
        else:
            self._unbegun = call

    def on_body(self, body: bytes) -> None:
        call: Any = self.cycle
        if type(call) is not FunctionCall:
            super().on_body(body)
        elif not self.parser.should_upgrade():
            call.on_body(body)

    def on_message_complete(self) -> None:
        call: Any = self.cycle
        if type(call) is not FunctionCall or self.parser.should_upgrade():
            super().on_message_complete()
            return
        self._stop_rest_timer()
        call.on_body_end()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """The request is the next of the pipeline, or none of a function."""
        self._answers = cycle
        if type(cycle) is FunctionCall:
            # In a turn of its own: a thousand that are answered at once would be a thousand calls deep.
            self.loop.call_soon(self._begin, cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def _begin(self, call: FunctionCall) -> None:
        self._answers = call
        call.begin(self._front)

    def _target(self) -> Target | None:
        """Return what the URL means, if the request is for a function. A connection mostly repeats its last one."""
        if not self._admitted:
            return None
        if self.url != self._known_url:
            parsed = httptools.parse_url(self.url)
            path = parsed.path
            self._known_target = self._front.target(path, parsed.query or b"") if path else None
            self._known_url = self.url
        return self._known_target
