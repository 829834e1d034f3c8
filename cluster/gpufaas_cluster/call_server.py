"""
A node's end of the call protocol: gateways connect here with calls of functions, and with queries about them.

A gateway has one link here, which says that both are alive, and as many connections as it has calls at once
(`gpufaas_cluster.call_frames`). A call whose connection breaks has lost its caller; when the link is silent, all of its
gateway have.

No call costs a task: the exchange tells when there is something of an answer. Only a body that streams has one, for it
waits for the worker.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec

from gpufaas_cluster import control
from gpufaas_cluster.call_frames import (
    WINDOW,
    ErrorHead,
    NodeAnswerHead,
    NodeCallHead,
    NodeKind,
    QueryHead,
    WindowHead,
)
from gpufaas_cluster.connection import Identity, Link, listen
from gpufaas_cluster.error_codes import error_name
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.environment import measure
from gpufaas_core.errors import GpufaasError, LeaseRefused, StorageFailed
from gpufaas_core.frames import (
    CHUNK_BYTES,
    FILE,
    INLINE,
    AnswerHead,
    BrokenFrame,
    CallHead,
    FrameReader,
    Kind,
    encode_frame,
    encode_prefix,
)
from gpufaas_core.logs import LogLine, LogQuery
from gpufaas_core.messages import Lease
from gpufaas_core.model import FunctionId, Seconds
from gpufaas_core.steps import IllegalStep
from gpufaas_core.units import format_bytes
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node import Node

log = logging.getLogger("calls")

_SHORT: Final = 16 * 1024
_UNSENT: Final = 512 * 1024
"""Bytes of an answer that wait for a gateway beyond the socket; more stay with the exchange, which holds the worker."""
_decode_call: Final = msgspec.msgpack.Decoder(NodeCallHead).decode
_decode_asked: Final = msgspec.msgpack.Decoder(QueryHead).decode
_line: Final = msgspec.json.Encoder().encode


class Logs(Protocol):
    """What functions printed here (gpufaas_core.logs.FunctionLogs)."""

    def query(self, query: LogQuery) -> list[LogLine]: ...

    def follow(self, query: LogQuery) -> AsyncIterator[LogLine]: ...

    def known(self, name: str, namespace: str) -> bool: ...

    def drop(self, name: str, namespace: str) -> None: ...


class CallServer:
    """:param spool: a directory of its own for large bodies; what is in it when the server opens is removed"""

    def __init__(self, node: Node, logs: Logs, me: Identity, spool: Path) -> None:
        self.node = node
        self.logs = logs
        self.me = me
        self.spool = spool
        self.closing = False
        """Calls are refused: the node is about to stop."""
        self._finished = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._links: dict[tuple[str, str], Link] = {}
        self._connections: dict[tuple[str, str], set[ServedConnection]] = {}

    async def open(self, address: str) -> None:
        """
        Take connections at *address*, ``HOST:PORT``.

        :raises GpufaasError: the address cannot be had
        :raises StorageFailed: the spool directory cannot be used
        """
        try:
            self.spool.mkdir(parents=True, exist_ok=True)
            for left in self.spool.iterdir():
                left.unlink()
        except OSError as exc:
            raise StorageFailed(f"the directory for large bodies {self.spool} cannot be used ({exc.strerror})") from exc
        self._server = await listen(address, self.me, self._accept)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def finish(self, within_s: Seconds) -> None:
        """Refuse new calls; return when those that run are answered, or after *within_s*."""
        self.closing = True
        self.call_ended()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._finished.wait(), within_s)

    def call_ended(self) -> None:
        if self.closing and not any(each.has_call for of in self._connections.values() for each in of):
            self._finished.set()

    async def close(self) -> None:
        """Take nothing more, and end all connections; what was written to them still goes out."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.close("the node stops")
        for connection in [each for of in self._connections.values() for each in of]:
            connection.close()

    def _accept(self, link: Link, hello: control.ClientHello) -> int:
        gateway = hello.id, hello.boot
        if hello.calls:
            connection = ServedConnection(self, gateway)
            self._connections.setdefault(gateway, set()).add(connection)
            link.successor = connection
            return 0
        before = self._links.get(gateway)
        self._links[gateway] = link
        link.on_message = lambda _: None
        link.on_lost = lambda why: self._lost(gateway, link, why)
        if before is not None:
            # It gave that one up, and with it every call that it had here.
            before.abort("it made another")
            self._hang_up(gateway)
        return 0

    def _lost(self, gateway: tuple[str, str], link: Link, why: str) -> None:
        if self._links.get(gateway) is link:
            del self._links[gateway]
            log.info("gateway %s is gone: %s", gateway[0], why)
            self._hang_up(gateway)

    def _hang_up(self, gateway: tuple[str, str]) -> None:
        for connection in list(self._connections.get(gateway, ())):
            connection.abort()

    def forget(self, gateway: tuple[str, str], connection: "ServedConnection") -> None:
        of_gateway = self._connections.get(gateway)
        if of_gateway is not None:
            of_gateway.discard(connection)
            if not of_gateway:
                del self._connections[gateway]


