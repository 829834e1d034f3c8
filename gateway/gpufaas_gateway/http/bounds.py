"""
uvicorn's protocols, with bounds on what a connection may cost.

The HTTP parser has none: a head may grow and dawdle for ever, and so may what follows a chunked body. Bodies are
bounded where they are read, by their function's size and time limits. An answer would be kept for a caller who does not
read it, for ever.
"""

import asyncio
import logging
from collections.abc import Sized
from typing import Final, Protocol

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpufaas_core.descriptors import callers_share
from gpufaas_core.loopback import count_unsent, unpace
from gpufaas_core.units import Bytes, MiB, Seconds
from gpufaas_gateway.errors import RETRY_AFTER_REFUSED_S
from gpufaas_gateway.http.heads import in_ascii, why_not_taken, without_offer
from gpufaas_gateway.http.lingering import linger

log = logging.getLogger(__name__)

MAX_HEAD: Final[Bytes] = 1 * MiB
"""Request line and headers; OpenFaaS's gateway takes as much."""
HEAD_S: Final[Seconds] = 30.0
"""The time from the connection, or from the first byte of a later head on it, to the head's end."""
REST_S: Final[Seconds] = 30.0
"""The time for the rest of a body whose request was answered: some clients write all before they read."""
MAX_PIPELINED: Final = 16
"""While this many requests wait behind the one that is answered, nothing more is read."""
READER_S: Final[Seconds] = 30.0
READER_BYTES_PER_S: Final = 500
"""A caller who reads a waiting answer more slowly than this, over `READER_S`, is cut off."""
_FULL_EVERY_S: Final[Seconds] = 10.0
_VERSIONS: Final = ("1.1", "1.0")
"""The parser also accepts 0.9, which has no headers, and 2.0, which it cannot read."""


class Cycle(Protocol):
    """A request on its connection, by the names of uvicorn, which reads and writes them (`RequestResponseCycle`)."""

    keep_alive: bool
    """The connection stays open after its answer."""
    more_body: bool
    disconnected: bool
    """The connection was lost before the request was answered."""
    response_started: bool
    """Some of the answer was sent."""
    response_complete: bool
    waiting_for_100_continue: bool
    """The caller sends the body when we say that we read it."""
    chunked_encoding: bool | None


class _Dropped(list[tuple[bytes, bytes]]):
    """A list that drops trailers, which nobody reads."""

    def append(self, _: tuple[bytes, bytes], /) -> None:
        pass


_NO_TRAILERS: Final = _Dropped()


