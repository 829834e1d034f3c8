"""One connection to a node: it carries one call, or one query, at a time."""

import asyncio
from typing import Final, Protocol, cast

import msgspec

from gpufaas_core.frames import BrokenFrame, FrameReader
from gpufaas_core.units import Bytes

BUFFER: Final[Bytes] = 256 * 1024
"""Bytes of an answer that wait here for a slow reader; more stay with the node."""
_SHORT: Final = 16 * 1024


class ConnectionUser(Protocol):
    """Who has a connection for a while."""

    @property
    def gone(self) -> bool:
        """It does not want one any more."""

    def sent_on(self, connection: "CallConnection") -> None:
        """It is yours: say what you have to say."""

    def not_sent(self, reason: str) -> None:
        """There is no connection to be had; nothing was sent."""

    def on_frame(self, kind: int, header: bytes, body: bytes) -> bool:
        """Whether this was the last one."""

    def on_lost(self, reason: str) -> None: ...


class ConnectionOwner(Protocol):
    """The node that a connection goes to."""

    def release(self, connection: "CallConnection") -> None:
        """It may carry another call."""

    def forget(self, connection: "CallConnection") -> None:
        """It is closed."""


class CallConnection(asyncio.Protocol):
    """One connection for calls, one at a time."""

    def __init__(self, node: ConnectionOwner) -> None:
        self.node = node
        self._reader = FrameReader()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._user: ConnectionUser | None = None
        self._why = ""
        self._lost = False
        self._full = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return not self._lost and not self._transport.is_closing()

    def take(self, user: ConnectionUser) -> None:
        self._user = user
        user.sent_on(self)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_with(self, prefix: bytes, body: bytes | memoryview) -> None:
        if len(body) <= _SHORT:
            self._transport.write(prefix + body)
        else:
            self._transport.write(prefix)
            self._transport.write(body)

    async def drain(self) -> None:
        """Wait until there is room for more."""
        while self._full and not self._lost:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def pause(self) -> None:
        if self.usable:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.usable:
            self._transport.resume_reading()

    def close(self) -> None:
        self._transport.close()

    def abort(self, why: str) -> None:
        """End it at once; who has it learns *why*."""
        self._why = why
        self._transport.abort()
        self._end(why)

    def _end(self, why: str) -> None:
        user, self._user = self._user, None
        if user is not None:
            user.on_lost(why)

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            for kind, header, body in self._reader.feed(data):
                user = self._user
                if user is not None and user.on_frame(kind, header, body):
                    self._user = None
                    self.node.release(self)
        except (BrokenFrame, msgspec.DecodeError) as exc:
            self.abort(f"it said what is no frame: {exc}")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.resume_writing()
        self.node.forget(self)
        self._end(self._why or (str(exc) if exc else "the node closed the connection"))
