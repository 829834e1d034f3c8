"""A node's end of a connection from a gateway. Each of its lanes carries one call, or one query, at a time."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import msgspec

from gpufaas_cluster.call_heads import QueryHead
from gpufaas_cluster.lane_connection import LaneConnection
from gpufaas_cluster.served_calls import ServedCalls, Server, error_head
from gpufaas_core.errors import CallCancelled, GpufaasError
from gpufaas_core.model import Bytes
from gpufaas_core.wire import order
from gpufaas_core.wire.credit import Credit
from gpufaas_core.wire.heads import RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.order import FROM_GATEWAY, FROM_NODE

log = logging.getLogger("calls")

_UNSENT: Final[Bytes] = 512 * 1024
"""Of answers, so much waits for a gateway beyond the socket; more stays with the exchange, which holds the worker."""
_decode_query: Final = msgspec.msgpack.Decoder(QueryHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode


class ServedConnection(LaneConnection["ServedLane"]):
    """See module."""

    def __init__(
        self, server: Server, gateway: str, window: Bytes, on_closed: Callable[["ServedConnection"], None]
    ) -> None:
        super().__init__(f"gateway {gateway}", window)
        self._server = server
        self._on_closed = on_closed

    @property
    def busy(self) -> bool:
        """Whether a call, or the rest of an answer, is not over."""
        return any(lane.busy for lane in self.lanes.values())

    def new_lane(self, number: int) -> "ServedLane":
        lane = ServedLane(self._server, self, number)
        self.add(number, lane)
        return lane

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=_UNSENT)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_closed(self)


class ServedLane:
    """See module."""

    __slots__ = ("_connection", "_credit", "_number", "_query", "_roomy", "_server", "_state", "calls")

    def __init__(self, server: Server, connection: ServedConnection, number: int) -> None:
        self.calls = ServedCalls(server, self)
        self._server = server
        self._connection = connection
        self._number = number
        self._state = order.FREE
        self._credit = Credit(connection.window)
        """Of its answers."""
        self._query: asyncio.Task[None] | None = None
        self._roomy: asyncio.Future[None] | None = None
        """The answer of a query waits for room."""

    @property
    def busy(self) -> bool:
        """Whether a call is not over. A node that stops waits for none who only asks: he may follow a log for ever."""
        return self._state not in (order.FREE, order.ASKED)

    @property
    def full(self) -> bool:
        """Whether the gateway takes no more of an answer for now."""
        return self._connection.full or not self._credit.is_left

    def body_follows(self) -> None:
        """The body of the call that has come follows in pieces."""
        self._state = order.BODY_FOLLOWS[self._state]

    def send(self, kind: int, head: msgspec.Struct | None = None, body: bytes | memoryview = b"") -> None:
        self._state = state = FROM_NODE[kind][self._state]
        if kind == Kind.CHUNK:
            self._credit.spend(len(body))
        elif state == order.FREE:
            self._connection.running -= 1
            if self._server.closing:
                self._server.call_ended()
        self._connection.send(kind, head, body, self._number)

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """:raises BrokenFrame: it may not come now"""
        self._state = FROM_GATEWAY[kind][self._state]
        if kind == Kind.CALL:
            self._connection.running += 1
            self.calls.begin(header, body)
        elif kind == Kind.BODY:
            self.calls.on_body(body)
        elif kind == Kind.BODY_END:
            self.calls.on_body_end()
        elif kind == Kind.ROOM:
            self._credit.add(_decode_room(header).room)
            self.go_on()
        elif kind == Kind.ASK:
            self._connection.running += 1
            self._query = asyncio.get_running_loop().create_task(self._reply(_decode_query(header).what, body))
        elif self._state != order.FREE:  # CANCEL
            self.lose("the caller went away")
            self.calls.fail(CallCancelled("the caller went away"))

    def go_on(self) -> None:
        """The gateway takes more of an answer again."""
        self.calls.pump()
        if self._roomy is not None and not self._roomy.done():
            self._roomy.set_result(None)

    def lose(self, why: str) -> None:  # noqa: ARG002 - a call that nobody waits for is cancelled, whatever the reason
        """Nobody waits for the answer."""
        if self._query is not None:
            self._query.cancel()
            self._query = None
        self.calls.give_up()

    async def _reply(self, what: str, value: bytes) -> None:
        """Answer a query."""
        kind, head, body = Kind.ERROR, None, b""
        try:
            answer = await self._server.queries.answer(what, value)
            if isinstance(answer, bytes):
                kind, body = Kind.REPLY, answer
            else:
                async with aclosing(answer) as pieces:
                    async for piece in pieces:
                        await self._room()
                        self.send(Kind.CHUNK, None, piece)
                kind = Kind.END
        except GpufaasError as exc:
            head = error_head(exc)
        except Exception as exc:
            log.exception("a query failed: %s", what)
            head = error_head(GpufaasError(f"node {self._server.me.id} failed ({exc!r}): its log has more"))
        self._query = None
        self.send(kind, head, body)

    async def _room(self) -> None:
        """Wait until the gateway takes more."""
        while self.full:
            self._roomy = asyncio.get_running_loop().create_future()
            await self._roomy
