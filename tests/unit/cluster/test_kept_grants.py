"""A gateway's grants that it keeps: which calls run by them, and how each of them ends."""

import asyncio
from typing import Any, cast

import pytest
from tests.waiting import eventually

from gpufaas_cluster import control, kept_grants
from gpufaas_cluster.call_heads import NodeCallHead
from gpufaas_cluster.connection import Identity
from gpufaas_cluster.remote_exchange import RemoteExchange
from gpufaas_cluster.remote_placement import WITHOUT_LEADER
from gpufaas_cluster.remote_scheduler import RemoteScheduler
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import (
    Asked,
    CallId,
    Device,
    DeviceId,
    DeviceStatus,
    EngineStatus,
    FunctionId,
    NodeId,
    NodeView,
    Part,
    ResidentStatus,
)
from gpufaas_core.wire.heads import CallHead

F, G = FunctionId("f"), FunctionId("g")
DEVICE = DeviceId("n/cpu:0")
LONG = 3600.0


class FakeLink:
    """What the gateway says to its scheduler."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.said: list[Any] = []

    def send(self, message: control.Message) -> None:
        self.said.append(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.said if type(each) is kind]


class FakeLane:
    """A lane of a connection to a node."""

    def __init__(self) -> None:
        self.known: Grant | None = None
        self.sent: list[NodeCallHead] = []

    def send(self, _: int, head: NodeCallHead, __: bytes) -> None:
        self.sent.append(head)


class Side:
    """A gateway's placement, with a link to a scheduler that the test plays."""

    def __init__(self) -> None:
        self.gateway = RemoteScheduler(Identity("gateway", "g1", "boot", b"token"))
        self.link = FakeLink()
        self.gateway.begin(self.link)  # type: ignore[arg-type]
        self.number = 0

    def granted(self, sent: str, function: FunctionId = F, keep_s: float = LONG) -> Grant:
        """The scheduler grants what was sent with this id."""
        self.number += 1
        grant = Grant(self.link.epoch, self.number, (CallId(sent),), function, "d", (Part(DEVICE, 1),), False)
        self.gateway.heard(control.Granted(grant, keep_s))
        return grant

    async def place(self, call: str, function: FunctionId = F, keep_s: float = LONG, **how: Any) -> Grant:
        """Place a call that the scheduler grants at once; return its grant."""
        placed = self.gateway.place(CallId(call), function, 60.0, **how)
        assert isinstance(placed, asyncio.Future), "it was asked for"
        grant = self.granted(call, function, keep_s)
        assert await placed is grant
        return grant

    def takes(self, call: str, function: FunctionId = F, **how: Any) -> Grant | None:
        """Place a call; return the grant that it takes without asking, if it does."""
        placed = self.gateway.place(CallId(call), function, 60.0, **how)
        return placed if isinstance(placed, Grant) else None

    def answered(self, grant: Grant, run_s: float = 0.25) -> None:
        """The node answers the call that runs by *grant*, and leaves its end to the gateway."""
        kept = self.gateway.may_keep(grant)
        assert kept is not None
        kept.on_answer(run_s)

    def ends(self, grant: Grant, call: str) -> None:
        self.answered(grant)
        self.gateway.over(CallId(call))

    async def keeps(self, call: str = "1", **how: Any) -> Grant:
        """Have the gateway keep a grant."""
        grant = await self.place(call, **how)
        self.ends(grant, call)
        return grant

    def lost(self, epoch: int = 1) -> None:
        """The link is lost, and the next one made."""
        self.gateway.end()
        self.link = FakeLink(epoch)
        self.gateway.begin(self.link)  # type: ignore[arg-type]


@pytest.fixture
async def side() -> Side:
    return Side()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_grants, "_TICK_S", 0.001)


async def given_back(side: Side) -> control.ReturnGrant:
    await eventually(lambda: side.link.of(control.ReturnGrant))
    (message,) = side.link.of(control.ReturnGrant)
    assert isinstance(message, control.ReturnGrant)
    return message


# --- who runs by it ---


async def test_the_next_call_runs_by_a_grant_that_is_kept_and_asks_nobody(side: Side) -> None:
    grant = await side.keeps()
    before = list(side.link.said)

    for number in range(2, 6):
        assert side.takes(str(number)) is grant
        found = side.gateway.may_keep(grant)
        assert found is not None
        assert found.calls == number, "its node is told that it is so many'th"
        side.ends(grant, str(number))

    assert side.link.said == before


async def test_a_call_while_it_is_in_use_asks(side: Side) -> None:
    grant = await side.keeps()
    assert side.takes("2") is grant

    assert side.takes("3") is None
    assert [each.call for each in side.link.of(control.PlaceCall)] == ["1", "3"]


async def test_calls_of_other_functions_and_those_that_are_not_plain_ask(side: Side) -> None:
    await side.keeps()

    assert side.takes("2", G) is None
    assert side.takes("3", outer=Outer(DEVICE, F)) is None
    assert side.takes("4", endless=True) is None


