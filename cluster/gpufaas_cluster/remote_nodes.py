"""
Calls to nodes elsewhere: straight from gateway to node, over connections that are kept (`lane_connection`).

Each node has one link, whose heartbeats say that both ends are alive. When it is lost, every call there fails, and the
gateway dials the node again for as long as the scheduler sees it. Beside it is a connection that all small calls share:
those that come in the same turn of the loop are one write and one read. All other calls share another one. A warm call
needs no task.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Final

from gpufaas_cluster.call_connection import CallConnection, LaneUser
from gpufaas_cluster.connection import Identity, Link, connect
from gpufaas_cluster.placed_call import PlacedCall
from gpufaas_cluster.remote_exchange import OnUnreachable, RemoteExchange
from gpufaas_cluster.remote_query import RemoteQuery
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Grant
from gpufaas_core.model import Bytes, Device, DeviceId, NodeId, NodeView, Seconds
from gpufaas_core.wire.credit import WINDOW
from gpufaas_core.wire.heads import CallHead

log = logging.getLogger("nodes")

DIAL_S: Final[Seconds] = 2.0
"""A node that does not take a connection within this is unreachable."""
_SMALL_WINDOW: Final[Bytes] = 128 * 1024
"""The credit of answers beside which small calls are sent."""
_FIRST_RETRY_S: Final[Seconds] = 0.1
_LONGEST_RETRY_S: Final[Seconds] = 3.0


class RemoteNodes:
    """`ports.NodePort`. `set_nodes` says which nodes there are; calls to others are refused."""

    def __init__(
        self,
        me: Identity,
        on_unreachable: OnUnreachable = lambda *_: None,
        may_keep: Callable[[Grant], PlacedCall | None] = lambda _: None,
    ) -> None:
        """:param may_keep: see `RemotePlacement.may_keep`"""
        self.me = me
        self.on_unreachable = on_unreachable
        self._may_keep = may_keep
        self.watchers: set[Callable[[], None]] = set()
        """Called when a node came, went, was lost or is reached again."""
        self.loop = asyncio.get_running_loop()
        self._nodes: dict[str, NodeClient] = {}
        self._of_device: dict[DeviceId, NodeClient] = {}
        self._leaving: dict[str, NodeClient] = {}
        """Nodes that left the view while calls run there."""

    def set_nodes(self, views: Iterable[NodeView]) -> None:
        """Set the nodes that there are. Calls at a node that is no longer among them run on while it lives."""
        seen = {view.id: view for view in views}
        for id_, node in list(self._nodes.items()):
            view = seen.get(NodeId(id_))
            if view is None or view.address != node.address:
                del self._nodes[id_]
                self._leaving[id_] = node
                node.leave()
        self._leaving = {id_: node for id_, node in self._leaving.items() if not node.closed}
        for view in seen.values():
            found = self._nodes.get(view.id)
            left = self._leaving.get(view.id)
            if found is None and left is not None and left.address == view.address:
                # Keep its link: if the gateway makes another one, the node gives up the calls that run there.
                found = self._nodes[view.id] = self._leaving.pop(view.id)
                found.come_back()
            if found is None:
                self._nodes[view.id] = NodeClient(self, view)
            else:
                found.view = view
        self._of_device = {device.id: node for node in self._nodes.values() for device in node.view.devices}
        self.changed()

    def changed(self) -> None:
        for watcher in list(self.watchers):
            watcher()

    @property
    def nodes(self) -> "list[NodeClient]":
        return list(self._nodes.values())

    def unlinked(self) -> list[NodeId]:
        """Return the nodes that cannot be reached."""
        return sorted(node.id for node in self._nodes.values() if node.down)

    def get(self, id_: str) -> "NodeClient | None":
        return self._nodes.get(id_)

    def devices(self) -> list[Device]:
        return [device for node in self._nodes.values() for device in node.view.devices]

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> "RemoteExchange":
        """Begin the call. `RemoteExchange.answer` raises if its node is not there or refuses it."""
        exchange = RemoteExchange(self.loop, self.on_unreachable, grant, head, body, self._may_keep(grant))
        node = self._of_device.get(grant.device)
        if node is None:
            exchange.not_sent(f"no node has device {grant.device} now")
        else:
            node.begin(exchange)
        return exchange

    async def close(self) -> None:
        """End all connections; calls that still run fail."""
        nodes = [*self._nodes.values(), *self._leaving.values()]
        self._nodes, self._leaving = {}, {}
        for node in nodes:
            node.close()
        await asyncio.gather(*(task for node in nodes for task in node.tasks), return_exceptions=True)


class NodeClient:
    """One node: its link, and the connections to it."""

    def __init__(self, nodes: RemoteNodes, view: NodeView) -> None:
        self.view = view
        self.address = view.address
        self.down = ""
        """Why it cannot be reached; empty: it can, or it was not tried yet."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.small = StandingConnection(self, nodes.me, _SMALL_WINDOW)
        """The connection of small calls."""
        self.large = StandingConnection(self, nodes.me, WINDOW)
        """That of all others, and of queries."""
        self._nodes = nodes
        self._link: Link | None = None
        self._left = False
        self.closed = False
        self.spawn(self._keep_link())

    @property
    def id(self) -> NodeId:
        return self.view.id

    @property
    def linked(self) -> bool:
        return self._link is not None

    def begin(self, user: LaneUser) -> None:
        """Give *user* a lane: at once if there is a connection, else as soon as there is one."""
        (self.small if user.brief else self.large).begin(user)

    async def ask(self, what: str, value: object) -> bytes:
        """
        Return what the node answers to a query (`call_heads.QueryHead`).

        :raises NotReached: it is not there, or was lost
        :raises GpufaasError: its error
        """
        async with aclosing(self._ask(what, value)) as pieces:
            return b"".join([piece async for piece in pieces])

    async def ask_lines(self, what: str, value: object) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer as they come. :raises GpufaasError: as `ask`"""
        rest = b""
        async with aclosing(self._ask(what, value)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line

    def _ask(self, what: str, value: object) -> AsyncGenerator[bytes, None]:
        query = RemoteQuery(what, value)
        self.begin(query)
        return query.pieces()

    def rests(self, connection: CallConnection) -> None:
        """No call is on *connection* any more, or it is closed."""
        if self._left:
            connection.close()
            if not self._open:
                self.close()

    def leave(self) -> None:
        """The node is no longer in the view: take no new calls; those that run go on."""
        self._left = True
        for each in (self.small, self.large):
            each.refuse(f"node {self.id} left")
        for connection in self._open:
            if not connection.running:
                connection.close()
        if not self._open:
            self.close()

    def come_back(self) -> None:
        """The node is in the view again, and calls of before still run there."""
        self._left = False

    def close(self) -> None:
        """End all connections: calls that run there fail."""
        self._left = self.closed = True
        if self._link is not None:
            self._link.on_lost = lambda _: None
            self._link.close("the gateway left")
        for task in self.tasks:
            task.cancel()
        self._lost("the gateway stops")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run *work* as a task of this node."""
        task: asyncio.Task[None] = self._nodes.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # --- within ---

    @property
    def _open(self) -> list[CallConnection]:
        found = (self.small.connection, self.large.connection)
        return [each for each in found if each is not None and not each.lost]

    async def _keep_link(self) -> None:
        """Keep the link; connect again when it is lost."""
        retry_s = _FIRST_RETRY_S
        while not self._left or self._open:
            try:
                link = await connect(self.address, self._nodes.me, DIAL_S)
            except GpufaasError as exc:
                known, self.down = bool(self.down), str(exc)
                self._refuse_waiting(self.down)
                if not known:
                    log.warning("node %s cannot be reached: %s", self.id, exc)
                    self._nodes.changed()
                await asyncio.sleep(retry_s)
                retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)
                continue
            lost = link.attend(lambda _: None)
            retry_s = _FIRST_RETRY_S
            self._link, self.down = link, ""
            self.small.open()
            self._nodes.changed()
            try:
                why = await lost
            finally:
                self._link = None
            log.warning("node %s is lost: %s", self.id, why)
            self.down = why
            self._nodes.changed()  # first: this tells the scheduler, which then places no call there again
            self._lost(why)

    def _lost(self, why: str) -> None:
        """The node is gone: fail all that waits for it."""
        self._refuse_waiting(why)
        for connection in self._open:
            connection.abort(why)

    def _refuse_waiting(self, why: str) -> None:
        for each in (self.small, self.large):
            each.refuse(f"node {self.id} cannot be reached: {why}")


