"""A question to a node elsewhere, and what it answers."""

import asyncio
from collections import deque
from typing import Any, Final

import msgspec

from gpufaas_cluster.call_connection import BUFFER, CallConnection
from gpufaas_cluster.call_frames import ErrorHead, NodeKind, QueryHead
from gpufaas_cluster.connection import NotReached
from gpufaas_cluster.error_codes import make_error
from gpufaas_core.errors import GpufaasError
from gpufaas_core.frames import Kind, encode_frame

_decode_failure: Final = msgspec.msgpack.Decoder(ErrorHead).decode


class RemoteQuery:
    """A question to a node; see `NodeClient.ask` and `ask_lines`."""

    def __init__(self, what: str, value: Any) -> None:
        self._frame = encode_frame(NodeKind.ASK, QueryHead(what), msgspec.msgpack.encode(value))
        self._loop = asyncio.get_running_loop()
        self._connection: CallConnection | None = None
        self._over = False
        self._error: GpufaasError | None = None
        self._reply: bytes | None = None
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None

    async def reply(self) -> bytes:
        """
        Return what the node answers.

        :raises NotReached: the node is not there, or was lost
        :raises GpufaasError: its error
        """
        try:
            while not self._over:
                await self._wait()
        finally:
            self.cancel()
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply

    async def piece(self) -> bytes | None:
        """Return the next piece of an answer in pieces; None at its end. :raises GpufaasError: as `reply`"""
        while not self._pieces:
            if self._over:
                if self._error is not None:
                    raise self._error
                return None
            await self._wait()
        piece = self._pieces.popleft()
        self._buffered -= len(piece)
        if self._paused and self._buffered <= BUFFER // 2 and self._connection is not None:
            self._paused = False
            self._connection.resume()
        return piece

    def cancel(self) -> None:
        """Nobody waits for it. Nothing once it is over."""
        if not self._over and self._connection is not None:
            self._connection.write(encode_frame(Kind.CANCEL))
            self._connection.resume()
        self._over = True
        self._pieces.clear()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _end(self, error: GpufaasError | None) -> None:
        self._over, self._connection, self._error = True, None, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the connection's side ---

    @property
    def gone(self) -> bool:
        return self._over

    def sent_on(self, connection: CallConnection) -> None:
        self._connection = connection
        connection.write(self._frame)

    def not_sent(self, reason: str) -> None:
        self._end(NotReached(reason))

    def on_lost(self, reason: str) -> None:
        self._end(NotReached(f"the node was lost: {reason}"))

    def on_frame(self, kind: int, header: bytes, body: bytes) -> bool:
        if kind == Kind.CHUNK:
            if not self._over:
                self._pieces.append(body)
                self._buffered += len(body)
                if self._buffered > BUFFER and self._connection is not None:
                    self._paused = True
                    self._connection.pause()
                self._wake()
            return False
        if self._paused and self._connection is not None:
            self._connection.resume()
        if kind == NodeKind.ERROR:
            failure = _decode_failure(header)
            self._end(make_error(failure.name, failure.message, failure.retry_after_s))
        elif kind == NodeKind.REPLY:
            self._reply = body
            self._end(None)
        elif kind == Kind.END:
            self._end(None)
        else:
            return False
        return True