@pytest.mark.parametrize(("limit_s", "takes"), [(1.0, False), (59.5, True), (600.0, False)])
async def test_a_call_with_another_time_limit_asks(side: Side, limit_s: float, takes: bool) -> None:
    """The scheduler ends calls that it makes by the deadline of the first call by its grant."""
    await side.keeps()

    assert isinstance(side.gateway.place(CallId("2"), F, limit_s), Grant) is takes


@pytest.mark.parametrize(
    "how", [{"keep_s": 0.0}, {"outer": Outer(DEVICE, F)}, {"endless": True}], ids=["not kept", "nested", "endless"]
)
async def test_some_grants_end_with_their_call(side: Side, how: dict[str, Any]) -> None:
    grant = await side.place("1", **how)

    assert side.gateway.may_keep(grant) is None
    side.gateway.over(CallId("1"))
    assert side.takes("2") is None
    assert not side.link.of(control.ReturnGrant)


async def test_a_grant_whose_end_the_node_has_reported_is_not_kept(side: Side) -> None:
    await side.place("1")

    side.gateway.over(CallId("1"))

    assert side.takes("2") is None
    assert not side.link.of(control.ReturnGrant)


# --- how it ends ---


@pytest.mark.usefixtures("quick")
async def test_a_grant_that_nobody_takes_is_given_back_with_what_ran_by_it(side: Side) -> None:
    grant = await side.keeps()
    for call in ("2", "3"):
        assert side.takes(call) is grant
        side.ends(grant, call)

    assert await given_back(side) == control.ReturnGrant(CallId("1"), DEVICE, 3, 0.75)
    assert side.takes("4") is None
    await asyncio.sleep(0.02)
    assert len(side.link.of(control.ReturnGrant)) == 1
    assert not side.gateway.kept.idle


async def test_it_is_given_back_when_its_time_is_over_however_busy(side: Side) -> None:
    grant = await side.keeps(keep_s=0.05)
    taken = 1
    async with asyncio.timeout(60):
        while side.takes(str(taken + 1)) is grant:
            taken += 1
            await asyncio.sleep(0.001)
            side.ends(grant, str(taken))

    message = await given_back(side)
    assert (message.call, message.calls) == ("1", taken)


async def test_the_caller_of_a_call_by_it_goes_away_and_the_scheduler_ends_it(side: Side) -> None:
    grant = await side.keeps()
    assert side.takes("2") is grant

    side.gateway.cancel(CallId("2"))
    side.gateway.over(CallId("2"))

    assert side.link.of(control.CancelCall) == [control.CancelCall(CallId("1"))]
    assert side.takes("3") is None
    assert not side.link.of(control.ReturnGrant)


async def test_an_answer_that_comes_after_its_caller_left_keeps_nothing(side: Side) -> None:
    grant = await side.keeps()
    assert side.takes("2") is grant
    kept = side.gateway.may_keep(grant)
    assert kept is not None

    side.gateway.cancel(CallId("2"))
    kept.on_answer(0.1)
    side.gateway.over(CallId("2"))

    assert side.takes("3") is None
    assert not side.link.of(control.ReturnGrant)


async def test_a_call_that_is_over_ends_nothing_of_the_one_that_has_its_grant_now(side: Side) -> None:
    grant = await side.keeps()
    assert side.takes("2") is grant

    side.gateway.cancel(CallId("1"))
    side.gateway.over(CallId("1"))

    assert not side.link.of(control.CancelCall)
    side.lost()
    assert side.link.of(control.RunningCalls) == [control.RunningCalls([CallId("1")])]


# --- refused ---


async def test_a_refused_one_is_given_up_and_its_call_placed_as_a_new_one_with_its_own_time(side: Side) -> None:
    grant = await side.keeps()
    assert side.takes("2", size=7.0, asked=Asked(0.5)) is grant

    again = side.gateway.again(CallId("2"))

    assert side.link.of(control.CancelCall) == [control.CancelCall(CallId("1"))]
    asked = side.link.of(control.PlaceCall)[-1]
    assert (asked.call, asked.function, asked.size, asked.asked) == ("2", F, 7.0, Asked(0.5))
    assert 0.0 < asked.timeout_s <= 60.0
    side.granted("1")  # the scheduler placed the first one again before it heard that
    assert side.link.of(control.CancelCall)[-1] == control.CancelCall(CallId("1"))
    own = side.granted("2")
    assert await again is own
    side.ends(own, "2")
    assert side.takes("3") is own


async def test_a_second_grant_that_came_early_is_not_left_behind(side: Side) -> None:
    grant = await side.keeps()
    assert side.takes("2") is grant
    side.granted("1")  # the node has told the scheduler first that it refused

    again = side.gateway.again(CallId("2"))
    own = side.granted("2", keep_s=0.0)
    assert await again is own
    side.gateway.over(CallId("2"))

    assert control.CancelCall(CallId("1")) in side.link.said
    side.lost()
    assert side.link.of(control.RunningCalls) == [control.RunningCalls([])]


