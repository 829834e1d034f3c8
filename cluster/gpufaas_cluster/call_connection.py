"""A gateway's end of a connection to a node: it carries one call, or one query, at a time."""

import asyncio
from typing import Final, Protocol

from gpufaas_cluster.frame_connection import FrameConnection
from gpufaas_cluster.kept_grants import KeptGrant
from gpufaas_core.answer_buffer import AnswerBuffer
from gpufaas_core.model import NodeId
from gpufaas_core.units import Bytes

BUFFER: Final[Bytes] = 256 * 1024
"""Bytes of an answer that wait here for a slow reader; more stay with the node."""


class ConnectionUser(Protocol):
    """What has a connection for a while: a call or a query."""

    @property
    def gone(self) -> bool:
        """It does not want a connection any more."""

    def sent_on(self, connection: "CallConnection") -> None:
        """The connection is yours: say what you have to say."""

    def not_sent(self, reason: str) -> None:
        """There is no connection to be had; nothing was sent."""

    def on_frame(self, kind: int, header: bytes, body: bytes) -> bool:
        """Whether this was the last one."""

    def on_lost(self, reason: str) -> None: ...


class ConnectionOwner(Protocol):
    """The node that a connection goes to."""

    @property
    def id(self) -> NodeId: ...

    def release(self, connection: "CallConnection") -> None:
        """It may carry another call."""

    def forget(self, connection: "CallConnection") -> None:
        """It is closed."""


class CallConnection(FrameConnection):
    def __init__(self, node: ConnectionOwner) -> None:
        super().__init__()
        self.node = node
        self.kept: KeptGrant | None = None
        """The grant of its last call, if we may keep it."""
        self._user: ConnectionUser | None = None
        self._why = ""

    def take(self, user: ConnectionUser) -> None:
        """Let *user* have the connection until its last frame."""
        self._user = user
        user.sent_on(self)

    def pause(self) -> None:
        """Read no more for now."""
        if self.usable:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.usable:
            self._transport.resume_reading()

    def abort(self, why: str) -> None:
        """End it at once; its user is told *why*."""
        self._why = why
        self._transport.abort()
        self._end(why)

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        user = self._user
        if user is not None and user.on_frame(kind, header, body):
            self._user = None
            self.node.release(self)

    def broken(self, error: Exception) -> None:
        self.abort(f"it sent what is no frame: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.node.forget(self)
        self._end(self._why or (str(exc) if exc else "the node closed the connection"))

    def _end(self, why: str) -> None:
        user, self._user = self._user, None
        if user is not None:
            user.on_lost(why)


class ConnectionBuffer(AnswerBuffer):
    """An answer that comes over a connection to a node, which is read no further while the buffer is full."""

    __slots__ = ("_connection",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, BUFFER)
        self._connection: CallConnection | None = None
        """While the answer is waited for."""

    def _pause_source(self) -> bool:
        if self._connection is not None:
            self._connection.pause()
        return self._connection is not None

    def _resume_source(self) -> None:
        if self._connection is not None:
            self._connection.resume()
