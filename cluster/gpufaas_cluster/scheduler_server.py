"""
Where gateways and nodes connect to the scheduler, and the engine behind it serves them as it serves embedded ones.

A node is a `service.NodePort` at the other end of a link; a gateway is where the answers to its calls go. What a node
says when it joins is the truth about what it holds; a link that breaks takes its devices out of the view at once. After
a change of leader, calls that waited are held until the nodes that should be there are (`HOLD_S` at most), and are then
placed in the order in which they had arrived.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Set
from typing import Any, Final

import msgspec

from gpufaas_cluster import control
from gpufaas_cluster.connection import Identity, Link, listen
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError, LoadFailed, Overloaded
from gpufaas_core.messages import Abort, DeviceLeft, Evict, Lease, Load, Resize, Restored, Serving, Start, WorkerExited
from gpufaas_core.messages import Refused as RefusedFact
from gpufaas_core.model import Bytes, CallId, Device, DeviceId, Function, FunctionId, NodeId, NodeView, Seconds
from gpufaas_core.snapshot import NodeSnapshot
from gpufaas_scheduler import check
from gpufaas_scheduler.check import Holding
from gpufaas_scheduler.service import SchedulerService
from gpufaas_scheduler.world.state import Model

log = logging.getLogger(__name__)

HOLD_S: Final[Seconds] = 1.0
"""How long a new leader waits for nodes before it places without them."""
VIEW_EVERY_S: Final[Seconds] = 0.5
GRACE_S: Final[Seconds] = 2.0
"""A gateway that comes back within this keeps the calls that run for it."""
CLOCK_OFF_S: Final[Seconds] = 5.0
"""Clocks that differ by more are said to people. No decision is made by them."""
CHECK_EVERY_S: Final[Seconds] = 5.0
"""How often nodes are asked what they hold (`check.py`)."""
_REMOVED_KEPT: Final = 10_000
_decode_snapshot: Final = msgspec.msgpack.Decoder(NodeSnapshot).decode


class NodeSession:
    """A node at the other end of a link (`service.NodePort`)."""

    def __init__(self, link: Link, hello: control.ClientHello) -> None:
        self.link = link
        self.id = NodeId(hello.id)
        self.boot = hello.boot
        self.version = hello.version
        self.address = ""
        self.devices: list[Device] = []
        self.draining = False
        self.shut = False
        """No gateway reaches it."""
        self.closed = False
        """It takes no calls, because of one or the other."""
        self.clock_note = ""
        self.note = self.makes = ""
        self.joined_at = time.monotonic()
        self.cpu_s: dict[FunctionId, Seconds] = {}
        self.checks = 0
        """How often it was asked what it holds; the number of the last `control.CheckNode`."""
        self.asked: dict[DeviceId, Holding] = {}
        """What it should have had then; empty once it has answered."""
        self.absent: dict[DeviceId, Set[CallId]] = {}
        """Calls that the last answer lacked."""
        self.doubted: list[tuple[CallId, DeviceId]] = []
        """Those that the one before lacked, too."""

    def open(self, lease: Lease) -> object:
        self.link.send(control.ExecuteCommand(Start(lease)))
        return None

    def load(self, command: Load) -> None:
        self.link.send(control.ExecuteCommand(command))

    def evict(self, function: FunctionId, device: DeviceId, copy: int = 0) -> None:
        self.link.send(control.ExecuteCommand(Evict(function, device, copy)))

    def resize(self, function: FunctionId, device: DeviceId, memory: Bytes, copy: int = 0) -> None:
        self.link.send(control.ExecuteCommand(Resize(function, device, memory, copy)))

    def abort(self, call: CallId, device: DeviceId) -> None:
        self.link.send(control.ExecuteCommand(Abort(call, device)))

    def view(self) -> NodeView:
        shut = f"no gateway reaches it at {self.address}: it gets no calls" if self.shut else ""
        note = "; ".join(filter(None, (self.note, self.clock_note, shut)))
        joined_s = time.monotonic() - self.joined_at
        return NodeView(self.id, self.address, self.devices, self.draining, note, self.version, joined_s, self.makes)


class GatewaySession:
    """A gateway at the other end of a link, by the name that ends the ids of its calls."""

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self.name = name
        self.counted: dict[str, tuple[int, int, int, int]] = {}
        self.present: set[CallId] = set()
        """The calls that it knew to run when it came."""
        self.gone: asyncio.TimerHandle | None = None
        self.unlinked: frozenset[NodeId] = frozenset()
        """The nodes that it does not reach."""

    def answer(self, call: CallId, answer: Lease | GpufaasError) -> None:
        self.present.discard(call)
        if isinstance(answer, Lease):
            self.link.send(control.LeaseGranted(answer))
            return
        after = answer.retry_after_s if isinstance(answer, Overloaded | LoadFailed) else 0.0
        self.link.send(control.CallRejected(call, control.error_name(answer), str(answer), after))


def _noting(gateway: GatewaySession, answered: set[CallId]) -> Callable[[CallId, Lease | GpufaasError], None]:
    """Return *gateway*'s `answer`, which notes in *answered* whom it answered."""

    def answer(call: CallId, given: Lease | GpufaasError) -> None:
        answered.add(call)
        gateway.answer(call, given)

    return answer


