"""
The nodes that are connected to the scheduler that leads, as the scheduler's end sees them.

What a node says when it joins is the truth about what it holds. A link that breaks takes the node's devices out of the
view at once.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gpufaas_cluster import control
from gpufaas_cluster.connection import Link
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.messages import Command, DeviceDrained, DeviceLeft, EvictCopy, WorkerExited
from gpufaas_core.model import Device, FunctionId, NodeId, NodeView, OrderId, Seconds
from gpufaas_core.snapshot import NodeSnapshot
from gpufaas_scheduler.check import NodeCheck
from gpufaas_scheduler.service import SchedulerService

log = logging.getLogger(__name__)

CLOCK_OFF_S: Final[Seconds] = 5.0
"""A node whose clock differs by more gets a note. No decision is made by clocks."""
_decode_snapshot: Final = msgspec.msgpack.Decoder(NodeSnapshot).decode


class NodeSession:
    """A node at the other end of a link (`ports.NodeCommands`)."""

    def __init__(self, link: Link, hello: control.ClientHello) -> None:
        self.link = link
        self.id = NodeId(hello.id)
        self.boot = hello.boot
        self.version = hello.version
        self.address = ""
        self.devices: list[Device] = []
        self.draining = False
        self.unreached = False
        """No gateway reaches it."""
        self.closed = False
        """Its devices take no calls: it is draining or unreached."""
        self.clock_note = ""
        self.note = self.makes = ""
        self.joined_at = time.monotonic()
        self.cpu_s: dict[FunctionId, Seconds] = {}
        self.check = NodeCheck()

    def execute(self, command: Command) -> None:
        self.link.send(control.ExecuteCommand(command))

    def view(self) -> NodeView:
        unreached = f"no gateway reaches it at {self.address}: it gets no calls" if self.unreached else ""
        note = "; ".join(filter(None, (self.note, self.clock_note, unreached)))
        joined_s = time.monotonic() - self.joined_at
        return NodeView(self.id, self.address, self.devices, self.draining, note, self.version, joined_s, self.makes)


@dataclass(eq=False)
class NodeSessions:
    """The nodes, as of their last `NodeJoins`."""

    service: SchedulerService
    workers: Mapping[FunctionId, WorkerSpec]
    """The revisions that a node must know before it gets a grant of theirs."""
    drained: set[NodeId]
    """The nodes that take no new calls; kept when they reconnect."""
    on_change: Callable[[bool], None]
    """Told that gateways should see another view; true: now, false: soon."""
    on_joined: Callable[[NodeId], None]
    on_drain: Callable[[NodeId, bool], None]
    by_id: dict[NodeId, NodeSession] = field(default_factory=dict)
    differences: int = 0
    """In how much nodes differed from what they should have had, since the term began."""

    def accept(self, link: Link, hello: control.ClientHello) -> NodeSession | control.Turned:
        """Take a new link, whose node says next what it holds; or say why it is turned away."""
        known = self.by_id.get(NodeId(hello.id))
        if known is not None and known.boot != hello.boot and not known.link.closed:
            return control.Turned(
                "duplicate",
                f"a node {hello.id!r} is there already (boot {known.boot}, at {known.address}): give this one "
                "another --id, or wait until the other has been silent for 3 s",
            )
        if known is not None:
            known.link.on_lost = lambda _: None
            known.link.close("it connected again")
            self._lost(known, "it connected again")
        node = NodeSession(link, hello)
        link.on_lost = lambda why: self._lost(node, why)
        return node

    def heard(self, node: NodeSession, message: object) -> None:
        if isinstance(message, control.NodeEvent):
            if self.by_id.get(node.id) is node:
                if type(message.event) is DeviceLeft:
                    node.devices = [each for each in node.devices if each.id != message.event.device]
                    self.on_change(False)
                self.service.report(message.event)
        elif isinstance(message, control.NodeJoins):
            self._join(node, message)
        elif isinstance(message, control.NodeHoldings):
            self._compare(node, message)
        elif isinstance(message, control.CpuUsed):
            node.cpu_s = message.cpu_s
        elif isinstance(message, control.NodeNote):
            node.note = message.note
            self.on_change(False)
            if message.note:
                log.warning("node.note id=%s note=%s", node.id, message.note)

    def send(self, message: control.Message) -> None:
        """Send *message* to all nodes."""
        for node in self.by_id.values():
            node.link.send(message)

    def cpu_seconds(self) -> dict[FunctionId, Seconds]:
        """Return the CPU time of all workers, by function."""
        used: dict[FunctionId, Seconds] = {}
        for node in self.by_id.values():
            for function, seconds in node.cpu_s.items():
                used[function] = used.get(function, 0.0) + seconds
        return used

    def drain(self, id_: NodeId, drain: bool) -> None:
        """Let the node take no new calls: what runs there ends, what waits goes elsewhere; or take it back."""
        (self.drained.add if drain else self.drained.discard)(id_)
        node = self.by_id.get(id_)
        if node is not None and node.draining != drain:
            node.draining = drain
            self._open_or_close(node)
        self.on_drain(id_, drain)

    def set_unreached(self, unreached: set[NodeId]) -> None:
        """Give *unreached* nodes no calls: unless that are all nodes, since then nothing is gained."""
        if len(unreached) == len(self.by_id):
            unreached = set()
        for node in self.by_id.values():
            if node.unreached != (node.id in unreached):
                node.unreached = not node.unreached
                event = "unreached" if node.unreached else "reached"
                log.warning("node.%s id=%s address=%s", event, node.id, node.address)
                self._open_or_close(node)

    def check(self) -> None:
        """Ask the nodes what they hold; one that has not answered the last time is left: its link says if it lives."""
        held = self.service.engine.holdings(device.id for node in self.by_id.values() for device in node.devices)
        for node in self.by_id.values():
            if not node.check.asked:
                node.check.ask({device.id: held[device.id] for device in node.devices if device.id in held})
                node.link.send(control.CheckNode(node.check.number, node.check.doubted))

    # --- within ---

    def _join(self, node: NodeSession, joining: control.NodeJoins) -> None:
        node.address, node.makes = joining.address, joining.makes
        off = joining.wall - time.time()
        if joining.wall and abs(off) > CLOCK_OFF_S:
            # Ages travel, never times: a clock that is off decides nothing, but confuses readers of logs.
            node.clock_note = f"its clock is {off:+.0f} s off this scheduler's: set it by NTP"
            log.warning("node.clock id=%s off_s=%.0f", node.id, off)
        for worker in self.workers.values():
            node.link.send(control.DefineFunction(worker))
        self.by_id[node.id] = node
        snapshot = _decode_snapshot(joining.snapshot)
        node.devices = [each.device for each in snapshot.devices]
        self.on_change(True)  # before any grant of it is made, gateways know where it is
        self.service.join(node, snapshot.devices, snapshot.staged, OrderId(joining.order))
        if node.id in self.drained:
            self.drain(node.id, True)
        log.info("node.joined id=%s address=%s devices=%d", node.id, node.address, len(node.devices))
        self.on_joined(node.id)
        self.on_change(False)

    def _lost(self, node: NodeSession, why: str) -> None:
        if self.by_id.get(node.id) is not node:
            return
        del self.by_id[node.id]
        log.warning("node.lost id=%s reason=%s", node.id, why)
        for device in node.devices:
            self.service.handle(DeviceLeft(device.id, f"node {node.id} is gone: {why}"))
        self.service.part(node)
        self.on_change(True)

    def _open_or_close(self, node: NodeSession) -> None:
        closed = node.draining or node.unreached
        if closed != node.closed:
            node.closed = closed
            for device in node.devices:
                self.service.handle(DeviceDrained(device.id, closed))
        self.on_change(False)

    def _compare(self, node: NodeSession, holds: control.NodeHoldings) -> None:
        """Settle in what the node differs from what the engine thinks (`scheduler.check`)."""
        check = node.check
        if self.by_id.get(node.id) is not node or holds.number != check.number:
            return
        if node.makes != holds.makes:
            node.makes = holds.makes
            self.on_change(False)
        held = self.service.engine.holdings(check.asked, check.calls())
        differences = check.answer(_decode_snapshot(holds.snapshot).devices, held)
        for id_, difference in differences.items():
            self.differences += len(difference.lost) + len(difference.extra)
            for extra in difference.extra:
                log.error("node.differs device=%s function=%s: an unknown worker", id_, extra.function)
                node.execute(EvictCopy(extra.function, id_, extra.copy))
        # After all evictions: what the engine starts because of these may be what was to be evicted.
        for id_, difference in differences.items():
            for copy in difference.lost:
                log.error("node.differs device=%s function=%s: it has no such worker", id_, copy.owner.id)
                reason = "the node does not have it, and did not say so"
                self.service.report(WorkerExited(copy.owner.id, id_, reason, copy.number))
        self.differences += len(check.doubted)
        for call, id_ in check.doubted:
            log.error("node.differs device=%s call=%s: it does not run there", id_, call)
