"""
Calls to nodes elsewhere: straight from gateway to node, over connections that are kept (`lane_connection`).

Each node has one link, whose heartbeats say that both ends are alive. When it is lost, every call there fails, and the
gateway dials the node again for as long as the scheduler sees it. Beside it is a connection that all small calls share:
those that come in the same turn of the loop are one write and one read. Other calls have a connection to themselves. A
warm call needs no task.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import Any, Final

from gpufaas_cluster.call_connection import CallConnection, CallLane, LaneUser
from gpufaas_cluster.connection import Identity, Link, connect
from gpufaas_cluster.control import LANES
from gpufaas_cluster.kept_grants import KeptGrants
from gpufaas_cluster.remote_exchange import OnUnreachable, RemoteExchange
from gpufaas_cluster.remote_query import RemoteQuery
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Grant
from gpufaas_core.model import Device, DeviceId, NodeId, NodeView, Seconds
from gpufaas_core.wire.heads import CallHead

log = logging.getLogger("nodes")

DIAL_S: Final[Seconds] = 2.0
"""A node that does not take a connection within this is unreachable."""
_IDLE: Final = 128
"""Connections to a node that are kept for later calls."""
_TRIM_S: Final[Seconds] = 5.0
"""So often, idle connections that were not needed since the last time are closed, but for one."""
_DIALS: Final = 16
"""Connections that are made to one node at once."""
_FIRST_RETRY_S: Final[Seconds] = 0.1
_LONGEST_RETRY_S: Final[Seconds] = 3.0


class RemoteNodes:
    """`ports.NodePort`. `set_nodes` says which nodes there are; calls to others are refused."""

    def __init__(
        self,
        me: Identity,
        on_unreachable: OnUnreachable = lambda *_: None,
        kept: KeptGrants | None = None,
        lanes: int = LANES,
    ) -> None:
        """
        :param kept: the grants that this gateway may keep
        :param lanes: so many small calls at once share a connection to each node
        """
        self.me = me
        self.lanes = lanes
        self.on_unreachable = on_unreachable
        self._kept = kept
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
        kept = None if self._kept is None else self._kept.find(grant)
        exchange = RemoteExchange(self.loop, self.on_unreachable, grant, head, body, kept)
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
        self._nodes = nodes
        self._shared: CallConnection | None = None
        """The connection that small calls share; None: it is not there yet."""
        self._free: list[CallLane] = []
        """Its lanes that carry no call; the last one is taken first, since it may know our grant."""
        self._idle: list[CallLane] = []
        """Those of the other connections, in the order of their last use; the last one is taken first."""
        self._least_idle = 0
        """The smallest number of idle ones since the last trim."""
        self._trim = nodes.loop.call_later(_TRIM_S, self._close_idle)
        self._all: set[CallConnection] = set()
        self._waiting: deque[LaneUser] = deque()
        self._dials = 0
        self._link: Link | None = None
        self._left = False
        self.closed = False
        self._keeper = self._spawn(self._keep_link())

    @property
    def id(self) -> NodeId:
        return self.view.id

    @property
    def linked(self) -> bool:
        return self._link is not None

    @property
    def free_lanes(self) -> int:
        """How many more small calls the shared connection takes."""
        return len(self._free)

    def begin(self, user: LaneUser) -> None:
        """Give *user* a lane: at once if one is free, else as soon as there is one."""
        while self._free and user.brief:
            lane = self._free.pop()
            if lane.connection.usable:
                lane.take(user)
                return
        while self._idle:
            lane = self._idle.pop()
            if len(self._idle) < self._least_idle:
                self._least_idle = len(self._idle)
            if lane.connection.usable:
                lane.take(user)
                return
        if self.down:
            user.not_sent(f"node {self.id} cannot be reached: {self.down}")
            return
        self._waiting.append(user)
        if self._dials < min(_DIALS, len(self._waiting)):
            self._dials += 1
            self._spawn(self._dial())

    def release(self, lane: CallLane) -> None:
        """The call of *lane* is over: it may carry another one."""
        connection = lane.connection
        if connection.shared:
            if connection is self._shared:
                self._free.append(lane)
                self._close_if_left()
            return
        while self._waiting:
            user = self._waiting.popleft()
            if not user.gone:
                lane.take(user)
                return
        if self._left or len(self._idle) >= _IDLE:
            connection.close()
        else:
            self._idle.append(lane)

    async def ask(self, what: str, value: Any) -> bytes:
        """
        Return what the node answers to a query (`call_heads.QueryHead`).

        :raises NotReached: it is not there, or was lost
        :raises GpufaasError: its error
        """
        query = RemoteQuery(what, value)
        self.begin(query)
        return await query.reply()

    async def ask_lines(self, what: str, value: Any) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer in pieces as they come. :raises GpufaasError: as `ask`"""
        query = RemoteQuery(what, value)
        self.begin(query)
        rest = b""
        try:
            while (piece := await query.chunk()) is not None:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line
        finally:
            query.cancel()

    def forget(self, connection: CallConnection) -> None:
        self._all.discard(connection)
        if connection is self._shared:
            self._shared = None
            self._free.clear()
            self._spawn(self._share(_FIRST_RETRY_S))
        elif connection.lanes[0] in self._idle:
            self._idle.remove(connection.lanes[0])
            self._least_idle = min(self._least_idle, len(self._idle))
        if self._left and not self._all:
            self.close()

    def leave(self) -> None:
        """The node is no longer in the view: take no new calls; those that run go on."""
        self._left = True
        self._refuse_waiting(f"node {self.id} left")
        for lane in list(self._idle):
            lane.connection.close()
        self._idle.clear()
        self._close_if_left()
        if not self._all:
            self.close()

    def come_back(self) -> None:
        """The node is in the view again, and calls of before still run there."""
        self._left = False
        self._spawn(self._share())

    def close(self) -> None:
        """End all connections: calls that run there fail."""
        self._left = self.closed = True
        self._trim.cancel()
        if self._link is not None:
            self._link.on_lost = lambda _: None
            self._link.close("the gateway left")
        for task in self.tasks:
            task.cancel()
        self._lost("the gateway stops")

    # --- within ---

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = self._nodes.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _dial(self) -> None:
        """Make connections while calls wait for one."""
        try:
            while self._waiting:
                connection = CallConnection(self)
                await connect(self.address, self._nodes.me, DIAL_S, connection, 1)
                self._all.add(connection)
                self.release(connection.lanes[0])
        except GpufaasError as exc:
            self._refuse_waiting(str(exc))
        finally:
            self._dials -= 1

    async def _share(self, after_s: Seconds = 0.0) -> None:
        """Make the connection that small calls share. Until it is there they have others."""
        lanes = self._nodes.lanes
        while self._is_to_share:
            await asyncio.sleep(after_s)
            after_s = min(_LONGEST_RETRY_S, 2 * max(after_s, _FIRST_RETRY_S))
            connection = CallConnection(self, lanes)
            try:
                await connect(self.address, self._nodes.me, DIAL_S, connection, lanes)
            except GpufaasError:
                continue
            if connection.lost:
                continue
            if not self._is_to_share:
                connection.close()
                return
            self._shared = connection
            self._all.add(connection)
            self._free = connection.lanes[::-1]

    @property
    def _is_to_share(self) -> bool:
        return self._shared is None and self._link is not None and not self._left

    def _close_if_left(self) -> None:
        """The node has left: close the shared connection once no call is on it."""
        shared = self._shared
        if self._left and shared is not None and not shared.running:
            shared.close()

    async def _keep_link(self) -> None:
        """Keep the link; connect again when it is lost."""
        retry_s = _FIRST_RETRY_S
        while not self._left or self._all:
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
            lost: asyncio.Future[str] = self._nodes.loop.create_future()
            link.attend(lambda _: None, partial(_settle, lost))
            retry_s = _FIRST_RETRY_S
            self._link, self.down = link, ""
            self._spawn(self._share())
            self._nodes.changed()
            try:
                why = await lost
            finally:
                self._link = None
            log.warning("node %s is lost: %s", self.id, why)
            self.down = why
            self._nodes.changed()  # first: this tells the scheduler, which then places no call there again
            self._lost(why)

    def _close_idle(self) -> None:
        unneeded, self._idle = self._idle[: self._least_idle], self._idle[self._least_idle :]
        if unneeded and not self._idle:
            self._idle.append(unneeded.pop())
        for lane in unneeded:
            lane.connection.close()
        self._least_idle = len(self._idle)
        self._trim = self._nodes.loop.call_later(_TRIM_S, self._close_idle)

    def _lost(self, why: str) -> None:
        """The node is gone: fail all that waits for it."""
        self._refuse_waiting(why)
        self._free.clear()
        self._idle.clear()
        self._least_idle = 0
        for connection in list(self._all):
            connection.abort(why)

    def _refuse_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for user in waiting:
            user.not_sent(f"node {self.id} cannot be reached: {why}")


def _settle(lost: "asyncio.Future[str]", why: str) -> None:
    if not lost.done():
        lost.set_result(why)
