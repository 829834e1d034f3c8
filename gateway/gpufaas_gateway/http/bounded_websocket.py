"""uvicorn's WebSocket protocol, which leaves some connections open that are of no more use, with bounds."""

import logging
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpufaas_core.units import Bytes, MiB
from gpufaas_gateway.http.bounds import REST_S
from gpufaas_gateway.http.lingering import linger

log = logging.getLogger(__name__)

_MAX_UNREAD: Final[Bytes] = 1 * MiB
"""The most bytes of answers to pings that the caller may leave unread."""
TURN_BYTES: Final[Bytes] = 2048
"""The most bytes of a WebSocket that are parsed in one turn of the loop. They may be three hundred messages."""


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
