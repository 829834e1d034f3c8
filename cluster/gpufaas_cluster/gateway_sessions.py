"""
The gateways that are connected to the scheduler that leads, as the scheduler's end sees them.

A gateway is where the answers to its calls go. One that comes back within `GRACE_S` keeps the calls that run for it.
"""

import asyncio
import logging
from collections.abc import Callable, Container
from enum import Enum, auto
from typing import Any, Final

import msgspec

from gpufaas_cluster import control
from gpufaas_cluster.connection import Link
from gpufaas_cluster.deployed import KnownRevisions
from gpufaas_cluster.error_codes import told
from gpufaas_cluster.node_sessions import NodeSessions
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Arrived, Finished, Grant, NodeRefused, Profiled, Serving
from gpufaas_core.model import Asked, CallId, DeviceId, Function, FunctionId, NodeId, Seconds, gateway_of
from gpufaas_scheduler.service import SchedulerService

log = logging.getLogger(__name__)

GRACE_S: Final[Seconds] = 2.0
"""A gateway that comes back within this keeps the calls that run for it."""


class Said(Enum):
    """What is known of a call that a gateway named before this scheduler placed any."""

    RUNS = auto()
    PLACED = auto()
    """The gateway waits for an answer to it."""
    ANSWERED = auto()


class GatewaySession:
    """A gateway at the other end of a link."""

    def __init__(self, link: Link, name: str, keep_s: Callable[[Grant], Seconds]) -> None:
        """:param keep_s: how long the gateway may keep a grant"""
        self.link = link
        self._keep_s = keep_s
        self.name = name
        """The name with which the ids of the gateway's calls end."""
        self.counted: dict[str, tuple[int, int, int, int]] = {}
        """See `control.CallCounts`."""
        self.calls: dict[CallId, Said] | None = None
        """What it has said of its calls before `GatewaySessions.serve`; None: nothing yet, or that is over."""
        self.gone: asyncio.TimerHandle | None = None
        self.unreached: frozenset[NodeId] = frozenset()
        """The nodes that it does not reach."""
        self.probes: set[FunctionId] = set()
        """See `ports.Scheduler.begin_probe`; they end with the link."""

    def answer(self, call: CallId, answer: Grant | GpufaasError) -> None:
        if self.calls and call in self.calls:
            self.calls[call] = Said.ANSWERED
        if isinstance(answer, Grant):
            self.link.send(control.Granted(answer, self._keep_s(answer)))
            return
        self.link.send(control.CallRejected(call, *told(answer), getattr(answer, "details", None)))


