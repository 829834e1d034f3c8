"""
What a scheduler does while it leads: it serves gateways and nodes over links as the engine serves embedded ones.

After a change of leader, calls that waited are held until the nodes that should be there are (`HOLD_S` at most), and
are then placed in the order in which they had arrived.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from gpufaas_cluster import control
from gpufaas_cluster.connection import Link
from gpufaas_cluster.deployed import KnownRevisions
from gpufaas_cluster.gateway_sessions import GRACE_S, GatewaySessions
from gpufaas_cluster.node_sessions import NodeSessions
from gpufaas_core.messages import Offered, Planned, Restored
from gpufaas_core.model import NodeId, PlacementPlan, Seconds
from gpufaas_scheduler.service import SchedulerService

log = logging.getLogger(__name__)

HOLD_S: Final[Seconds] = 1.0
"""How long a new leader waits for nodes before it places without them."""
VIEW_EVERY_S: Final[Seconds] = 0.5
CHECK_EVERY_S: Final[Seconds] = 5.0
"""How often nodes are asked what they hold (`scheduler.check`)."""


class Leader:
    """
    One term. From its making functions may be deployed; gateways and nodes may come after `lead`.

    :param may_act: whether we still lead; asked before anything is decided, since a process may have stood still
    :param drained: nodes that take no new calls
    :param on_drain: called when a node is drained or taken back, so that the next leader knows it
    """

    def __init__(
        self,
        service: SchedulerService,
        epoch: int,
        *,
        may_act: Callable[[], bool] = lambda: True,
        drained: set[NodeId] | None = None,
        on_drain: Callable[[NodeId, bool], None] = lambda _, __: None,
    ) -> None:
        self.service = service
        self.epoch = epoch
        self.may_act = may_act
        self.serving = False
        """Calls are placed."""
        self.open = False
        """Gateways and nodes may come."""
        self.deployed = KnownRevisions(service, lambda message: self.nodes.send(message))
        self.nodes = NodeSessions(
            service, self.deployed.workers, drained if drained is not None else set(),
            on_change=self._view_changed, on_joined=self._node_joined, on_drain=on_drain,
        )  # fmt: skip
        self.gateways = GatewaySessions(service, self.deployed, self.nodes)
        self._loop = asyncio.get_running_loop()
        self._awaited: set[NodeId] = set()
        """Nodes that should join before calls are placed."""
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._plan: PlacementPlan | None = None
        self._view_due = True
        self._events_shown = -1

    def lead(self, awaited: set[NodeId], left: Restored, offered: Offered | None = None) -> None:
        """
        Decide from what an older scheduler *left*, once the nodes *awaited* are here, which were there under it.

        :param offered: what can be ordered, and the open orders
        """
        self.service.handle(left)
        if offered is not None:
            self.service.handle(offered)
        self.open = True
        if self._plan is not None:
            self.plan(self._plan)
        self._awaited = set(awaited)
        if awaited:
            self._after(HOLD_S, self._time_is_up)
        else:
            self._serve("no nodes are waited for")
        self._after(VIEW_EVERY_S, self._push_view)
        self._after(CHECK_EVERY_S, self._check)

    def plan(self, plan: PlacementPlan) -> None:
        """*plan* is in force. Before `lead`: it will be then, whatever an older scheduler left."""
        self._plan = plan
        if self.open:
            self.service.handle(Planned(plan))

    def end(self) -> None:
        """Another one leads, or will: have gateways and nodes go there."""
        self.open = self.serving = False
        for timer in self._timers.values():
            timer.cancel()
        nodes, gateways = self.nodes.by_id, self.gateways.by_name
        links = [*(each.link for each in nodes.values()), *(each.link for each in gateways.values())]
        nodes.clear()
        gateways.clear()
        for link in links:
            link.on_lost = lambda _: None
            link.close("this scheduler does not lead any more")

    def accept(self, link: Link, hello: control.ClientHello) -> int | control.Turned:
        """Take the link of a gateway or node; return our epoch, or why it is turned away."""
        if hello.role == "gateway":
            gateway = self.gateways.accept(link, hello)
            link.on_message = lambda message: self._hear(link, self.gateways.heard, gateway, message)
            if self.serving:
                link.send(self._view())  # before any grant, gateways know where its node is
            return self.epoch
        if hello.role == "node":
            node = self.nodes.accept(link, hello)
            if isinstance(node, control.Turned):
                return node
            link.on_message = lambda message: self._hear(link, self.nodes.heard, node, message)
            return self.epoch
        return control.Turned("protocol", f"a {hello.role} has no business here")

    def _hear(self, link: Link, heard: Callable[[Any, Any], None], session: Any, message: object) -> None:
        """
        Pass *message* on, if we may act on it.

        If we may not for now, and lead still when etcd was asked, we would have missed it: so the link is closed, and
        its other end comes again with all that it knows.
        """
        if not self.open:
            return
        if self.may_act():
            heard(session, message)
        else:
            link.close("this scheduler stood still, and may not lead any more")

    def _node_joined(self, node: NodeId) -> None:
        self.gateways.look_at_reach()
        if node in self._awaited:
            self._awaited.discard(node)
            if not self._awaited and not self.serving:
                self._serve("all nodes are there")

    def _time_is_up(self) -> None:
        if not self.serving:
            log.warning("leader.without nodes=%s", ",".join(sorted(self._awaited)))
            self._serve("time is up")

    def _serve(self, why: str) -> None:
        self.serving = True
        # Not before: a view of some of the nodes would have gateways give the others up, and what runs there.
        self._show_view()
        log.info("leader.serves epoch=%d placed=%d because=%s", self.epoch, self.gateways.serve(), why)
        self._after(2 * GRACE_S, self.gateways.forget_orphans)

    # --- what is done every so often ---

    def _after(self, delay_s: Seconds, callback: Callable[[], None]) -> None:
        self._timers[callback] = self._loop.call_later(delay_s, callback)

    def _check(self) -> None:
        self._after(CHECK_EVERY_S, self._check)
        if self.serving and self.may_act():
            self.nodes.check()

    def _push_view(self) -> None:
        self._after(VIEW_EVERY_S, self._push_view)
        events = self.service.driver.events
        if self.serving and self.gateways.by_name and (events != self._events_shown or self._view_due):
            self._events_shown, self._view_due = events, False
            self._show_view()

    def _view_changed(self, now: bool) -> None:
        self._view_due = True
        if now and self.serving:
            self._show_view()

    def _show_view(self) -> None:
        self.gateways.send(self._view())

    def _view(self) -> control.ClusterState:
        return control.ClusterState([each.view() for each in self.nodes.by_id.values()], self.service.status())