class StandingConnection:
    """A connection that stands, and is made again when one is wanted after it broke."""

    def __init__(self, node: NodeClient, me: Identity, window: Bytes) -> None:
        self.connection: CallConnection | None = None
        self._node = node
        self._me = me
        self._window = window
        self._waiting: list[LaneUser] = []
        self._dials = False

    def begin(self, user: LaneUser) -> None:
        """Give *user* a lane, as `NodeClient.begin` does."""
        if self.connection is not None and self.connection.usable:
            self.connection.begin(user)
        elif self._node.down:
            user.not_sent(f"node {self._node.id} cannot be reached: {self._node.down}")
        else:
            self._waiting.append(user)
            self.open()

    def open(self) -> None:
        """Make it, if it is not there."""
        if not self._dials and (self.connection is None or not self.connection.usable):
            self._dials = True
            self._node.spawn(self._dial())

    def refuse(self, why: str) -> None:
        """No call that waits for it gets it."""
        waiting, self._waiting = self._waiting, []
        for user in waiting:
            user.not_sent(why)

    async def _dial(self) -> None:
        connection = CallConnection(self._node.id, self._window, self._node.rests)
        try:
            await connect(self._node.address, self._me, DIAL_S, connection)
        except GpufaasError as exc:
            self.refuse(f"node {self._node.id} cannot be reached: {exc}")
            return
        finally:
            self._dials = False
        self.connection = connection
        waiting, self._waiting = self._waiting, []
        for user in waiting:
            if not user.gone:
                connection.begin(user)
        if not connection.running:
            self._node.rests(connection)