class GatewaySessions:
    """The gateways by name. Calls that they place before `serve` wait."""

    def __init__(self, service: SchedulerService, deployed: KnownRevisions, nodes: NodeSessions) -> None:
        self.by_name: dict[str, GatewaySession] = {}
        self._service = service
        self._deployed = deployed
        self._nodes = nodes
        self._loop = asyncio.get_running_loop()
        self._serves = False
        self.planner: Callable[[str], asyncio.Future[dict[str, Any]]] | None = None
        """See `PlannerShell.asked`; None: not known yet."""

    def accept(self, link: Link, hello: control.ClientHello) -> GatewaySession:
        name = f"{hello.id}.{hello.boot}"
        gateway = GatewaySession(link, name, self._service.engine.keep_s)
        before = self.by_name.get(name)
        if before is not None:
            if before.gone is not None:
                before.gone.cancel()
            before.link.on_lost = lambda _: None
            before.link.close("it connected again")
            self._end_probes(before)
            gateway.counted = before.counted
        self.by_name[name] = gateway
        link.on_lost = lambda why: self._lost(gateway, why)
        self._service.gateways[name] = gateway.answer
        log.info("gateway.connected id=%s", name)
        return gateway

    def heard(self, gateway: GatewaySession, message: object) -> None:
        service = self._service
        if isinstance(message, control.PlaceCall):
            deadline = service.driver.now() + message.timeout_s
            arrived = Arrived(
                message.call, message.function, deadline, message.age_s, message.size, message.outer, message.endless,
                message.asked or (None if message.goal_s is None else Asked(message.goal_s)),
            )  # fmt: skip
            self._deployed.when_known(message.function, lambda: self._place(gateway, arrived))
        elif isinstance(message, control.CancelCall):
            service.cancel(message.call)
        elif isinstance(message, control.ReturnGrant):
            calls = max(1, message.calls)
            service.report(Finished(message.call, message.device, message.service_s / calls, further=calls - 1))
        elif isinstance(message, control.PlaceAgain):
            self._say_if_unknown(gateway, message.call)
        elif isinstance(message, control.NodeUnreachable):
            device, grant = DeviceId(message.device), (message.epoch, message.number)
            service.report(NodeRefused(message.call, device, message.reason, True, *grant))
            self._say_if_unknown(gateway, message.call)
        elif isinstance(message, control.RunningCalls):
            if self._serves:
                self._forget_others(gateway, set(message.running))
            else:
                gateway.calls = dict.fromkeys(message.running, Said.RUNS)
        elif isinstance(message, control.CallCounts):
            gateway.counted = message.functions
        elif isinstance(message, control.ScaleFunction):
            self._deployed.when_known(message.function, lambda: service.scale(message.function, message.copies))
        elif isinstance(message, control.UnreachedNodes):
            gateway.unreached = frozenset(message.nodes)
            self.look_at_reach()
        elif isinstance(message, control.Query):
            if message.what != "planner" or self.planner is None:
                gateway.link.send(self._reply(gateway, message))
                return
            number = message.number
            self.planner(message.value).add_done_callback(
                lambda said: gateway.link.send(control.QueryReply(number, msgspec.json.encode(said.result())))
            )

    def send(self, message: control.Message) -> None:
        """Send *message* to all gateways."""
        for gateway in self.by_name.values():
            gateway.link.send(message)

    def counted(self) -> dict[str, tuple[int, int, int, int]]:
        """Return what all gateways counted, by the full name of the function."""
        total: dict[str, tuple[int, int, int, int]] = {}
        for gateway in self.by_name.values():
            for name, (a, b, c, d) in gateway.counted.items():
                begun, finished, inflight, queued = total.get(name, (0, 0, 0, 0))
                total[name] = (begun + a, finished + b, inflight + c, queued + d)
        return total

    def look_at_reach(self) -> None:
        """Have nodes that no gateway reaches get no calls."""
        said = [each.unreached for each in self.by_name.values() if not each.link.closed]
        self._nodes.set_unreached({id_ for id_ in self._nodes.by_id if said and all(id_ in each for each in said)})

    def serve(self) -> int:
        """Have the engine decide; return how many calls were placed before."""
        service, self._serves = self._service, True
        placed = sum(list((each.calls or {}).values()).count(Said.PLACED) for each in self.by_name.values())
        service.handle(Serving())
        for gateway in self.by_name.values():
            calls, gateway.calls = gateway.calls, None
            if calls is None:
                continue
            self._forget_others(gateway, calls)
            for call, said in calls.items():
                if said is Said.PLACED and (service.engine.runs(call) or not service.engine.knows(call)):
                    # The last leader made a grant that never arrived: no caller waits under that id.
                    service.cancel(call)
                    gateway.link.send(control.CallUnknown(call))
        return placed

    def forget_orphans(self) -> None:
        """Cancel the calls of gateways that did not outlive the last leader."""
        for call in self._service.engine.calls():
            if gateway_of(call) not in self.by_name:
                self._service.cancel(call)

    # --- within ---

    def _place(self, gateway: GatewaySession, arrived: Arrived) -> None:
        if gateway.link.closed:
            return  # it was held, and its gateway places it again on its next link
        if gateway.calls is not None:
            gateway.calls[arrived.call] = Said.PLACED
        self._service.handle(arrived)

    def _say_if_unknown(self, gateway: GatewaySession, call: CallId) -> None:
        if not self._service.engine.knows(call):
            gateway.link.send(control.CallUnknown(call))

    def _reply(self, gateway: GatewaySession, query: control.Query) -> control.QueryReply:
        number = query.number
        if query.what == "profiled":
            self._service.handle(msgspec.json.decode(query.value, type=Profiled))
            return control.QueryReply(number)
        if query.what == "probe":
            function, worker = msgspec.json.decode(query.value, type=tuple[Function, WorkerSpec])
            gateway.probes.add(function.id)
            self._deployed.deploy(function, worker)
            return control.QueryReply(number)
        if query.what == "end_probe":
            gateway.probes.discard(FunctionId(query.value))
            self._deployed.remove(FunctionId(query.value), drain=False)
            return control.QueryReply(number)
        if query.what == "explain":
            found = self._service.engine.explain(CallId(query.value), self._service.driver.now())
            return control.QueryReply(number, msgspec.json.encode(found))
        if query.what not in ("drain", "undrain"):
            return control.QueryReply(number, error=f"this release cannot answer {query.what!r}")
        node = self._nodes.by_id.get(NodeId(query.value))
        if node is None:
            there = ", ".join(sorted(self._nodes.by_id)) or "none"
            return control.QueryReply(number, error=f"there is no node {query.value!r}: those that are: {there}")
        self._nodes.drain(node.id, query.what == "drain")
        return control.QueryReply(number, msgspec.json.encode(node.view()))

    def _end_probes(self, gateway: GatewaySession) -> None:
        while gateway.probes:
            self._deployed.remove(gateway.probes.pop(), drain=False)

    def _lost(self, gateway: GatewaySession, why: str) -> None:
        log.warning("gateway.lost id=%s reason=%s", gateway.name, why)
        self._end_probes(gateway)
        self.look_at_reach()
        gateway.gone = self._loop.call_later(GRACE_S, self._forget, gateway)

    def _forget(self, gateway: GatewaySession) -> None:
        if self.by_name.get(gateway.name) is gateway:
            del self.by_name[gateway.name]
            self._forget_others(gateway, ())
            del self._service.gateways[gateway.name]

    def _forget_others(self, gateway: GatewaySession, named: Container[CallId]) -> None:
        """Cancel the calls that the engine has of this gateway, but for those that it has *named*."""
        for call in self._service.engine.calls():
            if gateway_of(call) == gateway.name and call not in named:
                self._service.cancel(call)
