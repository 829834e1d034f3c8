"""
A node's end of the link to the scheduler that leads: events go up, commands come down.

A new link begins with a snapshot of what the node holds. Events that happen while there is no link are dropped: the
next snapshot has what is left of them. The node goes on serving calls that have a grant.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from gpufaas_cluster import control
from gpufaas_cluster.connection import Identity, Link
from gpufaas_cluster.leader_link import LeaderLink
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Event
from gpufaas_core.model import FunctionId, Seconds
from gpufaas_gpu_manager.node import Node

log = logging.getLogger(__name__)

_USED_EVERY_S: Final[Seconds] = 1.0


class Agent:
    """`leaders` keeps the link. The node reports its events to `report`. One event loop owns it."""

    def __init__(
        self, me: Identity, address: str, *, prepare: Callable[[WorkerSpec], None] = lambda _: None, order: str = ""
    ) -> None:
        """
        :param address: where gateways reach the node
        :param order: for which the node was started
        :param prepare: called with revisions whose bundle should be here soon, called or not
        """
        self.me = me
        self.address = address
        self.node: Node | None = None
        self.leaders = LeaderLink(me, self)
        self.note = ""
        self._prepare, self._order = prepare, order
        self._link: Link | None = None
        self._loop = asyncio.get_running_loop()
        self._telling: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def connected(self) -> bool:
        return self._link is not None

    def report(self, fact: Event) -> None:
        """Send *fact* to the scheduler, if there is a link."""
        if self._link is not None:
            self._link.send(control.NodeEvent(fact))

    def tell(self, note: str) -> None:
        """Show *note* in ``gpufaas node describe``. Empty: no note any more."""
        self.note = note
        if self._link is not None:
            self._link.send(control.NodeNote(note))

    # --- the link's side ---

    def begin(self, link: Link) -> None:
        node = self.node
        assert node is not None
        node.obey(link.epoch)
        link.send(control.NodeJoins(self.address, _encoded(node), time.time(), node.makes, self._order))
        self._link = link
        if self.note:
            link.send(control.NodeNote(self.note))
        self._telling = self._loop.create_task(self._tell_used(link, node))

    def end(self) -> None:
        self._link = None
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None

    async def _tell_used(self, link: Link, node: Node) -> None:
        """Send the CPU time of the workers when it changed; some scaling rules need it."""
        before: dict[FunctionId, Seconds] = {}
        while True:
            await asyncio.sleep(_USED_EVERY_S)
            now = await asyncio.to_thread(node.host.cpu_seconds)
            if now != before:
                before = now
                link.send(control.CpuUsed(now))

    def heard(self, message: object) -> None:
        node = self.node
        assert node is not None
        if type(message) is control.ExecuteCommand:
            node.execute(message.command)
        elif type(message) is control.CheckNode:
            for call, device in message.doubted:
                node.grants.settle(call, device)
            if self._link is not None:
                self._link.send(control.NodeHoldings(message.number, _encoded(node), node.makes))
        elif type(message) is control.DefineFunction:
            node.functions.expect(message.worker)
            if message.worker.image:
                self._spawn(self._pull(node, message.worker))
            elif message.fetch:
                self._prepare(message.worker)
        elif type(message) is control.ForgetFunction:
            self._spawn(node.functions.forget(message.function))

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pull(self, node: Node, spec: WorkerSpec) -> None:
        """Pull the image before the first call."""
        try:
            await node.functions.define(spec)
        except GpufaasError as exc:
            log.warning("image.not_pulled image=%s reason=%s", spec.image, exc)


def _encoded(node: Node) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(node.snapshot()))
