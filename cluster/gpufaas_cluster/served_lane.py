"""A lane of a node's end of a connection: it carries one call, or one query, at a time."""

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from typing import Final

import msgspec

from gpufaas_cluster.call_frames import LANE_WINDOW, QueryHead
from gpufaas_cluster.frame_connection import FrameConnection
from gpufaas_cluster.served_calls import ServedCalls, Server, error_head
from gpufaas_core.errors import CallCancelled, GpufaasError
from gpufaas_core.model import Bytes
from gpufaas_core.wire.credit import PIECE_COST
from gpufaas_core.wire.heads import RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import BrokenFrame

log = logging.getLogger("calls")

_LAST: Final = frozenset((Kind.ANSWER, Kind.END, Kind.REFUSED, Kind.ERROR, Kind.REPLY))
_decode_query: Final = msgspec.msgpack.Decoder(QueryHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode


class ServedLane:
    """:param shared: others share its connection, so what it sends of an answer is limited by ROOM"""

    def __init__(self, server: Server, connection: FrameConnection, number: int, shared: bool) -> None:
        self.calls = ServedCalls(server, self)
        self._server = server
        self._connection = connection
        self._number = number
        self._shared = shared
        self._room: Bytes = 0
        """So much may be sent on a shared connection."""
        self._held: deque[tuple[int, msgspec.Struct | None, bytes | memoryview]] = deque()
        """Frames that wait for room."""
        self._query: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call, or the rest of its answer, is not over."""
        return self.calls.busy or bool(self._held)

    @property
    def full(self) -> bool:
        """The other end does not take more for now."""
        return self._connection.full or (self._shared and self._room <= 0)

    def send(self, kind: int, head: msgspec.Struct | None = None, body: bytes | memoryview = b"") -> None:
        if self._shared:
            if self._held or (kind == Kind.CHUNK and self._room <= 0):
                self._held.append((kind, head, body))
                return
            if kind == Kind.CHUNK:
                self._room -= len(body) + PIECE_COST
        if kind in _LAST:
            self._connection.running -= 1
        self._connection.send(kind, head, body, self._number)

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """:raises BrokenFrame: it may not come now"""
        calls = self.calls
        if kind == Kind.CALL:
            self._check_free("a call")
            self._room = LANE_WINDOW
            self._connection.running += 1
            calls.begin(header, body)
        elif kind == Kind.BODY:
            calls.on_body(body)
        elif kind == Kind.BODY_END:
            calls.on_body_end()
        elif kind == Kind.ROOM and self._shared:
            self._room += _decode_room(header).room
            self._release()
        elif kind == Kind.CANCEL:
            if calls.busy or self._query is not None:
                self._held.clear()
                self.give_up()
                calls.fail(CallCancelled("the caller went away"))
            elif self._held:
                end = self._held.pop()
                self._held.clear()
                self.send(*end)
                self._server.call_ended()
        elif kind == Kind.ASK:
            self._check_free("a query")
            if self._shared:
                raise BrokenFrame("a query on a shared connection")
            self._connection.running += 1
            what = _decode_query(header).what
            self._query = asyncio.get_running_loop().create_task(self._reply(what, body))

    def give_up(self) -> None:
        """The caller is gone."""
        if self._query is not None:
            self._query.cancel()
            self._query = None
        self.calls.give_up()

    def _check_free(self, what: str) -> None:
        if self.busy or self._query is not None:
            raise BrokenFrame(f"{what} before the end of the last call")

    def _release(self) -> None:
        """There is room: send what waits for it."""
        held, self._held = self._held, deque()
        while held and self._room > 0:
            self.send(*held.popleft())
        self._held = held
        if held:
            return
        self.calls.pump()
        self._server.call_ended()

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
                        self.send(Kind.CHUNK, None, piece)
                        await self._connection.drain()
                kind = Kind.END
        except GpufaasError as exc:
            head = error_head(exc)
        except Exception as exc:
            log.exception("a query failed: %s", what)
            head = error_head(GpufaasError(f"node {self._server.me.id} failed ({exc!r}): its log has more"))
        self._query = None
        self.send(kind, head, body)