class _Spool:
    """The file of a body on its way."""

    def __init__(self, directory: Path, lease: Lease, head: CallHead) -> None:
        """:raises OSError: it cannot be made"""
        self.lease = lease
        fd, self.path = tempfile.mkstemp(prefix="body-", dir=directory)
        self.file = os.fdopen(fd, "wb", buffering=0)
        self.head = msgspec.structs.replace(head, body_path=self.path)
        self.size = 0

    def write(self, piece: bytes) -> None:
        """:raises OSError: the disk is full"""
        self.size += len(piece)
        view = memoryview(piece)
        while view:
            view = view[self.file.write(view) :]


class ServedConnection(asyncio.Protocol):
    """One connection for calls, one at a time."""

    def __init__(self, server: CallServer, gateway: tuple[str, str]) -> None:
        self._server = server
        self._gateway = gateway
        self._reader = FrameReader()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._lease: Lease | None = None
        self._exchange: Exchange | None = None
        self._spool: _Spool | None = None
        self._spooled = ""
        self._pieces: deque[bytes | None] = deque()
        """Of a body that streams, those that the worker has not; None: its end."""
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._full = False
        self._room: asyncio.Future[None] | None = None
        self._lost = False

    @property
    def has_call(self) -> bool:
        return self._exchange is not None or self._spool is not None

    @property
    def busy(self) -> bool:
        return self._exchange is not None or self._spool is not None or self._task is not None

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's
        self._transport.set_write_buffer_limits(high=_UNSENT)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, header, body in self._reader.feed(data):
                self._on_frame(kind, header, body)
        except (BrokenFrame, IllegalStep, msgspec.DecodeError) as exc:
            log.warning("gateway %s said what is no frame, or none that comes now: %s", self._gateway[0], exc)
            self.abort()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self._exchange is not None:
            self._pump()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self._lost = True
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._give_up()
        self._server.forget(self._gateway, self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- calls ---

    def _on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        if kind == Kind.CALL:
            if self.busy:
                raise BrokenFrame("a call before the end of the last one")
            call = _decode_call(header)
            if self._server.closing:
                self._refuse(LeaseRefused(f"node {self._server.me.id} stops"))
                return
            self._lease = call.lease
            if call.head.body_mode == FILE:
                self._spool_body(call.lease, call.head)
            else:
                self._begin(call.lease, call.head, body)
        elif kind == Kind.BODY:
            if self._spool is not None:
                self._keep(body)
            elif self._task is not None:
                self._pieces.append(body)
                self._more.set()
        elif kind == Kind.BODY_END:
            if self._spool is not None:
                spool, self._spool = self._spool, None
                spool.file.close()
                self._begin(spool.lease, spool.head, b"")
            elif self._task is not None:
                self._pieces.append(None)
                self._more.set()
        elif kind == Kind.CANCEL:
            if self.busy:
                self._give_up()
                self._fail(ErrorHead("CallCancelled", "the caller went away"))
        elif kind == NodeKind.ASK:
            if self.busy:
                raise BrokenFrame("a question before the end of the last call")
            self._task = asyncio.get_running_loop().create_task(self._answer(_decode_asked(header).what, body))

    def _begin(self, lease: Lease, head: CallHead, body: bytes) -> None:
        try:
            exchange = self._server.node.leases.call(lease, head, body)
        except LeaseRefused as exc:
            self._over()
            self._refuse(exc)
            return
        self._exchange = exchange
        exchange.watcher = self._pump
        if head.body_mode not in (INLINE, FILE):
            self._pieces.clear()
            self._more.clear()
            self._task = asyncio.get_running_loop().create_task(self._feed(exchange))
            self._transport.write(encode_frame(NodeKind.ROOM, WindowHead(WINDOW)))
        self._pump()

    def _pump(self) -> None:
        """Pass on what there is of the answer, as far as the gateway takes it."""
        exchange = self._exchange
        if exchange is None:
            return
        while not self._full:
            piece = exchange.take()
            if piece is None:
                break
            if type(piece) is bytes:
                self._write(encode_prefix(Kind.CHUNK, None, len(piece)), piece)
                continue
            head, body, whole = cast(tuple[AnswerHead, bytes, bool], piece)
            lease = None if exchange.lease is self._lease else exchange.lease
            answer = NodeAnswerHead(head, exchange.load_s, exchange.phases, lease)
            if whole:
                self._over()
                self._write(encode_prefix(Kind.ANSWER, answer, len(body)), body)
                return
            self._write(encode_prefix(Kind.HEAD, answer, len(body)), body)
        else:
            return
        error = exchange.error
        if error is not None:
            self._over()
            if isinstance(error, LeaseRefused):
                self._refuse(error)
            else:
                self._fail(_failure(error))
        elif exchange.end is not None:
            self._over()
            self._transport.write(encode_frame(Kind.END, exchange.end))

    async def _feed(self, exchange: Exchange) -> None:
        """Give the worker a body that streams."""
        taken = 0
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                if piece is None:
                    await exchange.end_body()
                    continue
                await exchange.send_body(piece)
                taken += len(piece)
                if taken >= WINDOW // 4 and not self._lost:
                    self._transport.write(encode_frame(NodeKind.ROOM, WindowHead(taken)))
                    taken = 0
            self._more.clear()
            await self._more.wait()

    def _over(self) -> None:
        """The call has ended as far as this connection goes."""
        if self._exchange is not None:
            self._exchange.watcher = None
            self._exchange = None
        self._lease = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._pieces.clear()
        if self._spool is not None:
            self._spool.file.close()
            self._spool = None
        if self._spooled:
            with contextlib.suppress(OSError):
                os.unlink(self._spooled)
            self._spooled = ""
        if self._server.closing:
            self._server.call_ended()

    def _give_up(self) -> None:
        """Nobody waits for the call any more."""
        exchange, lease = self._exchange, self._lease
        self._over()
        if lease is not None and (exchange is None or not exchange.finished):
            self._server.node.abort(lease.call, lease.device)

    # --- bodies in files ---

    def _spool_body(self, lease: Lease, head: CallHead) -> None:
        if not self._server.node.leases.open_for_body(lease):
            self._over()
            self._refuse(LeaseRefused(f"{lease.device} refused call {lease.call}"))
            return
        try:
            self._spool = _Spool(self._server.spool, lease, head)
            self._spooled = self._spool.path
        except OSError as exc:
            self._storage_failed(0, exc)

    def _keep(self, piece: bytes) -> None:
        assert self._spool is not None
        try:
            self._spool.write(piece)
        except OSError as exc:
            self._storage_failed(self._spool.size, exc)

    def _storage_failed(self, size: int, exc: OSError) -> None:
        self._give_up()
        error = StorageFailed(
            f"the body of {format_bytes(size)} or more could not be kept in {self._server.spool} on node "
            f"{self._server.me.id} ({exc.strerror}): make room there, or send less"
        )
        self._fail(_failure(error))

    # --- questions ---

    async def _answer(self, what: str, value: bytes) -> None:
        failure: ErrorHead | None = None
        try:
            answer = await self._asked(what, value)
        except GpufaasError as exc:
            failure = _failure(exc)
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            log.exception("a question failed: %s", what)
            failure = ErrorHead("GpufaasError", f"node {self._server.me.id} failed ({exc!r}): its log has more")
        self._task = None
        if self._lost:
            return
        if failure is not None:
            self._fail(failure)
        elif answer is None:
            self._transport.write(encode_frame(Kind.END))
        else:
            self._transport.write(encode_frame(NodeKind.REPLY, None, answer))

    async def _asked(self, what: str, value: bytes) -> bytes | None:
        """Return the answer in msgpack; None: it went out in pieces."""
        node, logs = self._server.node, self._server.logs
        if what == "define":
            return msgspec.msgpack.encode(await node.functions.define(_read(value, WorkerSpec)))
        if what == "check":
            await node.functions.check(_read(value, WorkerSpec))
        elif what == "forget":
            await node.functions.forget(FunctionId(_read(value, str)))
        elif what == "environment":
            return msgspec.msgpack.encode(await asyncio.to_thread(measure))
        elif what == "usage":
            return msgspec.msgpack.encode(await node.host.usage_of(FunctionId(_read(value, str))))
        elif what == "known":
            query = _read(value, LogQuery)
            return msgspec.msgpack.encode(await asyncio.to_thread(logs.known, query.name, query.namespace))
        elif what == "drop":
            query = _read(value, LogQuery)
            await asyncio.to_thread(logs.drop, query.name, query.namespace)
        elif what == "logs":
            found = await asyncio.to_thread(logs.query, _read(value, LogQuery))
            await self._say_lines(found)
            return None
        elif what == "follow":
            await self._follow(_read(value, LogQuery))
            return None
        else:
            raise GpufaasError(f"node {self._server.me.id} does not know the question {what!r}: run the same release")
        return msgspec.msgpack.encode(None)

    async def _say_lines(self, lines: list[LogLine]) -> None:
        piece = bytearray()
        for line in lines:
            piece += _line(line) + b"\n"
            if len(piece) > CHUNK_BYTES // 2:
                await self._say(bytes(piece))
                piece.clear()
        if piece:
            await self._say(bytes(piece))

    async def _follow(self, query: LogQuery) -> None:
        lines = self._server.logs.follow(query)
        try:
            async for line in lines:
                await self._say(_line(line) + b"\n")
        finally:
            await cast(Any, lines).aclose()

    async def _say(self, piece: bytes) -> None:
        self._write(encode_prefix(Kind.CHUNK, None, len(piece)), piece)
        while self._full and not self._lost:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    # --- writing ---

    def _write(self, prefix: bytes, body: bytes) -> None:
        if len(body) <= _SHORT:
            self._transport.write(prefix + body)
        else:
            self._transport.write(prefix)
            self._transport.write(body)

    def _refuse(self, error: LeaseRefused) -> None:
        if not self._lost:
            self._transport.write(encode_frame(NodeKind.REFUSED, _failure(error)))

    def _fail(self, failure: ErrorHead) -> None:
        if not self._lost:
            self._transport.write(encode_frame(NodeKind.ERROR, failure))


def _failure(error: GpufaasError) -> ErrorHead:
    return ErrorHead(error_name(error), str(error), getattr(error, "retry_after_s", 1.0))


def _read(value: bytes, kind: type) -> Any:
    return msgspec.msgpack.decode(value, type=kind)
