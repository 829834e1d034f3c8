"""
uvicorn's protocols, with bounds on what a connection may cost.

The HTTP parser has none: a head may grow and dawdle for ever, and so may what follows a chunked body. Bodies are
bounded where they are read, by their function's size and time limits. An answer would be kept for a caller who does not
read it, for ever. The WebSocket protocol leaves some connections open that are of no more use.
"""

import asyncio
import logging
from collections.abc import Sized
from typing import Any, Final
from urllib.parse import quote_from_bytes

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpufaas_core.descriptors import callers_share
from gpufaas_core.loopback import count_unsent, unpace
from gpufaas_core.units import Bytes, MiB, Seconds
from gpufaas_gateway.errors import RETRY_AFTER_REFUSED_S
from gpufaas_gateway.http.lingering import linger

log = logging.getLogger(__name__)

MAX_HEAD: Final[Bytes] = 1 * MiB
"""Request line and headers; OpenFaaS's gateway takes as much."""
MAX_TARGET: Final[Bytes] = 65_535
"""Path and query; what the parser of URLs can count."""
MAX_HEADERS: Final = 1000
HEAD_S: Final[Seconds] = 30.0
"""From the connection, or from the first byte of a later head on it, to the head's end."""
REST_S: Final[Seconds] = 30.0
"""Time for the rest of a body whose request was answered: some clients write all before they read."""
MAX_PIPELINED: Final = 16
"""As long as so many requests wait behind the one that is answered, nothing more is read."""
READER_S: Final[Seconds] = 30.0
READER_BYTES_PER_S: Final = 500
"""A caller who reads a waiting answer more slowly than this, over `READER_S`, is cut off."""
_MAX_UNREAD: Final[Bytes] = 1 * MiB
"""Bytes of answers to pings that the caller does not read."""

TURN_BYTES: Final[Bytes] = 2048
"""Bytes of a WebSocket that are parsed in one turn of the loop. They may be three hundred messages."""

_FULL_EVERY_S: Final[Seconds] = 10.0
_VERSIONS: Final = ("1.1", "1.0")
"""The parser also accepts 0.9, which has no headers, and 2.0, which it cannot read."""

_OF_UPGRADES: Final = (b"upgrade", b"http2-settings")
"""Headers that offer another protocol, also as options of Connection."""


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

    _head_bytes = 0
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    """One for many requests: when it is due, it looks since when the connection is idle."""
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
        self._stop_timer()
        self._stop_rest_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._reader is not None:
            self._reader.stop()
        super().connection_lost(exc)
        cycle: Any = self.cycle
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
        cycle: Any = self.cycle
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
                data = self._read_again() + data[exc.args[0] :]
            except httptools.HttpParserError as exc:
                in_url = isinstance(exc, httptools.HttpParserInvalidURLError)
                data = self._in_ascii(data) if in_url and begins and self.cycle is cycle else b""
                if not data:
                    self.send_400_response("it is not HTTP, or the end of its body is in doubt")

    def _in_ascii(self, data: bytes) -> bytes:
        """
        Return the request in whose target the parser has stopped, with what is beyond ASCII there percent-encoded, as
        many servers of functions need it; empty if nothing is. *data* begins with its first line, or in its target.
        """
        line, end, rest = data.partition(b"\n")
        if line.isascii() or len(self.url) > MAX_TARGET:
            return b""
        if self.url:
            line = b"%b %b%b" % (self.parser.get_method(), self.url, line)
        self.renew_parser()
        return quote_from_bytes(line, bytes(range(128))).encode() + end + rest

    def renew_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the server's own

    def _read_again(self) -> bytes:
        """
        Return the head that was just read, without the offer to switch protocols.

        RFC 9110 §7.8: a server may ignore Upgrade and serve the request. The parser would take the body of such a
        request for another protocol. Java's HttpClient and curl --http2 offer h2c in each first request.
        """
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = (each.strip() for each in value.split(b","))
                value = b", ".join(each for each in options if each.lower() not in _OF_UPGRADES)
            if value and name not in _OF_UPGRADES:
                lines.append(b"%s: %s" % (name, value))
        self.renew_parser()
        return b"\r\n".join(lines) + b"\r\n\r\n"

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
            self._stop_timer()
        upgrades = parser.should_upgrade()
        if upgrades and not self._should_upgrade():  # `_read_again`
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
        """Whether this head offers a protocol that we do not speak: `_read_again` then."""
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
        if self.cycle.more_body:
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
            _log(self.client, status, reason)
        cycle: Any = self.cycle
        if self._answering() and not cycle.more_body:
            cycle.keep_alive = False  # requests that came before are answered: this would be taken for their answer
            return
        if not self._answering() or not (cycle.response_started or self.pipeline):
            body = f"{reason}\n".encode()
            after = f"Retry-After: {RETRY_AFTER_REFUSED_S:.0f}\r\n" if status == 503 else ""
            self.transport.write(
                f"HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n{after}"
                f"Content-Length: {len(body)}\r\nX-OpenFaaS-Internal: gateway\r\nConnection: close\r\n\r\n".encode()
                + body
            )
        self.transport.close()

    def _answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None