class SchedulerServer:
    """
    `open`, then `lead` once this scheduler leads; before, whoever connects is told who does. One event loop owns it.
    """

    def __init__(self, me: Identity, *, clock: Callable[[], float] = time.time) -> None:
        self.me = me
        self.leader = ""
        """Address of the one that leads, as far as it is known; for those who ask us."""
        self.service: SchedulerService | None = None
        self.nodes: dict[NodeId, NodeSession] = {}
        self.drained: set[NodeId] = set()
        """Nodes that take no new calls; kept when they reconnect."""
        self.on_drain: Callable[[NodeId, bool], None] = lambda _, __: None
        """Told when a node is to be drained, or taken back, so that a next leader knows too."""
        self.names: dict[FunctionId, WorkerSpec] = {}
        self._clock = clock
        self._gateways: dict[str, GatewaySession] = {}
        self._removed: OrderedDict[FunctionId, None] = OrderedDict()
        self._epoch = 0
        self.may_act: Callable[[], bool] = lambda: True
        """Whether we still lead: asked before anything is decided, since a process may have stood still for long."""
        self._server: asyncio.Server | None = None
        self._awaited: set[NodeId] | None = None
        """Nodes that are to join before calls are placed; None: nobody is waited for."""
        self._early: list[tuple[GatewaySession, CallId]] = []
        """Calls that were placed before the engine served."""
        self._open = False
        self._loop = asyncio.get_running_loop()
        self._view_timer: asyncio.TimerHandle | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._seen_changes = -1
        self.differences = 0
        """In what nodes differed from what they should have had, since the start."""
        self._view_due = True

    # --- life ---

    async def open(self, address: str) -> int:
        """Listen; return the port."""
        self._server = await listen(address, self.me, self._accept)
        return int(self._server.sockets[0].getsockname()[1])

    def begin(self, service: SchedulerService, epoch: int) -> None:
        """From now on functions are told; gateways and nodes may come after `lead`."""
        self.service, self._epoch = service, epoch
        self._awaited = set()

    def lead(self, awaited: set[NodeId], left: Restored) -> None:
        """Decide from what an older scheduler *left*, once the nodes *awaited* are here, which were there under it."""
        if self.service is None:
            return
        self.service.handle(left)
        self._open = True
        self._awaited = set(awaited)
        if awaited:
            self._loop.call_later(HOLD_S, self._release, "time is up")
        else:
            self._release("nobody is waited for")
        self._view_timer = self._loop.call_later(VIEW_EVERY_S, self._push_view)
        self._check_timer = self._loop.call_later(CHECK_EVERY_S, self._check)

    @property
    def serving(self) -> bool:
        """Whether calls are placed."""
        return self.service is not None and self._awaited is None

    def step_down(self) -> None:
        """Another one leads, or will: whoever is connected goes there."""
        self.service = None
        for timer in (self._view_timer, self._check_timer):
            if timer is not None:
                timer.cancel()
        nodes, self.nodes = self.nodes, {}
        gateways, self._gateways = self._gateways, {}
        for link in [*(each.link for each in nodes.values()), *(each.link for each in gateways.values())]:
            link.on_lost = lambda _: None
            link.close("this scheduler does not lead any more")
        self.names.clear()
        self._removed.clear()
        self._early.clear()
        self._awaited = None
        self._open = False

    async def close(self) -> None:
        self.step_down()
        if self._server is not None:
            self._server.close()

    # --- functions ---

    def deploy(self, function: Function, worker: WorkerSpec) -> None:
        """Know a revision. One that is known, or was removed, stays as it is: revisions do not change."""
        if self.service is None or function.id in self.names or function.id in self._removed:
            return
        self.names[function.id] = worker
        for node in self.nodes.values():
            node.link.send(control.DefineFunction(worker, fetch=True))
        self.service.deploy(function)

    def remove(self, function: FunctionId, drain: bool) -> None:
        if self.service is None or function in self._removed:
            return
        self._removed[function] = None
        if len(self._removed) > _REMOVED_KEPT:
            self._removed.popitem(last=False)
        if self.names.pop(function, None) is None:
            return
        self.service.remove(function, drain)
        for node in self.nodes.values():
            node.link.send(control.ForgetFunction(function))

    def counted(self) -> dict[str, tuple[int, int, int, int]]:
        """Return what all gateways counted, by the full name of the function."""
        total: dict[str, tuple[int, int, int, int]] = {}
        for gateway in self._gateways.values():
            for name, (a, b, c, d) in gateway.counted.items():
                begun, finished, inflight, queued = total.get(name, (0, 0, 0, 0))
                total[name] = (begun + a, finished + b, inflight + c, queued + d)
        return total

    def cpu_seconds(self) -> dict[FunctionId, Seconds]:
        used: dict[FunctionId, Seconds] = {}
        for node in self.nodes.values():
            for function, seconds in node.cpu_s.items():
                used[function] = used.get(function, 0.0) + seconds
        return used

    # --- who connects ---

    def _accept(self, link: Link, hello: control.ClientHello) -> int | control.Turned:
        if self.service is not None and not self.may_act():
            return control.Turned("not_leader", f"scheduler {self.me.id} stood still, and asks whether it still leads")
        if self.service is None or not self._open:
            where = f"the scheduler at {self.leader} leads" if self.leader else "none leads yet"
            return control.Turned("not_leader", f"scheduler {self.me.id} does not lead: {where}", self.leader)
        if hello.role == "gateway":
            name = f"{hello.id}.{hello.boot}"
            gateway = GatewaySession(link, name)
            before = self._gateways.get(name)
            if before is not None:
                if before.gone is not None:
                    before.gone.cancel()
                before.link.on_lost = lambda _: None
                before.link.close("it connected again")
                gateway.counted = before.counted
            self._gateways[name] = gateway
            link.on_message = lambda message: self._from_gateway(gateway, message)
            link.on_lost = lambda why: self._gateway_lost(gateway, why)
            self.service.attach(name, gateway.answer)
            if self._awaited is None:
                link.send(self._view(self.service))  # before any lease, gateways know where its node is
            log.info("gateway.connected id=%s", name)
            return self._epoch
        if hello.role == "node":
            known = self.nodes.get(NodeId(hello.id))
            if known is not None and known.boot != hello.boot and not known.link.closed:
                text = (
                    f"a node {hello.id!r} is there already (boot {known.boot}, at {known.address}): give this one "
                    "another --id, or wait until the other has been silent for 3 s"
                )
                return control.Turned("duplicate", text)
            if known is not None:
                known.link.on_lost = lambda _: None
                known.link.close("it connected again")
                self._node_lost(known, "it connected again")
            node = NodeSession(link, hello)
            link.on_message = lambda message: self._from_node(node, message)
            link.on_lost = lambda why: self._node_lost(node, why)
            return self._epoch
        return control.Turned("protocol", f"a {hello.role} has no business here")

    def _acting(self, link: Link) -> SchedulerService | None:
        """
        Return the service, if it may act on what came over *link*.

        If it may not for now, and leads still when it has asked etcd, it would have missed this: whoever said it comes
        again with all that it knows.
        """
        if self.service is not None and not self.may_act():
            link.close("this scheduler stood still, and may not lead any more")
            return None
        return self.service

    # --- gateways ---

    def _from_gateway(self, gateway: GatewaySession, message: Any) -> None:
        service = self._acting(gateway.link)
        if service is None:
            return
        kind = type(message)
        if kind is control.PlaceCall:
            if self._awaited is not None:
                self._early.append((gateway, message.call))
            service.place_for(
                message.call, message.function, message.timeout_s, message.age_s, message.size, message.outer,
                message.endless,
            )  # fmt: skip
        elif kind is control.CancelCall:
            service.cancel(message.call)
        elif kind is control.PlaceAgain:
            if not service.knows(message.call):
                gateway.link.send(control.CallUnknown(message.call))
        elif kind is control.NodeUnreachable:
            service.report(RefusedFact(message.call, DeviceId(message.device), message.reason, opened=True))
            if not service.knows(message.call):
                gateway.link.send(control.CallUnknown(message.call))
        elif kind is control.RunningCalls:
            gateway.present = set(message.running)
            if self._awaited is None:
                self._forget_others(service, gateway)
        elif kind is control.CallCounts:
            gateway.counted = message.functions
        elif kind is control.DeployFunction:
            self.deploy(message.function, message.worker)
        elif kind is control.RemoveFunction:
            self.remove(message.function, message.drain)
        elif kind is control.ScaleFunction:
            service.scale(message.function, message.copies)
        elif kind is control.UnreachedNodes:
            gateway.unlinked = frozenset(message.nodes)
            self._look_at_reach()
        elif kind is control.Query:
            self._asked(service, gateway, message)

    def _asked(self, service: SchedulerService, gateway: GatewaySession, asked: control.Query) -> None:
        if asked.what == "explain":
            found = service.explained(CallId(asked.value))
            gateway.link.send(control.QueryReply(asked.number, msgspec.json.encode(found)))
        else:
            gateway.link.send(self._answer(asked))

    def _answer(self, asked: control.Query) -> control.QueryReply:
        if asked.what in ("drain", "undrain"):
            node = self.nodes.get(NodeId(asked.value))
            if node is None:
                there = ", ".join(sorted(self.nodes)) or "none"
                return control.QueryReply(
                    asked.number, error=f"there is no node {asked.value!r}: those that are: {there}"
                )
            self.drain(node.id, asked.what == "drain")
            return control.QueryReply(asked.number, msgspec.json.encode(node.view()))
        return control.QueryReply(asked.number, error=f"this release cannot answer {asked.what!r}")

    def drain(self, id_: NodeId, drain: bool) -> None:
        """Let the node take no new calls: what runs there ends, what waits goes elsewhere; or take it back."""
        (self.drained.add if drain else self.drained.discard)(id_)
        node = self.nodes.get(id_)
        if node is not None and node.draining != drain:
            node.draining = drain
            self._open_or_close(node)
        self.on_drain(id_, drain)

    def _open_or_close(self, node: NodeSession) -> None:
        closed = node.draining or node.shut
        if closed != node.closed and self.service is not None:
            node.closed = closed
            for device in node.devices:
                self.service.drain(device.id, closed)
        self._view_due = True

    def _look_at_reach(self) -> None:
        """A node that no gateway reaches gets no calls: unless it is so with all nodes, which helps nobody."""
        told = [each.unlinked for each in self._gateways.values() if not each.link.closed]
        shut = {id_ for id_ in self.nodes if told and all(id_ in each for each in told)}
        if len(shut) == len(self.nodes):
            shut.clear()
        for node in self.nodes.values():
            if node.shut != (node.id in shut):
                node.shut = not node.shut
                log.warning("node.%s id=%s address=%s", "unreached" if node.shut else "reached", node.id, node.address)
                self._open_or_close(node)

    def _gateway_lost(self, gateway: GatewaySession, why: str) -> None:
        log.warning("gateway.lost id=%s reason=%s", gateway.name, why)
        self._look_at_reach()
        gateway.gone = self._loop.call_later(GRACE_S, self._gateway_gone, gateway)

    def _gateway_gone(self, gateway: GatewaySession) -> None:
        if self._gateways.get(gateway.name) is not gateway or self.service is None:
            return
        del self._gateways[gateway.name]
        for call in self.service.calls_of(gateway.name):
            self.service.cancel(call)
        self.service.detach(gateway.name)

    # --- nodes ---

    def _from_node(self, node: NodeSession, message: Any) -> None:
        service = self._acting(node.link)
        if service is None:
            return
        kind = type(message)
        if kind is control.NodeEvent:
            if self.nodes.get(node.id) is node:
                if type(message.event) is DeviceLeft:
                    node.devices = [each for each in node.devices if each.id != message.event.device]
                    self._view_due = True
                service.report(message.event)
        elif kind is control.NodeJoins:
            self._join(service, node, message)
        elif kind is control.NodeHoldings:
            self._compare(service, node, message)
        elif kind is control.CpuUsed:
            node.cpu_s = message.cpu_s
        elif kind is control.NodeNote:
            node.note = message.note
            self._view_due = True
            if message.note:
                log.warning("node.note id=%s note=%s", node.id, message.note)

    def _join(self, service: SchedulerService, node: NodeSession, joining: control.NodeJoins) -> None:
        node.address, node.makes = joining.address, joining.makes
        off = joining.wall - self._clock()
        if joining.wall and abs(off) > CLOCK_OFF_S:
            # Ages travel, never times: a clock that is off decides nothing, but confuses whoever reads logs.
            node.clock_note = f"its clock is {off:+.0f} s off this scheduler's: set it by NTP"
            log.warning("node.clock id=%s off_s=%.0f", node.id, off)
        for worker in self.names.values():
            node.link.send(control.DefineFunction(worker))
        self.nodes[node.id] = node
        snapshot = _decode_snapshot(joining.snapshot)
        node.devices = [each.device for each in snapshot.devices]
        if self._awaited is None:
            self._show_view(service)  # before any lease of it is granted, gateways know where it is
        service.join_with(node, list(snapshot.devices))
        if node.id in self.drained:
            self.drain(node.id, True)
        self._look_at_reach()
        self._view_due = True
        log.info("node.joined id=%s address=%s devices=%d", node.id, node.address, len(node.devices))
        if self._awaited is not None:
            before = len(self._awaited)
            self._awaited.discard(node.id)
            if before and not self._awaited:
                self._release("all nodes are there")

    def _node_lost(self, node: NodeSession, why: str) -> None:
        if self.nodes.get(node.id) is not node:
            return
        del self.nodes[node.id]
        self._view_due = True
        log.warning("node.lost id=%s reason=%s", node.id, why)
        if self.service is not None:
            for device in node.devices:
                self.service.handle(DeviceLeft(device.id, f"node {node.id} is gone: {why}"))
            self.service.part(node)
            if self._awaited is None:
                self._show_view(self.service)

    def _check(self) -> None:
        self._check_timer = self._loop.call_later(CHECK_EVERY_S, self._check)
        service = self.service
        if service is None or self._awaited is not None or not self.may_act():
            return
        held = service.holdings([device.id for node in self.nodes.values() for device in node.devices])
        for node in self.nodes.values():
            if node.asked:
                continue  # it has not answered yet: its link says whether it lives
            node.checks += 1
            node.asked = {device.id: held[device.id] for device in node.devices if device.id in held}
            node.link.send(control.CheckNode(node.checks, node.doubted))

    def _compare(self, service: SchedulerService, node: NodeSession, holds: control.NodeHoldings) -> None:
        if self.nodes.get(node.id) is not node or holds.number != node.checks:
            return
        if node.makes != holds.makes:
            node.makes = holds.makes
            self._view_due = True
        asked, node.asked = node.asked, {}
        before, node.absent = node.absent, {}
        held = service.holdings(asked, {call for each in asked.values() for call in each.calls})
        lost: list[tuple[DeviceId, Model]] = []
        for told in _decode_snapshot(holds.snapshot).devices:
            id_ = told.device.id
            if id_ not in held or id_ not in asked:
                continue
            difference = check.compare(asked[id_], told, held[id_])
            if difference.absent:
                node.absent[id_] = difference.absent
            lost += [(id_, model) for model in difference.lost]
            self.differences += len(difference.lost) + len(difference.extra)
            for extra in difference.extra:
                log.error("node.differs device=%s function=%s: nobody knows of this worker", id_, extra.function)
                node.evict(extra.function, id_, extra.copy)
        # After all evictions: what the engine starts because of these may be what was to be evicted.
        for id_, model in lost:
            log.error("node.differs device=%s function=%s: it has no such worker", id_, model.owner.id)
            reason = "the node does not have it, and did not say so"
            service.report(WorkerExited(model.owner.id, id_, reason, model.copy))
        node.doubted = check.lasting(before, node.absent)
        self.differences += len(node.doubted)
        for call, id_ in node.doubted:
            log.error("node.differs device=%s call=%s: it does not run there", id_, call)

    # --- within ---

    def _release(self, why: str) -> None:
        service = self.service
        if self._awaited is None or service is None:
            return
        if self._awaited:
            log.warning("leader.without nodes=%s", ",".join(sorted(self._awaited)))
        self._awaited = None
        # Not before: a view of some of the nodes would have gateways give the others up, and what runs there.
        self._show_view(service)
        early, self._early = self._early, []
        log.info("leader.serves epoch=%d placed=%d because=%s", self._epoch, len(early), why)
        answered: set[CallId] = set()
        for gateway in self._gateways.values():
            service.attach(gateway.name, _noting(gateway, answered))
        service.handle(Serving())
        for gateway in self._gateways.values():
            service.attach(gateway.name, gateway.answer)
            self._forget_others(service, gateway, {call for each, call in early if each is gateway})
        for gateway, call in early:
            if call not in answered and (service.runs(call) or not service.knows(call)):
                # The last leader granted a lease that never arrived: nobody waits under that id.
                service.cancel(call)
                gateway.link.send(control.CallUnknown(call))
        self._loop.call_later(2 * GRACE_S, self._forget_orphans, self._epoch)

    def _forget_others(
        self, service: SchedulerService, gateway: GatewaySession, placed: Set[CallId] = frozenset()
    ) -> None:
        """Whatever the engine has of this gateway and it does not know of is waited for by nobody."""
        for call in service.calls_of(gateway.name):
            if call not in gateway.present and call not in placed:
                service.cancel(call)

    def _forget_orphans(self, epoch: int) -> None:
        """Calls of gateways that did not outlive the last leader."""
        if self.service is None or epoch != self._epoch:
            return
        for call in self.service.all_calls():
            if call.rpartition("@")[2] not in self._gateways:
                self.service.cancel(call)

    def _push_view(self) -> None:
        self._view_timer = self._loop.call_later(VIEW_EVERY_S, self._push_view)
        service = self.service
        if service is None or self._awaited is not None or not self._gateways:
            return
        if service.changes == self._seen_changes and not self._view_due:
            return
        self._seen_changes, self._view_due = service.changes, False
        self._show_view(service)

    def _show_view(self, service: SchedulerService) -> None:
        view = self._view(service)
        for gateway in self._gateways.values():
            gateway.link.send(view)

    def _view(self, service: SchedulerService) -> control.ClusterState:
        return control.ClusterState([each.view() for each in self.nodes.values()], service.status())