class _BoundedFlow(FlowControl):
    """
    Each request resumes reading, to notice that its caller hangs up. So a caller who sends on and on would have
    thousands read for each that is answered.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if len(self._pipeline) < MAX_PIPELINED:
            super().resume_reading()


class BoundedHttp(HttpToolsProtocol):
    """For `uvicorn.Config(http=...)`."""

    cycle: Cycle | None  # type: ignore[assignment]  # that of a call is none of uvicorn's own
    """The last request that has come."""
    _head_bytes = 0
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    """One timer serves many requests: when it is due, it looks how long the connection has been idle."""
    _idle_since: Seconds = 0.0
    _reader: "_SlowReader | None" = None
    _refusal: tuple[int, str, str] | None = None
    """Status, phrase and reason of the refusal of the head that was just read."""
    _refused = False
    """What comes is dropped; the connection is closed, or will be when earlier requests are answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        unpace(transport)
        self.flow = _BoundedFlow(transport, self.pipeline)
        if len(self.connections) > (most := callers_share()):
            self._refuse(503, "Service Unavailable", f"{most} connections are open", quiet=_said_full(self.loop.time()))
            return
        self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._rest_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self._reader is not None:
            self._reader.stop()
        super().connection_lost(exc)
        cycle = self.cycle
        if exc is None and (self._refused or (cycle is not None and cycle.response_complete and cycle.more_body)):
            linger(self.transport, REST_S)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._parse(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse(431, "Request Header Fields Too Large", f"the headers are over {MAX_HEAD} bytes")
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _parse(self, data: bytes) -> None:
        cycle = self.cycle
        begins = bool(self.url) if self._in_head else cycle is None or not cycle.more_body
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as exc:
                if self._should_upgrade():
                    if self._answering():
                        # Its answer would come in the middle of the WebSocket, which would not know of it.
                        self._refuse(400, "Bad Request", "a WebSocket was asked for behind a request without an answer")
                    else:
                        self.handle_websocket_upgrade()
                    return
                version = self.parser.get_http_version()
                head = without_offer(self.parser.get_method(), self.url, version, self.headers)
                data = head + data[exc.args[0] :]
                self.renew_parser()
            except httptools.HttpParserError as exc:
                in_url = isinstance(exc, httptools.HttpParserInvalidURLError) and begins and self.cycle is cycle
                data = in_ascii(self.parser.get_method(), self.url, data) if in_url else b""
                if data:
                    self.renew_parser()
                else:
                    self.send_400_response("it is not HTTP, or the end of its body is in doubt")

    def renew_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the server's own

    def _get_upgrade(self) -> bytes | None:
        """Return the protocol that is offered. The parser has checked that Connection names Upgrade."""
        return next((value.lower() for name, value in self.headers if name == b"upgrade"), None)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        parser = self.parser
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise ValueError("neither HTTP/1.1 nor HTTP/1.0")  # to the parser, which refuses it as malformed
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        upgrades = parser.should_upgrade()
        if upgrades and not self._should_upgrade():  # `without_offer`
            if parser.get_method() == b"CONNECT":
                raise ValueError("we are no proxy")
            return
        self._refusal = why_not_taken(self.headers, version, len(self.url))
        if self._refusal is not None:
            raise ValueError(self._refusal[2])  # to the parser, which stops; `send_400_response` answers with it
        self.take_request(version, upgrades=upgrades)
        if not upgrades:
            self.headers = _NO_TRAILERS  # the request has its own list by now

    def take_request(self, version: str, *, upgrades: bool) -> None:  # noqa: ARG002 - for those that take some
        """Pass the request on whose head was read and accepted: a WebSocket, if it *upgrades*."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # it makes the scope
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._read_twice():
            return
        self._stop_rest_timer()
        super().on_message_complete()

    def _read_twice(self) -> bool:
        """Whether this head offers a protocol that we do not speak: `without_offer` then."""
        return self.parser.should_upgrade() and not self._should_upgrade()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_idle)
        if self.cycle is not None and self.cycle.more_body:
            self._rest_timer = self.loop.call_later(REST_S, self.transport.close)

    def _look_idle(self) -> None:
        """Close the connection if nothing has begun on it since its last answer."""
        self._idle_timer = None
        if self._in_head or self._answering() or self not in self.connections:
            return  # the head has its own timer, and the next answer sets this one again
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0.0:
            self._idle_timer = self.loop.call_later(left_s, self._look_idle)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader is None:
            self._reader = _SlowReader(self.transport, (self.client or ("unknown",))[0], self.loop)

    def resume_writing(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, "Bad Request", msg)))

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._answering():
            self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)  # the next request has begun already
        elif self._in_head:
            self._refuse(408, "Request Timeout", f"the headers did not come within {HEAD_S:g} s")
        else:
            self.transport.close()  # no request has begun: there is nothing to answer

    def _refuse(self, status: int, phrase: str, reason: str, *, quiet: bool = False) -> None:
        self._in_head = False
        self._refused = True
        if not quiet:
            peer = (self.client or ("unknown",))[0]
            log.warning("request.refused status=%d peer=%s reason=%s", status, peer, reason)
        answering = self._answering()
        if answering is not None and not answering.more_body:
            answering.keep_alive = False  # requests that came before are answered: this would be taken for their answer
            return
        if answering is None or not (answering.response_started or self.pipeline):
            body = f"{reason}\n".encode()
            after = f"Retry-After: {RETRY_AFTER_REFUSED_S:.0f}\r\n" if status == 503 else ""
            self.transport.write(
                f"HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n{after}"
                f"Content-Length: {len(body)}\r\nX-OpenFaaS-Internal: gateway\r\nConnection: close\r\n\r\n".encode()
                + body
            )
        self.transport.close()

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _answering(self) -> Cycle | None:
        """Return the last request that has come, if it is not answered."""
        return None if self.cycle is None or self.cycle.response_complete else self.cycle


class _SlowReader:
    """Cuts off a caller who does not read the answer."""

    def __init__(self, transport: asyncio.Transport, peer: str, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._peer = peer
        self._loop = loop
        self._unread = self._count_unread()
        self._timer = loop.call_later(READER_S, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        before, self._unread = self._unread, self._count_unread()
        if before - self._unread >= READER_S * READER_BYTES_PER_S:
            self._timer = self._loop.call_later(READER_S, self._look)
            return
        log.warning(
            "answer.cut peer=%s reason=%s",
            self._peer,
            f"over {READER_S:g} s its reader took {before - self._unread} bytes of it, and {self._unread} wait",
        )
        self._transport.abort()

    def _count_unread(self) -> Bytes:
        """Return the bytes that wait here and in the kernel, which takes megabytes. The caller has read the others."""
        return self._transport.get_write_buffer_size() + count_unsent(self._transport)


_full_said_at: Seconds = -_FULL_EVERY_S


def _said_full(now: Seconds) -> bool:
    """Return whether the log said so a moment ago; if not, it says so now."""
    global _full_said_at
    if now - _full_said_at < _FULL_EVERY_S:
        return True
    _full_said_at = now
    return False
