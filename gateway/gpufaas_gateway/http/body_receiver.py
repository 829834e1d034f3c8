"""Receives a body from the socket into memory that is there already, past the parser (see `body_memory`)."""

import asyncio
from collections.abc import Callable
from typing import Final

from gpufaas_core.units import Bytes, KiB
from gpufaas_gateway.http.bounds import BoundedHttp

_PIECE: Final[Bytes] = 64 * KiB


class BodyReceiver(asyncio.BufferedProtocol):
    """Takes the place of *connection*'s protocol until the body has ended. It reads no byte behind that."""

    def __init__(
        self, connection: BoundedHttp, into: memoryview, at: Bytes, on_body: Callable[[bytes], None],
        wake: Callable[[], None],
    ) -> None:  # fmt: skip
        """
        :param at: how many bytes of the body have come
        :param on_body: called with each piece that does not go *into* this memory
        :param wake: called when nothing more goes there
        """
        self.filled = at
        """How many bytes of the body lie in *into*."""
        self._at = at
        self._connection = connection
        self._on_body = on_body
        self._wake = wake
        self._end = len(into)
        self._into: memoryview | None = into
        self._piece = memoryview(b"")
        self._switch(self)

    def _switch(self, protocol: asyncio.BaseProtocol) -> None:
        flow, transport = self._connection.flow, self._connection.transport
        flow.pause_reading()  # how it reads is settled when it begins to
        transport.set_protocol(protocol)
        flow.resume_reading()

    @property
    def filling(self) -> bool:
        return self._into is not None and self._at < self._end

    def stop_filling(self) -> None:
        """What comes from now on goes to the request, in pieces."""
        if self.filling:
            self._into = None
            self._piece = memoryview(bytearray(_PIECE))
            self._wake()

    # --- the transport's side ---

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's
        return self._into[self._at :] if self._into is not None else self._piece[: self._end - self._at]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._into is None:
            self._on_body(bytes(self._piece[:nbytes]))
        else:
            self.filled = self._at
        if self._at == self._end:
            connection = self._connection
            # The old one waits for a body that it has not seen. Requests on this connection go on behind that.
            connection.renew_parser()
            self._switch(connection)
            self._into = None  # uvloop keeps this protocol until the connection has another one with buffers
            connection.on_message_complete()

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()  # type: ignore[func-returns-value]

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
