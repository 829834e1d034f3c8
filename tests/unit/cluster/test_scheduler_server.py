"""The scheduler's server over real connections, with gateways and nodes that the test plays."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.waiting import LIMIT_S, eventually

from gpufaas_cache_manager.replacement import Lru
from gpufaas_cluster import control, deployed
from gpufaas_cluster.connection import Identity, Link, connect
from gpufaas_cluster.gateway_sessions import Said
from gpufaas_cluster.leader import Leader
from gpufaas_cluster.placed_call import PlacedCall
from gpufaas_cluster.remote_placement import WITHOUT_LEADER
from gpufaas_cluster.remote_scheduler import RemoteScheduler
from gpufaas_cluster.scheduler_server import SchedulerServer
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import InvalidSpec, TooLate
from gpufaas_core.messages import Arrived, Command, Event, EvictCopy, Finished, Grant, Restored
from gpufaas_core.model import Asked, CallId, Device, DeviceId, Function, FunctionId, Need, NodeId, Profile, Seconds
from gpufaas_core.snapshot import DeviceSnapshot, NodeSnapshot, ResidentSnapshot, RunningCall
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.service import SchedulerService

TOKEN = b"a token of sixteen bytes"
F = FunctionId("f")


class Party:
    """A gateway or node at the other end."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        link.attend(self.said.put_nowait)

    async def hears(self, kind: type[Any]) -> Any:
        """Return the next message of *kind*; others are passed over."""
        async with asyncio.timeout(LIMIT_S):
            while type(message := await self.said.get()) is not kind:
                pass
        return message

    async def sees(self, *nodes: str) -> control.ClusterState:
        """Return the first view that has exactly these nodes."""
        while True:
            view: control.ClusterState = await self.hears(control.ClusterState)
            if sorted(each.id for each in view.nodes) == sorted(nodes):
                return view


