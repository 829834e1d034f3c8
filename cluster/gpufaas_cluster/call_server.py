"""
A node's end of the call protocol: gateways connect here with calls of functions, and with queries about them.

A gateway has one link here, which says that both are alive, and as many connections as it has calls at once
(`call_frames.py`). When a connection breaks, the caller of its call is gone; when the link is silent, all callers of
its gateway are.
"""

import asyncio
import contextlib
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_cluster import control
from gpufaas_cluster.call_frames import NodeKind, QueryHead
from gpufaas_cluster.connection import Identity, Link, listen
from gpufaas_cluster.frame_connection import FrameConnection
from gpufaas_cluster.node_queries import NodeQueries
from gpufaas_cluster.served_calls import ServedCalls, error_head
from gpufaas_core.errors import CallCancelled, GpufaasError, StorageFailed
from gpufaas_core.frames import BrokenFrame, Kind, encode_frame, encode_prefix
from gpufaas_core.logs import FunctionLogs
from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.node import Node

log = logging.getLogger("calls")

_UNSENT: Final = 512 * 1024
"""Bytes of an answer that wait for a gateway beyond the socket; more stay with the exchange, which holds the worker."""
_decode_query: Final = msgspec.msgpack.Decoder(QueryHead).decode

_GatewayRun = tuple[str, str]
"""A gateway's id and boot."""


class CallServer:
    """:param spool: a directory of its own for large bodies; what is in it when the server opens is removed"""

    def __init__(self, node: Node, logs: FunctionLogs, me: Identity, spool: Path) -> None:
        self.node = node
        self.me = me
        self.spool = spool
        self.queries = NodeQueries(node, logs, me.id)
        self.closing = False
        """Calls are refused: the node is about to stop."""
        self._finished = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._links: dict[_GatewayRun, Link] = {}
        self._connections: dict[_GatewayRun, set[ServedConnection]] = {}

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
        """A connection has no call any more."""
        if self.closing and not any(each.calls.busy for of in self._connections.values() for each in of):
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
            # The gateway gave that link up, and with it every call that it had here.
            before.abort("it made another")
            self._hang_up(gateway)
        return 0

    def _lost(self, gateway: _GatewayRun, link: Link, why: str) -> None:
        if self._links.get(gateway) is link:
            del self._links[gateway]
            log.info("gateway %s is gone: %s", gateway[0], why)
            self._hang_up(gateway)

    def _hang_up(self, gateway: _GatewayRun) -> None:
        for connection in list(self._connections.get(gateway, ())):
            connection.abort()

    def forget(self, gateway: _GatewayRun, connection: "ServedConnection") -> None:
        """The connection is closed."""
        of_gateway = self._connections.get(gateway)
        if of_gateway is not None:
            of_gateway.discard(connection)
            if not of_gateway:
                del self._connections[gateway]


class ServedConnection(FrameConnection):
    """A node's end of a connection: it carries one call, or one query, at a time."""

    def __init__(self, server: CallServer, gateway: _GatewayRun) -> None:
        super().__init__()
        self.calls = ServedCalls(server, self)
        self._server = server
        self._gateway = gateway
        self._query: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        calls = self.calls
        if kind == Kind.CALL:
            self._check_free("a call")
            calls.begin(header, body)
        elif kind == Kind.BODY:
            calls.on_body(body)
        elif kind == Kind.BODY_END:
            calls.on_body_end()
        elif kind == Kind.CANCEL:
            if calls.busy or self._query is not None:
                self._give_up()
                calls.fail(CallCancelled("the caller went away"))
        elif kind == NodeKind.ASK:
            self._check_free("a query")
            what = _decode_query(header).what
            self._query = asyncio.get_running_loop().create_task(self._reply(what, body))

    def broken(self, error: Exception) -> None:
        log.warning("gateway %s sent what is no frame, or none that comes now: %s", self._gateway[0], error)
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.set_write_buffer_limits(high=_UNSENT)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.calls.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._give_up()
        self._server.forget(self._gateway, self)

    def _check_free(self, what: str) -> None:
        if self.calls.busy or self._query is not None:
            raise BrokenFrame(f"{what} before the end of the last call")

    def _give_up(self) -> None:
        if self._query is not None:
            self._query.cancel()
            self._query = None
        self.calls.give_up()

    async def _reply(self, what: str, value: bytes) -> None:
        """Answer a query."""
        try:
            answer = await self._server.queries.answer(what, value)
            if isinstance(answer, bytes):
                frame = encode_frame(NodeKind.REPLY, None, answer)
            else:
                async with aclosing(answer) as pieces:
                    async for piece in pieces:
                        self.write_with(encode_prefix(Kind.CHUNK, None, len(piece)), piece)
                        await self.drain()
                frame = encode_frame(Kind.END)
        except GpufaasError as exc:
            frame = encode_frame(NodeKind.ERROR, error_head(exc))
        except Exception as exc:
            log.exception("a query failed: %s", what)
            error = GpufaasError(f"node {self._server.me.id} failed ({exc!r}): its log has more")
            frame = encode_frame(NodeKind.ERROR, error_head(error))
        self._query = None
        self.write(frame)
