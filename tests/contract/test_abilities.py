"""
What a node says that it can do, it does; the engine refuses the rest, with the reason. Real nodes, of a cluster and of
one machine, and one that can do everything.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.waiting import eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.model import Device, DeviceId, Function, FunctionId, Need, NodeId, Offer, OrderId, Part, Profile
from gpufaas_core.units import MiB
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node
from gpufaas_scheduler import policies as c
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.ports import NodeCommands
from gpufaas_scheduler.service import SchedulerService

N, F = NodeId("n"), FunctionId("f.ns@1")
DEVICES = (DeviceId("n/cpu:0"), DeviceId("n/cpu:1"))
FETCH = c.Fetch(F, (N,))
ACTIONS = {
    "fetch": FETCH,
    "fetch from": c.Fetch(F, (N,), source="n"),
    "fetch ranges": c.Fetch(F, (N,), ranges=((0, 5),)),
    "load parts": c.Load(F, tuple(Part(each, 10 * MiB) for each in DEVICES)),
    "procure": c.Procure("cpu"),
}


class Proposing:
    """Proposes an action in its next run, and keeps the answer."""

    name = "proposing"
    watches = c.WAKE
    action: c.Action | None = None
    refusal: c.Refusal | None = None

    def plan(self, view: c.View) -> c.Plan:  # noqa: ARG002 - the policy's
        action, self.action = self.action, None
        if action is not None:
            self.refusal = yield action


class AbleNode:
    """It can do everything, and so can the one who makes nodes."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def devices(self) -> Sequence[Device]:
        return [Device(each, "cpu", 100 * MiB, loads_parts=True) for each in DEVICES]

    def execute(self, command: object) -> None:
        self.done.append(command)

    def joined(self, order: OrderId, node: NodeId) -> None:
        """It keeps no ledger."""

    def finished(self, device: DeviceId, function: FunctionId, seconds: float) -> None:
        """It keeps no ledger."""


class RealNode:
    def __init__(self, root: Path, *, fetches: bool) -> None:
        self.done: list[object] = []
        devices = open_devices(["cpu:0=100MiB", "cpu:1=100MiB"], N)
        fetch = self._fetch if fetches else None
        cache = HostCache(HostTier(0))
        self.node = Node(devices, NoBundles(root), NoLogs(), lambda _: None, fetch=fetch, host_cache=cache)
        self.node.functions.expect(WorkerSpec(F, "f", "ns", "f", "model", Need()))
        self.devices, self.execute = self.node.devices, self.node.execute

    async def _fetch(self, spec: WorkerSpec) -> str:
        self.done.append(spec.name)
        return ""


class NoBundles:
    def __init__(self, root: Path) -> None:
        self._root = root

    def install(self, digest: str) -> Path:
        return self._root / digest

    compiled = install

    def manifest(self, digest: str) -> Manifest:  # noqa: ARG002 - the port's
        return Manifest(kind="model", template="test")


class NoLogs:
    def extend(self, function: str, instance: str, printed: object) -> None:
        pass


class Site:
    """A scheduler with the devices of *node*, for which a policy proposes what the test says."""

    def __init__(self, node: AbleNode | RealNode) -> None:
        self.node = node
        self.policy = Proposing()
        self.service = SchedulerService(Engine(policy=self.policy, replacement=Lru(), learn=False))
        commands: NodeCommands = node
        self.service.join(commands, node.devices())
        self.service.deploy(Function(F, "f", Need(), {"*": Profile(3.0, 1.0, 20 * MiB)}))
        if isinstance(node, AbleNode):
            self.service.provider = node
            self.service.handle(m.Offered((Offer("cpu", 100 * MiB, limit=1),)))

    def propose(self, action: c.Action) -> str | None:
        """Return why *action* was refused; None: it was done."""
        self.policy.action, self.policy.refusal = action, None
        self.service.handle(m.Woken())
        return None if self.policy.refusal is None else self.policy.refusal.reason


@pytest.fixture(params=["able", "of a cluster", "of one machine"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    node = AbleNode() if request.param == "able" else RealNode(tmp_path, fetches=request.param == "of a cluster")
    yield Site(node)
    if isinstance(node, RealNode):
        await node.node.close()


@pytest.mark.parametrize("name", ACTIONS)
async def test_an_action_is_carried_out_or_refused_as_the_node_and_the_platform_say(site: Site, name: str) -> None:
    device = site.node.devices()[0]
    able = isinstance(site.node, AbleNode)
    says = {
        "fetch": device.fetches, "fetch from": device.fetches_from, "fetch ranges": device.fetches_ranges,
        "load parts": device.loads_parts, "procure": able,
    }  # fmt: skip

    reason = site.propose(ACTIONS[name])

    if says[name]:
        assert reason is None
        await eventually(lambda: len(site.node.done) == 1)
    else:
        assert reason is not None
        assert reason.startswith(
            {"procure": "nodes cannot be ordered", "load parts": "a copy on n/cpu:0 has one part"}.get(name, "node n ")
        )
        await asyncio.sleep(0)
        assert site.node.done == []


async def test_a_node_of_a_cluster_fetches_and_one_of_a_single_machine_says_that_it_does_not(tmp_path: Path) -> None:
    for fetches, reason in ((True, None), (False, "node n fetches nothing ahead of a load")):
        node = RealNode(tmp_path, fetches=fetches)
        try:
            assert Site(node).propose(FETCH) == reason
        finally:
            await node.node.close()