class Rig:
    def __init__(self, leader: Leader, address: str) -> None:
        self.leader, self.address = leader, address
        self.parties: list[Party] = []

    async def _connected(self, role: control.Role, id_: str) -> Party:
        self.parties.append(Party(await connect(self.address, Identity(role, id_, "boot", TOKEN, "1"))))
        return self.parties[-1]

    async def gateway(self, id_: str) -> Party:
        return await self._connected("gateway", id_)

    async def node(self, id_: str, *resident: str, calls: tuple[CallId, ...] = ()) -> Party:
        party = await self._connected("node", id_)
        device = Device(DeviceId(f"{id_}/cpu:0"), "cpu", 100)
        residents = tuple(ResidentSnapshot(FunctionId(each), "d", 10) for each in resident)
        running = tuple(RunningCall(each, F) for each in calls)
        snapshot = NodeSnapshot((DeviceSnapshot(device, residents, running),))
        party.link.send(control.NodeJoins(f"{id_}:7080", msgspec.Raw(msgspec.msgpack.encode(snapshot)), 0.0))
        return party

    async def check(self, node: Party, *resident: str, calls: tuple[str, ...] = ()) -> control.CheckNode:
        """Have the nodes asked what they hold; *node* answers that it is this."""
        self.leader._check()
        asked: control.CheckNode = await node.hears(control.CheckNode)
        device = Device(DeviceId("n1/cpu:0"), "cpu", 100)
        residents = tuple(ResidentSnapshot(FunctionId(each), "d", 10) for each in resident)
        running = tuple(RunningCall(CallId(each), F) for each in calls)
        snapshot = NodeSnapshot((DeviceSnapshot(device, residents, running),))
        node.link.send(control.NodeHoldings(asked.number, msgspec.Raw(msgspec.msgpack.encode(snapshot))))
        return asked

    def lead(self, *awaited: str) -> None:
        self.leader.lead({NodeId(each) for each in awaited}, Restored())


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A scheduler that has won, and knows one model function."""
    server = SchedulerServer(Identity("scheduler", "s1", "boot", TOKEN, "1"))
    port = await server.open("127.0.0.1:0")
    engine = Engine(policy=make_policy("least-wait"), replacement=Lru(), epoch=1)
    leader = server.leads = Leader(SchedulerService(engine), 1)
    leader.deployed.deploy(
        Function(F, "d", profiles={"*": Profile(3.0, 1.0, 10)}),
        WorkerSpec(function=F, name="f", namespace="openfaas-fn", digest="d", kind="model", need=Need()),
    )
    made = Rig(leader, f"127.0.0.1:{port}")
    yield made
    for each in made.parties:
        each.link.close()
    await server.close()


async def led(rig: Rig, *resident: str) -> tuple[Party, Party]:
    """Let the scheduler lead; return a gateway that sees a node, and that node."""
    rig.lead()
    gateway = await rig.gateway("g1")
    node = await rig.node("n1", *resident)
    await gateway.sees("n1")
    return gateway, node


async def granted(gateway: Party, number: int) -> Grant:
    gateway.link.send(control.PlaceCall(CallId(f"{number}@g1.boot"), F, 60.0))
    grant: Grant = (await gateway.hears(control.Granted)).grant
    return grant


async def place(gateway: Party, number: int) -> DeviceId:
    """Return where a call of `F` was placed."""
    gateway.link.send(control.PlaceCall(CallId(f"{number}@g1.boot"), F, 60.0))
    granted = await gateway.hears(control.Granted)
    gateway.link.send(control.CancelCall(granted.grant.call))
    device: DeviceId = granted.grant.device
    return device


async def test_a_gateway_knows_the_nodes_before_it_gets_a_grant(rig: Rig) -> None:
    rig.lead()
    first = await rig.gateway("g0")
    await rig.node("n1")
    await first.sees("n1")

    late = await rig.gateway("g1")
    late.link.send(control.PlaceCall(CallId("1@g1.boot"), F, 60.0))

    assert type(await late.said.get()) is control.ClusterState
    assert type(await late.hears(control.Granted)) is control.Granted


async def test_a_new_leader_shows_no_view_before_the_nodes_that_it_waits_for_are_there(rig: Rig) -> None:
    """A gateway that sees only some of them gives up the others, and what runs there."""
    rig.lead("n1", "n2")
    gateway = await rig.gateway("g1")

    await rig.node("n1")
    await rig.node("n2")

    assert sorted(each.id for each in (await gateway.hears(control.ClusterState)).nodes) == ["n1", "n2"]


async def test_a_node_that_is_gone_leaves_the_view_at_once(rig: Rig) -> None:
    rig.lead()
    gateway = await rig.gateway("g1")
    node = await rig.node("n1")
    await rig.node("n2")
    await gateway.sees("n1", "n2")

    node.link.abort("killed")

    await gateway.sees("n2")


async def test_a_node_that_no_gateway_reaches_gets_no_calls_until_one_does(rig: Rig) -> None:
    rig.lead()
    gateway, other = await rig.gateway("g1"), await rig.gateway("g2")
    await rig.node("n1", "f")
    await rig.node("n2")
    await gateway.sees("n1", "n2")
    other.link.send(control.UnreachedNodes([NodeId("n1")]))
    assert await place(gateway, 1) == "n1/cpu:0", "one of them reaches it"

    gateway.link.send(control.UnreachedNodes([NodeId("n1")]))
    assert await place(gateway, 2) == "n2/cpu:0"
    view = await gateway.sees("n1", "n2")
    while not any(each.note for each in view.nodes):
        view = await gateway.sees("n1", "n2")
    assert {each.id: each.note for each in view.nodes} == {
        "n1": "no gateway reaches it at n1:7080: it gets no calls",
        "n2": "",
    }

    other.link.send(control.UnreachedNodes([]))
    while any(each.note for each in view.nodes):
        view = await gateway.sees("n1", "n2")


async def test_that_no_node_can_be_reached_closes_none(rig: Rig) -> None:
    gateway, _ = await led(rig, "f")

    gateway.link.send(control.UnreachedNodes([NodeId("n1")]))

    assert await place(gateway, 1) == "n1/cpu:0"


ASKED = Asked(0.5, 76.1, 1.5, "cheapest", "resnet", "small")


async def connected_gateway(rig: Rig) -> tuple[RemoteScheduler, "asyncio.Task[None]"]:
    """Return a gateway's own end of the link once it sees a node, and the task that keeps the link."""
    gateway = RemoteScheduler(Identity("gateway", "g1", "boot", TOKEN, "1"))
    gateway.leaders.leader = rig.address
    keeping = asyncio.create_task(gateway.leaders.run())
    await eventually(lambda: gateway.view is not None and gateway.view.nodes)
    return gateway, keeping


