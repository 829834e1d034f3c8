"""
A node's end of the call protocol: gateways connect here with calls of functions, and with queries about them.

A gateway has one link here, which says that both are alive, and connections for its calls: one that small ones share,
and one for each other call at a time (`call_frames.py`). When a connection breaks, the callers of its calls are gone;
when the link is silent, all callers of its gateway are.
"""

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Final

from gpufaas_cluster import control
from gpufaas_cluster.call_frames import LANES
from gpufaas_cluster.connection import Identity, Link, listen
from gpufaas_cluster.frame_connection import FrameConnection
from gpufaas_cluster.node_queries import NodeQueries
from gpufaas_cluster.served_lane import ServedLane
from gpufaas_core.errors import StorageFailed
from gpufaas_core.logs import FunctionLogs
from gpufaas_core.model import Seconds
from gpufaas_core.wire.prefix import KIND, LANE
from gpufaas_gpu_manager.node import Node

log = logging.getLogger("calls")

_UNSENT: Final = 512 * 1024
"""Bytes of an answer that wait for a gateway beyond the socket; more stay with the exchange, which holds the worker."""

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
        self._ended = asyncio.Event()
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while any(each.busy for of in self._connections.values() for each in of):
                    self._ended.clear()
                    await self._ended.wait()

    def call_ended(self) -> None:
        """A lane has no call any more, or has sent the rest of an answer."""
        self._ended.set()

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
            link.lanes = min(hello.lanes, LANES) if hello.lanes > 1 else 0
            connection = ServedConnection(self, gateway, link.lanes or 1)
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
    """A node's end of a connection."""

    def __init__(self, server: CallServer, gateway: _GatewayRun, lanes: int) -> None:
        super().__init__(lanes)
        self.shared = lanes > 1
        self._server = server
        self._gateway = gateway
        self._lanes: dict[int, ServedLane] = {}
        """Those that were used."""

    @property
    def busy(self) -> bool:
        return any(lane.busy for lane in self._lanes.values())

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            super().close()

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        number = kind >> LANE
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = ServedLane(self._server, self, number, self.shared)
        lane.on_frame(kind & KIND, header, body)

    def broken(self, error: Exception) -> None:
        log.warning("gateway %s sent what is no frame, or none that comes now: %s", self._gateway[0], error)
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.set_write_buffer_limits(high=_UNSENT)

    def resume_writing(self) -> None:
        super().resume_writing()
        for lane in self._lanes.values():
            lane.calls.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for lane in self._lanes.values():
            lane.give_up()
        self._server.forget(self._gateway, self)
