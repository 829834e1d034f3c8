"""A gateway's end of a connection to a node. Each of its lanes carries one call, or one query, at a time."""

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from gpufaas_cluster.call_heads import BODY_WINDOW
from gpufaas_cluster.lane_connection import LaneConnection
from gpufaas_core.messages import Grant
from gpufaas_core.model import NodeId
from gpufaas_core.units import Bytes
from gpufaas_core.wire import order
from gpufaas_core.wire.credit import Credit, Window
from gpufaas_core.wire.heads import RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.order import FROM_GATEWAY, FROM_NODE
from gpufaas_core.wire.prefix import LANES, BrokenFrame

_NO_BODY: Final = Credit(0, 0)
"""The credit of a call whose body came with it: a node that gives room for more is out of step."""
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode


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

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """The node has said something. Once that was the last frame, the lane is not yours any more."""

    def go_on(self) -> None:
        """The node takes more of a body again."""

    def on_lost(self, reason: str) -> None: ...


class CallLane:
    """See module."""

    __slots__ = ("_credit", "_number", "_state", "_window", "connection", "known", "user")

    def __init__(self, connection: "CallConnection", number: int) -> None:
        self.connection = connection
        self.known: Grant | None = None
        """The grant of its last call, if we may keep it: the node knows it."""
        self._number = number
        self._state = order.FREE
        self.user: LaneUser | None = None
        """Who has it, until its last frame."""
        self._window = Window(connection.window)
        """The room for its answers."""
        self._credit = _NO_BODY
        """What may be sent of a body in pieces. The node gives it when it takes the call."""

    @property
    def full(self) -> bool:
        """Whether the node does not take more of a body for now."""
        return self.connection.full or not self._credit.is_left

    def send(self, kind: int, head: msgspec.Struct | None = None, body: bytes | memoryview = b"") -> None:
        self._state = FROM_GATEWAY[kind][self._state]
        if kind == Kind.BODY:
            self._credit.spend(len(body))
        self.connection.send(kind, head, body, self._number)

    def body_follows(self) -> None:
        """The body of the call that was sent comes in pieces."""
        self._state = order.BODY_FOLLOWS[self._state]
        self._credit = Credit(BODY_WINDOW, 0)

    def pause(self) -> None:
        """Take no more of the answer for now."""
        self._window.pause()

    def resume(self) -> None:
        if room := self._window.resume():
            self.send(Kind.ROOM, RoomHead(room))

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        self._state = state = FROM_NODE[kind][self._state]
        user = self.user
        assert user is not None
        if kind == Kind.CHUNK:
            self._window.came(len(body))
            user.on_frame(kind, header, body)
            if room := self._window.room():
                self.send(Kind.ROOM, RoomHead(room))
            return
        if kind == Kind.ROOM:
            self._credit.add(_decode_room(header).room)
            user.go_on()
            return
        user.on_frame(kind, header, body)
        if state == order.FREE:
            self.user, self._credit = None, _NO_BODY
            self.connection.release(self)

    def go_on(self) -> None:
        if self.user is not None:
            self.user.go_on()

    def lose(self, why: str) -> None:
        user, self.user = self.user, None
        if user is not None:
            user.on_lost(why)


class CallConnection(LaneConnection[CallLane]):
    """See module."""

    def __init__(self, node: NodeId, window: Bytes, rests: Callable[["CallConnection"], None]) -> None:
        """:param rests: is called when no call is on it any more, or it is closed"""
        super().__init__(f"node {node}", window)
        self.node = node
        self._rests = rests
        self._free: list[CallLane] = []
        """The lanes without a call; the last one is taken first, since it may know our grant."""

    def begin(self, user: LaneUser) -> None:
        """Give *user* a lane."""
        if not self._free:
            number = len(self.lanes)
            if number == LANES:
                user.not_sent(f"node {self.node} has {LANES} calls of this gateway")
                return
            self.add(number, CallLane(self, number))
            self._free.append(self.lanes[number])
        self.running += 1
        lane = self._free.pop()
        lane.user = user
        user.sent_on(lane)

    def release(self, lane: CallLane) -> None:
        """The call of *lane* is over."""
        self.running -= 1
        self._free.append(lane)
        if not self.running:
            self._rests(self)

    def new_lane(self, number: int) -> CallLane:
        raise BrokenFrame(f"a frame of lane {number}, which has had no call")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._rests(self)