async def test_a_gateway_asks_the_planner_of_the_leader_and_waits_for_its_plan(rig: Rig) -> None:
    rig.lead()
    await rig.node("n1", "f")
    gateway, keeping = await connected_gateway(rig)
    with pytest.raises(InvalidSpec, match="this release cannot answer 'planner'"):
        await gateway.planner("")
    future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    asked: list[str] = []
    rig.leader.gateways.planner = lambda why: asked.append(why) or future

    waiting = asyncio.create_task(gateway.planner("alice asked"))
    await eventually(lambda: asked == ["alice asked"])
    assert not waiting.done()
    future.set_result({"solver": "test", "version": 3})

    async with asyncio.timeout(LIMIT_S):
        assert await waiting == {"solver": "test", "version": 3}
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_call_that_went_on_without_the_scheduler_is_waited_for_by_nobody(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway lost the link while it waited, and sent it straight to a node: no place is kept for it."""
    arrived: list[Arrived] = []
    handle = Engine.handle

    def watched(engine: Engine, event: Event, now: Seconds) -> list[Command]:
        if isinstance(event, Arrived):
            arrived.append(event)
        return handle(engine, event, now)

    monkeypatch.setattr(Engine, "handle", watched)
    rig.lead()
    node = await rig.node("n1", "f")
    gateway, keeping = await connected_gateway(rig)
    first, second = CallId("1@g1.boot"), CallId("2@g1.boot")
    async with asyncio.timeout(LIMIT_S):
        placed = gateway.place(first, F, 60.0)
        running = placed if isinstance(placed, Grant) else await placed
        waiting = gateway.place(second, F, 60.0, 512.0, asked=ASKED)
        assert isinstance(waiting, asyncio.Future)
        engine = rig.leader.service.engine
        await eventually(lambda: engine.knows(second))
        assert [(each.size, each.asked) for each in arrived] == [(0.0, None), (512.0, ASKED)]

        gateway._link.abort("lost")  # type: ignore[union-attr]
        grant = await waiting

        assert (grant.number, grant.call != second) == (WITHOUT_LEADER, True)
        await eventually(lambda: gateway.connected)
        gateway.over(second)
        gateway.over(first)
        node.link.send(control.NodeEvent(Finished(grant.call, grant.device, 1.0)))
        node.link.send(control.NodeEvent(Finished(running.call, running.device, 1.0)))
        await eventually(lambda: not engine.calls())
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.parametrize("runs", [True, False])
async def test_a_new_leader_ends_no_call_of_a_gateway_before_that_has_said_what_runs(rig: Rig, runs: bool) -> None:
    """Its node may be there between its first word and its second."""
    rig.lead("n1")
    gateway = await rig.gateway("g1")
    call = CallId("1@g1.boot")

    node = await rig.node("n1", "f", calls=(call,))
    await gateway.sees("n1")  # now it serves
    engine = rig.leader.service.engine
    assert engine.runs(call)
    gateway.link.send(control.RunningCalls([call] if runs else []))
    gateway.link.send(control.CancelCall(CallId("2@g1.boot")))  # which it does not know
    await eventually(lambda: engine.ignored["Cancelled"])

    rig.leader._check()
    told = []
    async with asyncio.timeout(LIMIT_S):
        while type(message := await node.said.get()) is not control.CheckNode:
            told += [message.command.call] if type(message) is control.ExecuteCommand else []
    assert told == ([] if runs else [call])


async def test_a_call_whose_grant_by_the_last_leader_never_came_is_placed_as_a_new_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway waits for an answer, and its node has opened the grant, which no caller will use."""
    monkeypatch.setattr("gpufaas_cluster.leader.HOLD_S", LIMIT_S)
    rig.lead("n1", "n2")
    call = CallId("1@g1.boot")
    gateway = await rig.gateway("g1")
    gateway.link.send(control.RunningCalls([]))
    await rig.node("n1", "f", calls=(call,))

    gateway.link.send(control.PlaceCall(call, F, 60.0))
    session = rig.leader.gateways.by_name["g1.boot"]
    await eventually(lambda: session.calls == {call: Said.PLACED})
    await rig.node("n2", "f")

    assert await gateway.hears(control.CallUnknown) == control.CallUnknown(call)


# --- functions, which come from etcd: sometimes to a gateway first ---


def known(rig: Rig, name: str, **limits: int) -> None:
    """etcd tells the scheduler of a function."""
    function = Function(FunctionId(name), "d", profiles={"*": Profile(3.0, 1.0, 10)}, **limits)
    rig.leader.deployed.deploy(function, WorkerSpec(FunctionId(name), name, "openfaas-fn", "d", "model", Need()))


async def test_a_call_that_comes_before_its_function_waits_for_it(rig: Rig) -> None:
    gateway, node = await led(rig, "f")
    gateway.link.send(control.PlaceCall(CallId("1@g1.boot"), FunctionId("new"), 60.0))
    grant = await granted(gateway, 2)
    assert grant.function == F, "others do not wait with it"
    node.link.send(control.NodeEvent(Finished(grant.call, grant.device, 1.0)))

    known(rig, "new")

    assert (await gateway.hears(control.Granted)).grant.function == "new"


async def test_a_scale_that_comes_before_its_function_is_not_lost(rig: Rig) -> None:
    gateway, _ = await led(rig)
    gateway.link.send(control.ScaleFunction(FunctionId("new"), 1))
    await place(gateway, 1)

    known(rig, "new", max_copies=2)

    assert rig.leader.service.status().desired == {"new": 1}


@pytest.mark.parametrize("removed", [True, False])
async def test_a_call_of_a_function_that_is_not_there_is_rejected(
    rig: Rig, removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployed, "KNOWN_WITHIN_S", 60.0 if removed else 0.1)
    rig.lead()
    gateway = await rig.gateway("g1")
    if removed:
        known(rig, "old")
        rig.leader.deployed.remove(FunctionId("old"), drain=False)

    gateway.link.send(control.PlaceCall(CallId("1@g1.boot"), FunctionId("old"), 60.0))

    assert (await gateway.hears(control.CallRejected)).code == "UnknownFunction"


async def test_what_a_policy_refuses_reaches_the_caller_with_its_details(rig: Rig) -> None:
    rig.lead()
    await rig.node("n1", "f")
    gateway, keeping = await connected_gateway(rig)
    waiting = gateway.place(call := CallId("1@g1.boot"), FunctionId("not-known-yet"), 60.0)
    assert isinstance(waiting, asyncio.Future)

    rig.leader.service.gateways["g1.boot"](call, TooLate("late", 2.5, {"goal_s": 1.0}))

    with pytest.raises(TooLate, match="late") as refused:
        async with asyncio.timeout(LIMIT_S):
            await waiting
    assert (refused.value.retry_after_s, refused.value.details) == (2.5, {"goal_s": 1.0})
    keeping.cancel()


async def test_the_goal_of_a_call_of_an_older_gateway_is_read_and_told_to_an_older_scheduler(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[Arrived] = []

    def watched(_: Engine, event: Event, __: Seconds) -> list[Command]:
        arrived.extend([event] if isinstance(event, Arrived) else [])
        return []

    monkeypatch.setattr(Engine, "handle", watched)
    rig.lead()
    gateway = await rig.gateway("g1")
    known(rig, "f")

    gateway.link.send(control.PlaceCall(CallId("1@g1.boot"), F, 60.0, goal_s=0.5))
    await eventually(lambda: arrived)

    assert arrived[0].asked == Asked(0.5)
    placed = PlacedCall(CallId("2"), CallId("2"), F, 0.0, 60.0, asked=ASKED)
    assert placed.message(0.0).goal_s == ASKED.goal_s


# --- what a node does not have ---


async def test_a_worker_that_a_node_does_not_have_is_loaded_again(rig: Rig) -> None:
    gateway, node = await led(rig, "f")
    grant = await granted(gateway, 1)
    assert not grant.cold
    node.link.send(control.NodeEvent(Finished(grant.call, grant.device, 1.0)))

    await rig.check(node)

    while not (grant := await granted(gateway, 2)).cold:
        node.link.send(control.NodeEvent(Finished(grant.call, grant.device, 1.0)))
    assert grant.device == "n1/cpu:0"


async def test_a_worker_that_nobody_knows_of_is_evicted_unless_it_serves(rig: Rig) -> None:
    _, node = await led(rig, "f")

    await rig.check(node, "f", "g")

    assert (await node.hears(control.ExecuteCommand)).command == EvictCopy(FunctionId("g"), DeviceId("n1/cpu:0"))


async def test_a_call_that_is_not_there_twice_is_doubted_and_the_node_ends_it(rig: Rig) -> None:
    gateway, node = await led(rig, "f")
    grant = await granted(gateway, 1)
    engine = rig.leader.service.engine

    async def answered() -> None:
        await eventually(lambda: not rig.leader.nodes.by_id[NodeId("n1")].check.asked)

    first = await rig.check(node, "f")
    await answered()
    second = await rig.check(node, "f")
    await answered()
    third = await rig.check(node, "f")

    assert (first.doubted, second.doubted) == ([], []), "the call may be on its way"
    assert third.doubted == [(grant.call, grant.device)]
    assert engine.runs(grant.call), "only its node can tell that it will not come"
    await answered()
    await rig.check(node, "f", calls=(grant.call,))
    await answered()
    assert (await rig.check(node, "f", calls=(grant.call,))).doubted == []


async def test_a_scheduler_that_stood_still_misses_nothing_that_it_is_told_meanwhile(rig: Rig) -> None:
    """It may not act until etcd has said that it leads; what it is told until then is told again."""
    rig.lead()
    node = await rig.node("n1", "f")
    gateway, keeping = await connected_gateway(rig)
    engine = rig.leader.service.engine
    async with asyncio.timeout(LIMIT_S):
        placed = gateway.place(CallId("1@g1.boot"), F, 60.0)
        running = placed if isinstance(placed, Grant) else await placed

        rig.leader.may_act = lambda: False
        node.link.send(control.NodeEvent(Finished(running.call, running.device, 1.0)))
        gateway.over(running.call)
        await eventually(lambda: node.link.closed)
        late = gateway.place(CallId("2@g1.boot"), F, 60.0)
        await asyncio.sleep(0.3)
        rig.leader.may_act = lambda: True
        await rig.node("n1", "f")
        grant = late if isinstance(late, Grant) else await late

        assert not grant.cold
        await eventually(lambda: not engine.runs(running.call))
    keeping.cancel()
