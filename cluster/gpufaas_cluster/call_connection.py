"""A gateway's end of a connection to a node. Each of its lanes carries one call, or one query, at a time."""

import asyncio
from typing import Final, Protocol

import msgspec

from gpufaas_cluster.call_frames import LANE_WINDOW
from gpufaas_cluster.frame_connection import FrameConnection
from gpufaas_cluster.kept_grants import KeptGrant
from gpufaas_core.answer_buffer import AnswerBuffer
from gpufaas_core.model import NodeId
from gpufaas_core.units import Bytes
from gpufaas_core.wire.credit import PIECE_COST
from gpufaas_core.wire.heads import RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE

BUFFER: Final[Bytes] = 256 * 1024
"""Bytes of an answer that wait here for a slow reader; more stay with the node."""


class LaneUser(Protocol):
    """What has a lane for a while: a call or a query."""

    @property
    def gone(self) -> bool:
        """It does not want a lane any more."""

    @property
    def brief(self) -> bool:
        """All that it has to say is one small frame: it may share its connection."""

    def sent_on(self, lane: "CallLane") -> None:
        """The lane is yours: say what you have to say."""

    def not_sent(self, reason: str) -> None:
        """There is no lane to be had; nothing was sent."""

    def on_frame(self, kind: int, header: bytes, body: bytes) -> bool:
        """Whether this was the last one."""

    def on_lost(self, reason: str) -> None: ...


class ConnectionOwner(Protocol):
    """The node that a connection goes to."""

    @property
    def id(self) -> NodeId: ...

    def release(self, lane: "CallLane") -> None:
        """It may carry another call."""

    def forget(self, connection: "CallConnection") -> None:
        """It is closed."""


class CallLane:
    """See module."""

    __slots__ = ("_number", "_owed", "_paused", "_user", "connection", "kept")

    def __init__(self, connection: "CallConnection", number: int) -> None:
        self.connection = connection
        self.kept: KeptGrant | None = None
        """The grant of its last call, if we may keep it."""
        self._number = number
        self._user: LaneUser | None = None
        self._paused = False
        self._owed: Bytes = 0
        """So much of an answer has come since the node was last told that it may send more."""

    @property
    def node(self) -> ConnectionOwner:
        return self.connection.node

    def take(self, user: LaneUser) -> None:
        """Let *user* have it until its last frame."""
        self._user = user
        self._paused = False
        self._owed = 0
        self.connection.running += 1
        user.sent_on(self)

    def send(self, kind: int, head: msgspec.Struct | None = None, body: bytes | memoryview = b"") -> None:
        self.connection.send(kind, head, body, self._number)

    def pause(self) -> None:
        """Take no more for now."""
        self._paused = True
        if not self.connection.shared:
            self.connection.pause()

    def resume(self) -> None:
        self._paused = False
        if not self.connection.shared:
            self.connection.resume()
        elif self._user is not None:
            self._give_room()

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        user = self._user
        if user is None:
            return
        if user.on_frame(kind, header, body):
            self._user = None
            self.connection.running -= 1
            self.node.release(self)
        elif kind == Kind.CHUNK and self.connection.shared:
            self._owed += len(body) + PIECE_COST
            if not self._paused:
                self._give_room()

    def lose(self, why: str) -> None:
        """Its connection is over."""
        user, self._user = self._user, None
        if user is not None:
            user.on_lost(why)

    def _give_room(self) -> None:
        if self._owed >= LANE_WINDOW // 2:
            owed, self._owed = self._owed, 0
            self.send(Kind.ROOM, RoomHead(owed))


class CallConnection(FrameConnection):
    """:param lanes: 1: it is read no further while its reader is slow. More are limited by ROOM each."""

    def __init__(self, node: ConnectionOwner, lanes: int = 1) -> None:
        super().__init__(lanes)
        self.node = node
        self.shared = lanes > 1
        self.lanes = [CallLane(self, number) for number in range(lanes)]
        self._why = ""

    def pause(self) -> None:
        """Read no more for now."""
        if self.usable:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.usable:
            self._transport.resume_reading()

    def abort(self, why: str) -> None:
        """End it at once; its users are told *why*."""
        self._why = why
        self._transport.abort()
        self._end(why)

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        self.lanes[kind >> LANE].on_frame(kind & KIND, header, body)

    def broken(self, error: Exception) -> None:
        self.abort(f"it sent what is no frame: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.node.forget(self)
        self._end(self._why or (str(exc) if exc else "the node closed the connection"))

    def _end(self, why: str) -> None:
        for lane in self.lanes:
            lane.lose(why)


class LaneBuffer(AnswerBuffer):
    """An answer that comes over a lane of a connection to a node, which sends no more while the buffer is full."""

    __slots__ = ("_lane",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, BUFFER)
        self._lane: CallLane | None = None
        """While the answer is waited for."""

    def _pause_source(self) -> bool:
        if self._lane is not None:
            self._lane.pause()
        return self._lane is not None

    def _resume_source(self) -> None:
        if self._lane is not None:
            self._lane.resume()
