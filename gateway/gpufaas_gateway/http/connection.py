"""Connections of a gateway: plain calls of functions are exchanges here, all other requests the ASGI application's."""

import asyncio
from typing import Any

import httptools

from gpufaas_gateway.call_headers import read_head
from gpufaas_gateway.fronts.target import Target
from gpufaas_gateway.http.bounds import BoundedHttp, Cycle
from gpufaas_gateway.http.exchange import HttpExchange, HttpFront
from gpufaas_gateway.http.half_closed import HalfClosed
from gpufaas_gateway.http.known_head import TRIES, KnownHead, known_head


class HttpConnection(BoundedHttp):
    """
    For `uvicorn.Config(http=...)`, with *front* bound. A connection may mix both kinds of requests, and pipeline them.

    A call begins when all bytes that came with its head are parsed: its body is there then, or is waited for.
    """

    def __init__(self, *args: Any, front: HttpFront, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._front = front
        self._admitted = True
        self._unbegun: HttpExchange | None = None
        """The call whose head has just come."""
        self._answers: Cycle | None = None
        """The request that is answered now, or was answered last."""
        self._half: HalfClosed | None = None
        """The caller sends nothing more, but waits for the answers to what he has sent."""
        self._known_url = b""
        self._known_target: Target | None = None
        self._known: KnownHead | None = None
        self._tries = TRIES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._admitted = self._front.admits(self.client[0] if self.client else "")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays: all requests have come whole, and one is not answered yet."""
        last, now = self._answering(), self._answers
        if last is None or now is None or last.more_body or self.transport.is_closing():
            return False
        if self._half is None:
            last.keep_alive = False
            half = HalfClosed(self.transport, started=now.response_started, chunked=bool(now.chunked_encoding))
            self._half = self.transport = half  # type: ignore[assignment]
            if type(now) is not HttpExchange:  # which asks the connection
                now.transport = half  # type: ignore[attr-defined]
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._half is not None:
            self._half.stop()
        for each in {self.cycle, self._answers}:
            if type(each) is HttpExchange:
                each.gone()
        # They refer to it: it would be left, with their bodies, until garbage is collected, which is rare.
        self.cycle = self._answers = self._unbegun = None
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
                self._tries -= 1
                if not (self._in_head or self.pipeline):
                    self._known = known_head(begins, data) or self._known
            self._begin(begins)

    def _begin_again(self, known: KnownHead, digits: bytes, body: bytes) -> None:
        self._tries = TRIES
        headers, read = known.headers, known.read
        if digits != known.digits:
            headers, read = known.with_length(digits, self.client)
        call = HttpExchange(self, self._front, known.target, known.method, headers, read)
        call.body, call.more_body = body, False
        self.cycle = call
        self._begin(call)

    def take_request(self, version: str, *, upgrades: bool) -> None:
        target = None if upgrades else self._target()
        if target is None:
            super().take_request(version, upgrades=upgrades)
            return
        parser, before, method = self.parser, self._answering(), self.parser.get_method().decode()
        self.cycle = call = HttpExchange(
            self, self._front, target, method, self.headers, read_head(self.headers, self.client),
            expects=self.expect_100_continue, keep_alive=version != "1.0" and parser.should_keep_alive(),
        )  # fmt: skip
        if before:
            self.flow.pause_reading()
            self.pipeline.appendleft((call, self.app))  # type: ignore[arg-type]
        else:
            self._unbegun = call

    def on_body(self, body: bytes) -> None:
        call = self.cycle
        if type(call) is not HttpExchange:
            super().on_body(body)
        elif not self.parser.should_upgrade():
            call.on_body(body)

    def on_message_complete(self) -> None:
        call = self.cycle
        if type(call) is not HttpExchange or self.parser.should_upgrade():
            super().on_message_complete()
            return
        self._stop_rest_timer()
        call.on_body_end()

    def _start_asgi_task(self, cycle: Cycle, app: Any) -> None:
        """The request is the next of the pipeline, or none of a function."""
        self._answers = cycle
        if type(cycle) is HttpExchange:
            # In a turn of its own: a thousand that are answered at once would be a thousand calls deep.
            self.loop.call_soon(self._begin, cycle)
        else:
            super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]  # its own

    def _begin(self, call: HttpExchange) -> None:
        self._answers = call
        call.begin()

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
