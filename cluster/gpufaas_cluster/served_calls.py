"""
The calls of one lane at a node, one after the other.

A call needs no task: the exchange calls back when there is something of an answer. Only a streamed body has a task,
since it waits for the worker.
"""

import asyncio
import contextlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec

from gpufaas_cluster.call_heads import BODY_WINDOW, ErrorHead, NodeAnswerHead, NodeCallHead
from gpufaas_cluster.connection import Identity
from gpufaas_cluster.error_codes import error_name
from gpufaas_cluster.node_queries import NodeQueries
from gpufaas_core.errors import GpufaasError, GrantRefused, StorageFailed
from gpufaas_core.messages import Grant
from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.units import format_bytes
from gpufaas_core.wire.bodies import CHUNK_BYTES, FILE, INLINE
from gpufaas_core.wire.credit import Window
from gpufaas_core.wire.heads import AnswerHead, CallHead, EndHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import BrokenFrame
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node import Node

_decode_call: Final = msgspec.msgpack.Decoder(NodeCallHead).decode


class Server(Protocol):
    """Where calls are served and queries answered; see `call_server.CallServer`."""

    node: Node
    queries: NodeQueries
    me: Identity
    spool: Path
    closing: bool

    def call_ended(self) -> None:
        """A lane has no call any more."""


class Lane(Protocol):
    @property
    def full(self) -> bool:
        """The gateway takes no more of an answer for now."""

    def body_follows(self) -> None:
        """The body of the call that has come follows in pieces."""

    def send(self, kind: int, head: msgspec.Struct | None = None, body: bytes | memoryview = b"") -> None:
        """Send a frame."""


class ServedCalls:
    """See module."""

    def __init__(self, server: Server, lane: Lane) -> None:
        self._server = server
        self._lane = lane
        self._grant: Grant | None = None
        self._kept = 0
        """See `NodeCallHead.kept`."""
        self._known: Grant | None = None
        """The grant of the last call, if the gateway keeps it."""
        self._exchange: Exchange | None = None
        self._body: _SpooledBody | _StreamedBody | None = None
        """The body of a call that does not come with the call itself."""
        self._rest = memoryview(b"")
        """Of an answer that is whole here, what the gateway has not taken. Its exchange is over."""
        self._run_s: Seconds = 0.0
        """How long its call ran."""

    def begin(self, header: bytes, body: bytes) -> None:
        """A call comes. :raises BrokenFrame: by a grant that did not come"""
        call = _decode_call(header)
        if call.head.body_mode != INLINE:
            self._lane.body_follows()
        grant = call.grant or self._known
        if grant is None:
            raise BrokenFrame("a call by the grant of the last one, which was not kept")
        self._known = grant if call.kept else None
        if self._server.closing:
            self.fail(GrantRefused(f"node {self._server.me.id} stops"))
            return
        self._grant, self._kept = grant, call.kept
        if call.head.body_mode == FILE:
            self._spool(grant, call.head)
        else:
            self._start(grant, call.head, body)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body comes. Those of a call that is over are skipped."""
        if self._body is not None:
            try:
                self._body.add(piece)
            except OSError as exc:
                self._storage_failed(exc)

    def on_body_end(self) -> None:
        if isinstance(self._body, _SpooledBody):
            self._body.end()
            self._start(self._body.grant, self._body.head, b"")
        elif self._body is not None:
            self._body.add(None)

    def pump(self) -> None:
        """Pass on what there is of the answer, as far as the gateway takes it."""
        exchange, lane = self._exchange, self._lane
        if exchange is None:
            self._send_rest()
            return
        while not lane.full:
            piece = exchange.take()
            if piece is None:
                break
            if type(piece) is bytes:
                lane.send(Kind.CHUNK, None, piece)
                continue
            head, body, whole = cast(tuple[AnswerHead, bytes, bool], piece)
            grant = None if exchange.grant is self._grant else exchange.grant
            if whole and exchange.kept and len(body) > CHUNK_BYTES:
                self._server.node.grants.let_go(exchange, head.run_s)  # the gateway may read it slowly
            kept = whole and exchange.kept > 0 and not head.failed and not exchange.once
            answer = NodeAnswerHead(head, exchange.load_s, exchange.phases, grant, exchange.tier, kept)
            if whole:
                self._end()
                if len(body) <= CHUNK_BYTES:
                    lane.send(Kind.ANSWER, answer, body)
                else:
                    self._send_large(answer, body)
                return
            lane.send(Kind.HEAD, answer, body)
        else:
            return
        error = exchange.error
        if error is not None:
            self._end()
            self.fail(error, exchange)
        elif exchange.end is not None:
            self._end()
            lane.send(Kind.END, exchange.end)

    def _send_large(self, answer: NodeAnswerHead, body: bytes | memoryview) -> None:
        """Send an answer that is whole, and too large for a frame, in pieces."""
        head = msgspec.structs.replace(answer.head, length=len(body))
        self._lane.send(Kind.HEAD, msgspec.structs.replace(answer, head=head))
        self._rest, self._run_s = memoryview(body), answer.head.run_s
        self._send_rest()

    def _send_rest(self) -> None:
        lane = self._lane
        while self._rest and not lane.full:
            piece, self._rest = self._rest[:CHUNK_BYTES], self._rest[CHUNK_BYTES:]
            lane.send(Kind.CHUNK, None, piece)
            if not self._rest:
                lane.send(Kind.END, EndHead(self._run_s))

    def give_up(self) -> None:
        """The caller is gone: stop the call, if there is one."""
        exchange, grant = self._exchange, self._grant
        self._rest = self._rest[:0]
        self._end()
        if grant is not None and (exchange is None or not exchange.finished):
            self._server.node.grants.abort(grant.call, grant.device)

    def fail(self, error: GpufaasError, exchange: Exchange | None = None) -> None:
        """Tell the gateway *error*, which is the last that it hears of the call, and how its worker was started."""
        kind = Kind.REFUSED if isinstance(error, GrantRefused) else Kind.ERROR
        head = error_head(error)
        if exchange is not None:
            head = msgspec.structs.replace(head, load_s=exchange.load_s, phases=exchange.phases, tier=exchange.tier)
        self._lane.send(kind, head)

    # --- within ---

    def _start(self, grant: Grant, head: CallHead, body: bytes) -> None:
        try:
            exchange = self._server.node.grants.call(grant, head, body, self._kept)
        except (GrantRefused, StorageFailed) as exc:
            self.give_up() if isinstance(exc, StorageFailed) else self._end()
            self.fail(exc)
            return
        self._exchange = exchange
        exchange.watcher = self.pump
        if grant.cold or grant.load_s:
            exchange.when_runs(partial(self._lane.send, Kind.RUNS))
        if head.body_mode not in (INLINE, FILE):
            self._body = _StreamedBody(exchange, self._lane)
        self.pump()

    def _spool(self, grant: Grant, head: CallHead) -> None:
        if not self._server.node.grants.open_for_body(grant):
            self._end()
            self.fail(GrantRefused(f"{grant.device} refused call {grant.call}"))
            return
        try:
            self._body = _SpooledBody(self._server.spool, grant, head, self._lane)
        except OSError as exc:
            self._storage_failed(exc)

    def _storage_failed(self, exc: OSError) -> None:
        size = self._body.size if self._body is not None else 0
        self.give_up()
        self.fail(
            StorageFailed(
                f"the body of {format_bytes(size)} or more could not be kept in {self._server.spool} on node "
                f"{self._server.me.id} ({exc.strerror}): make room there, or send less"
            )
        )

    def _end(self) -> None:
        """The call has ended as far as this lane goes."""
        if self._exchange is not None:
            self._exchange.watcher = self._exchange.on_run = None
            self._exchange = None
        self._grant = None
        if self._body is not None:
            self._body.close()
            self._body = None


class _Taken:
    """What of a body is taken as it comes: its sender may send more."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._window = Window(BODY_WINDOW)
        lane.send(Kind.ROOM, RoomHead(BODY_WINDOW))

    def add(self, size: Bytes) -> None:
        self._window.came(size)
        if room := self._window.room():
            self._lane.send(Kind.ROOM, RoomHead(room))