async def test_the_first_call_by_a_grant_waits_for_the_next_one_as_ever(side: Side) -> None:
    await side.place("1")

    again = side.gateway.again(CallId("1"))

    assert side.link.said[-1] == control.PlaceAgain(CallId("1"))
    second = side.granted("1")
    assert await again is second
    side.ends(second, "1")
    assert side.takes("2") is second


@pytest.mark.parametrize("how", [{"outer": Outer(DEVICE, F)}, {"endless": True}], ids=["nested", "endless"])
async def test_the_next_grant_of_a_call_whose_grant_may_not_be_kept_may_not_be_kept(
    side: Side, how: dict[str, Any]
) -> None:
    await side.place("1", **how)

    again = side.gateway.again(CallId("1"))
    second = side.granted("1")

    assert await again is second
    assert side.gateway.may_keep(second) is None


async def test_a_node_is_sent_the_next_grant_of_a_call_also_on_the_lane_of_the_refused_one(side: Side) -> None:
    lane = FakeLane()

    def sends(grant: Grant) -> Grant | None:
        head = CallHead(grant.call, "POST", "/", b"", [])
        placed = side.gateway.may_keep(grant)
        RemoteExchange(asyncio.get_running_loop(), lambda *_: None, grant, head, b"", placed).sent_on(cast(Any, lane))
        return lane.sent[-1].grant

    first = await side.place("1")
    assert sends(first) is first
    again = side.gateway.again(CallId("1"))
    second = side.granted("1")
    assert await again is second

    assert sends(second) is second
    side.ends(second, "1")
    assert side.takes("2") is second
    assert sends(second) is None, "the node knows it"


# --- the link is lost ---


@pytest.mark.parametrize("epoch", [1, 2], ids=["the same scheduler", "another one"])
async def test_kept_ones_are_the_schedulers_and_calls_by_them_run_on(side: Side, epoch: int) -> None:
    used = await side.keeps("1")
    assert side.takes("2") is used
    await side.keeps("3")

    side.lost(epoch)

    assert side.link.of(control.RunningCalls) == [control.RunningCalls([CallId("1")])]
    assert side.takes("4") is None
    side.ends(used, "2")
    assert side.link.of(control.CancelCall) == [control.CancelCall(CallId("1"))], "so it ends, whoever leads"
    assert side.takes("5") is None
    assert not side.link.of(control.ReturnGrant)


async def test_a_call_that_ends_while_nobody_leads_is_not_among_those_that_run(side: Side) -> None:
    grant = await side.keeps()
    assert side.takes("2") is grant
    side.gateway.end()

    side.ends(grant, "2")
    side.lost()

    assert side.link.of(control.RunningCalls) == [control.RunningCalls([])]


async def test_without_a_leader_calls_go_on_as_before_and_keep_nothing(side: Side) -> None:
    await side.keeps()
    resident = ResidentStatus(F, 1, 0, False, False, 0.0)
    device = Device(DEVICE, "cpu", 100)
    status = EngineStatus("", (DeviceStatus(device, 1, False, (resident,), 0, 0, 0, 0, 0, 0.0),), {}, {})
    side.gateway.view = control.ClusterState([NodeView(NodeId("n"), "n:1", [device])], status)
    side.gateway.end()

    grant = side.takes("2")

    assert grant is not None
    assert grant.number == WITHOUT_LEADER
    assert side.gateway.may_keep(grant) is None


async def test_without_a_leader_calls_go_to_nodes_that_are_reached(side: Side) -> None:
    """Each second call went to a dead node, and ended with 503 ten seconds later."""
    resident = ResidentStatus(F, 1, 0, False, False, 0.0)
    devices = [Device(DeviceId(f"{node}/cpu:0"), "cpu", 100) for node in ("dead", "alive")]
    shown = tuple(DeviceStatus(each, 1, False, (resident,), 0, 0, 0, 0, 0, 0.0) for each in devices)
    side.gateway.view = control.ClusterState([], EngineStatus("", shown, {}, {}))
    side.gateway.end()

    side.gateway.unlinked([NodeId("dead")])
    placed = [side.gateway.place(CallId(f"{n}@g1.boot"), F, 60.0) for n in range(3)]
    assert [each.device for each in placed if isinstance(each, Grant)] == ["alive/cpu:0"] * 3

    side.gateway.unlinked([NodeId("dead"), NodeId("alive")])
    assert isinstance(side.gateway.place(CallId("3@g1.boot"), F, 60.0), asyncio.Future)


async def test_a_call_is_explained_by_the_grant_that_it_ran_by(side: Side) -> None:
    grant = await side.keeps("first#@g1.boot")
    assert side.takes("second#@g1.boot") is grant

    assert side.gateway.kept.ran_by("second") == "first#@g1.boot"
    assert side.gateway.kept.ran_by("first") is None