def _log(client: tuple[str, int] | None, status: int, reason: str) -> None:
    log.warning("request.refused status=%d peer=%s reason=%s", status, (client or ("unknown",))[0], reason)


def why_not_taken(headers: list[tuple[bytes, bytes]], version: str, target: int) -> tuple[int, str, str] | None:
    """Return status, phrase and reason of the refusal of a head; None: it is accepted."""
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (not hosts and version == "1.1"):
        reason = "there are two Host headers" if hosts else "the Host header is missing"
        return 400, "Bad Request", reason  # RFC 9112 §3.2
    coded = b"transfer-encoding"
    if coded in names and [value.lower() for name, value in headers if name == coded] != [b"chunked"]:
        return 501, "Not Implemented", "of the transfer codings, chunked alone is taken"  # RFC 9112 §6.1
    if target > MAX_TARGET:
        return 414, "URI Too Long", f"path and query are over {MAX_TARGET} bytes"
    if len(names) > MAX_HEADERS:
        return 431, "Request Header Fields Too Large", f"there are over {MAX_HEADERS} headers"
    return None


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


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """For `uvicorn.Config(ws=...)`."""

    _left: bytes = b""
    """Bytes that came and were not parsed yet."""

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left += data  # only once: reading is paused by now
        elif len(data) <= TURN_BYTES:
            self._parse(data)
        else:
            self._left = data
            self._parse_some()

    def _parse_some(self) -> None:
        """Parse piece by piece, so that other connections get their turns: it may be many thousand messages."""
        piece, self._left = self._left[:TURN_BYTES], self._left[TURN_BYTES:]
        if piece:
            self._parse(piece)
        if self._left:
            self._pause()
            self.loop.call_soon(self._parse_some)
        elif self.read_paused and self.queue.empty():
            self.read_paused = False
            self.transport.resume_reading()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    async def receive(self) -> Any:
        message = await super().receive()
        if self._left:
            self._pause()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        left, self._left = self._left, b""
        if left:
            self._parse(left)  # it may hold a message or a Close frame
        super().connection_lost(exc)
        if exc is None and self.conn.close_rcvd is None:  # else the caller sends nothing more
            linger(self.transport, REST_S)

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_complete:
            # A head that the library refuses while it reads makes no event: answer it here.
            self._refuse()

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _MAX_UNREAD and not self.writable.is_set():
            self.transport.abort()

    def keepalive_timeout(self) -> None:
        if self.read_paused:
            # We have paused reading: the answer to the ping may wait in the socket.
            self.pong_timer = self.loop.call_later(self.ping_timeout or 0.0, self.keepalive_timeout)
        else:
            super().keepalive_timeout()
            self.transport.abort()  # to close would wait until the caller reads

    def _refuse(self) -> None:
        self.handshake_complete = self.close_sent = True
        said = b"".join(self.conn.data_to_send())
        self.transport.write(said or b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.transport.close()
        log.warning("websocket.refused peer=%s reason=%s", (self.client or ("unknown",))[0], self.conn.handshake_exc)