class _SpooledBody:
    """A body that is kept in a file, for its worker to read."""

    def __init__(self, directory: Path, grant: Grant, head: CallHead, lane: Lane) -> None:
        """:raises OSError: the file cannot be made"""
        self.grant = grant
        fd, self.path = tempfile.mkstemp(prefix="body-", dir=directory)
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._taken = _Taken(lane)
        self.head = msgspec.structs.replace(head, body_path=self.path)
        self.size = 0

    def add(self, piece: bytes) -> None:
        """:raises OSError: the disk is full"""
        self.size += len(piece)
        view = memoryview(piece)
        while view:
            view = view[self._file.write(view) :]
        self._taken.add(len(piece))

    def end(self) -> None:
        """All of it is there."""
        self._file.close()

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


class _StreamedBody:
    """A body that is passed on to its worker as it comes, as far as the worker takes it."""

    size = 0

    def __init__(self, exchange: Exchange, lane: Lane) -> None:
        self._exchange = exchange
        self._taken = _Taken(lane)
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        """The pieces that the worker does not have yet; None: the end."""
        self._task = asyncio.get_running_loop().create_task(self._feed())

    def add(self, piece: bytes | None) -> None:
        self._pieces.put_nowait(piece)

    def close(self) -> None:
        self._task.cancel()

    async def _feed(self) -> None:
        while (piece := await self._pieces.get()) is not None:
            await self._exchange.send_body(piece)
            self._taken.add(len(piece))
        await self._exchange.end_body()


def error_head(error: GpufaasError) -> ErrorHead:
    return ErrorHead(error_name(error), str(error), getattr(error, "retry_after_s", 1.0))
