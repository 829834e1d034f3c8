"""
A node's end of a connection from a gateway. Each of its lanes carries one call, or one query, at a time.

A call needs no task: the exchange calls back when there is something of an answer. Only a streamed body has a task,
since it waits for the worker, and a query.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from gpufaas_cluster.call_heads import ErrorHead, NodeAnswerHead, NodeCallHead, QueryHead
from gpufaas_cluster.connection import Identity
from gpufaas_cluster.error_codes import told
from gpufaas_cluster.lane_connection import LaneConnection
from gpufaas_cluster.node_queries import NodeQueries
from gpufaas_cluster.served_body import SpooledBody, StreamedBody
from gpufaas_core.errors import CallCancelled, GpufaasError, GrantRefused, StorageFailed
from gpufaas_core.messages import Grant
from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.units import format_bytes
from gpufaas_core.wire import order
from gpufaas_core.wire.bodies import CHUNK_BYTES, FILE, INLINE
from gpufaas_core.wire.credit import Credit
from gpufaas_core.wire.heads import CallHead, EndHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.order import FROM_GATEWAY, FROM_NODE
from gpufaas_core.wire.prefix import BrokenFrame
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node import Node

log = logging.getLogger("calls")

_UNSENT: Final[Bytes] = 512 * 1024
"""Of answers, so much waits for a gateway beyond the socket; more stays with the exchange, which holds the worker."""
_decode_call: Final = msgspec.msgpack.Decoder(NodeCallHead).decode
_decode_query: Final = msgspec.msgpack.Decoder(QueryHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode


class Server(Protocol):
    """Where calls are served and queries answered; see `call_server.CallServer`."""

    node: Node
    queries: NodeQueries
    me: Identity
    spool: Path
    closing: bool

    def call_ended(self) -> None:
        """A lane has no call any more."""


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

    __slots__ = (
        "_body", "_connection", "_credit", "_exchange", "_grant", "_known", "_number", "_query", "_rest", "_roomy",
        "_run_s", "_server", "_state",
    )  # fmt: skip

    def __init__(self, server: Server, connection: ServedConnection, number: int) -> None:
        self._server = server
        self._connection = connection
        self._number = number
        self._state = order.FREE
        self._credit = Credit(connection.window)
        """What may be sent of its answers."""
        self._grant: Grant | None = None
        """That of the call which is not over."""
        self._known: Grant | None = None
        """The grant of the last call, if the gateway keeps it."""
        self._exchange: Exchange | None = None
        self._body: SpooledBody | StreamedBody | None = None
        """The body of a call that does not come with the call itself."""
        self._rest = memoryview(b"")
        """Of an answer that is whole here, what the gateway has not taken. Its exchange is over."""
        self._run_s: Seconds = 0.0
        """How long the call of that answer ran."""
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

    # --- frames ---

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
            self._begin(_decode_call(header), body)
        elif kind == Kind.BODY or kind == Kind.BODY_END:
            self._on_body(body if kind == Kind.BODY else None)
        elif kind == Kind.ROOM:
            self._credit.add(_decode_room(header).room)
            self.go_on()
        elif kind == Kind.ASK:
            self._connection.running += 1
            self._query = asyncio.get_running_loop().create_task(self._reply(_decode_query(header).what, body))
        elif self._state != order.FREE:  # CANCEL
            self.lose("the caller went away")
            self._fail(CallCancelled("the caller went away"))

    def go_on(self) -> None:
        """The gateway takes more of an answer again."""
        self._pump()
        if self._roomy is not None and not self._roomy.done():
            self._roomy.set_result(None)

    def lose(self, why: str) -> None:  # noqa: ARG002 - what nobody waits for is cancelled, whatever the reason
        """Nobody waits for the answer: stop the call or query, if there is one."""
        if self._query is not None:
            self._query.cancel()
            self._query = None
        exchange, grant = self._exchange, self._grant
        self._rest = self._rest[:0]
        self._end()
        if grant is not None and (exchange is None or not exchange.finished):
            self._server.node.grants.abort(grant.call, grant.device)

    # --- a call ---

    def _begin(self, call: NodeCallHead, body: bytes) -> None:
        """:raises BrokenFrame: it comes by a grant that did not come"""
        head = call.head
        if head.body_mode != INLINE:
            self._state = order.BODY_FOLLOWS[self._state]
        grant = call.grant or self._known
        if grant is None:
            raise BrokenFrame("a call by the grant of the last one, which was not kept")
        self._known = grant if call.kept else None
        if self._server.closing:
            self._fail(GrantRefused(f"node {self._server.me.id} stops"))
            return
        self._grant = grant
        if head.body_mode != FILE:
            self._start(grant, head, body, call.kept)
        elif not self._server.node.grants.open_for_body(grant):
            self._fail(GrantRefused(f"{grant.device} refused call {grant.call}"))
        else:
            try:
                self._body = SpooledBody(
                    self.send,
                    self._server.spool,
                    lambda path: self._start(grant, replace(head, body_path=path), b"", call.kept),
                )
            except OSError as exc:
                self._storage_failed(exc)

    def _start(self, grant: Grant, head: CallHead, body: bytes, kept: int) -> None:
        """Give the call to its worker. *kept*: see `NodeCallHead`."""
        try:
            exchange = self._server.node.grants.call(grant, head, body, kept)
        except StorageFailed as exc:
            self.lose("its body cannot be read")
            self._fail(exc)
            return
        except GrantRefused as exc:
            self._fail(exc)
            return
        self._exchange = exchange
        exchange.watcher = self._pump
        if head.body_mode not in (INLINE, FILE):
            self._body = StreamedBody(self.send, exchange)
            exchange.when_runs(self._runs)
        elif grant.cold or grant.load_s:
            exchange.when_runs(partial(self.send, Kind.RUNS))
        self._pump()

    def _runs(self) -> None:
        """A worker has a call whose body streams. Pieces that came before would be lost if it were placed again."""
        if self._grant is not None and (self._grant.cold or self._grant.load_s):
            self.send(Kind.RUNS)
        if self._body is not None:
            self._body.begin()

    def _on_body(self, piece: bytes | None) -> None:
        """A piece of the body comes; None: its end. Those of a call that is over are skipped."""
        if self._body is None:
            return
        if piece is None:
            self._body.end()
            return
        try:
            self._body.add(piece)
        except OSError as exc:
            self._storage_failed(exc)

    def _pump(self) -> None:
        """Pass on what there is of the answer, as far as the gateway takes it."""
        exchange = self._exchange
        if exchange is None:
            self._send_rest()
            return
        while not self.full:
            piece = exchange.take()
            if piece is None:
                break
            if isinstance(piece, bytes):
                self.send(Kind.CHUNK, None, piece)
                continue
            head, body, whole = piece
            grant = None if exchange.grant is self._grant else exchange.grant
            if whole and exchange.kept and len(body) > CHUNK_BYTES:
                self._server.node.grants.let_go(exchange, head.run_s)  # the gateway may read it slowly
            kept = whole and exchange.kept > 0 and not head.failed and not exchange.once
            answer = NodeAnswerHead(head, exchange.load_s, exchange.phases, grant, exchange.tier, kept)
            if whole:
                self._end()
                if len(body) <= CHUNK_BYTES:
                    self.send(Kind.ANSWER, answer, body)
                else:  # too large for a frame
                    self.send(Kind.HEAD, replace(answer, head=replace(head, length=len(body))))
                    self._rest, self._run_s = memoryview(body), head.run_s
                    self._send_rest()
                return
            self.send(Kind.HEAD, answer, body)
        else:
            return
        if exchange.error is not None:
            self._fail(exchange.error)
        elif exchange.end is not None:
            self._end()
            self.send(Kind.END, exchange.end)

    def _send_rest(self) -> None:
        while self._rest and not self.full:
            piece, self._rest = self._rest[:CHUNK_BYTES], self._rest[CHUNK_BYTES:]
            self.send(Kind.CHUNK, None, piece)
            if not self._rest:
                self.send(Kind.END, EndHead(self._run_s))

    def _storage_failed(self, exc: OSError) -> None:
        size = self._body.size if self._body is not None else 0
        self.lose("its body cannot be kept")
        self._fail(
            StorageFailed(
                f"the body of {format_bytes(size)} or more could not be kept in {self._server.spool} on node "
                f"{self._server.me.id} ({exc.strerror}): make room there, or send less"
            )
        )

    def _fail(self, error: GpufaasError) -> None:
        """End the call, and tell the gateway why: that is the last that it hears. And how the worker was started."""
        head = ErrorHead(*told(error))
        if (exchange := self._exchange) is not None:
            head = replace(head, load_s=exchange.load_s, phases=exchange.phases, tier=exchange.tier)
        self._end()
        self.send(Kind.REFUSED if isinstance(error, GrantRefused) else Kind.ERROR, head)

    def _end(self) -> None:
        """The call has ended as far as this lane goes."""
        if self._exchange is not None:
            self._exchange.watcher = self._exchange.on_run = None
            self._exchange = None
        self._grant = None
        if self._body is not None:
            self._body.close()
            self._body = None

    # --- a query ---

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
                        while self.full:
                            self._roomy = asyncio.get_running_loop().create_future()
                            await self._roomy
                        self.send(Kind.CHUNK, None, piece)
                kind = Kind.END
        except GpufaasError as exc:
            head = ErrorHead(*told(exc))
        except Exception as exc:
            log.exception("a query failed: %s", what)
            failed = GpufaasError(f"node {self._server.me.id} failed ({exc!r}): its log has more")
            head = ErrorHead(*told(failed))
        self._query = None
        self.send(kind, head, body)
