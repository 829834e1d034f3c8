"""
A node's end of the call protocol: gateways connect here with calls of functions, and with queries about them.

A gateway has one link here, which says that both are alive, and connections for its calls (`lane_connection`). When a
connection breaks, the callers of its calls are gone; when the link is silent, all callers of its gateway are.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

from gpufaas_cluster import control
from gpufaas_cluster.connection import Identity, Link, listen
from gpufaas_cluster.node_queries import NodeQueries
from gpufaas_cluster.served_connection import ServedConnection
from gpufaas_core.errors import StorageFailed
from gpufaas_core.logs import FunctionLogs
from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.node import Node

log = logging.getLogger("calls")

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
        self._connections: dict[ServedConnection, _GatewayRun] = {}

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
                while any(each.busy for each in self._connections):
                    self._ended.clear()
                    await self._ended.wait()

    def call_ended(self) -> None:
        self._ended.set()

    async def close(self) -> None:
        """Take nothing more, and end all connections; what was written to them still goes out."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.close("the node stops")
        for connection in list(self._connections):
            connection.close()

    def _accept(self, link: Link, hello: control.ClientHello) -> int:
        gateway = hello.id, hello.boot
        if hello.window:
            connection = ServedConnection(self, hello.id, hello.window, self._forget)
            self._connections[connection] = gateway
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
        for connection in [each for each, of in self._connections.items() if of == gateway]:
            connection.abort("its gateway is gone")

    def _forget(self, connection: ServedConnection) -> None:
        del self._connections[connection]
        self._ended.set()
