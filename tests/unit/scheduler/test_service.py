"""The scheduler's service answers each call of a grant, wherever its gateway is."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core.errors import DeadlineExceeded, GpufaasError
from gpufaas_core.messages import Arrived, Command, Event, Grant, NodeRefused, StartCall
from gpufaas_core.model import Asked, CallId, Device, DeviceId, Function, FunctionId, Part, Profile, Seconds
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.service import SchedulerService

DEVICE = Device(DeviceId("n/cpu:0"), "cpu", 100)
F = FunctionId("f")


class Batching:
    """An engine that starts calls in pairs: the second one to arrive starts both."""

    def __init__(self, cold: bool) -> None:
        self.cold = cold
        self.asked: list[Asked | None] = []
        self._waits: CallId | None = None

    def may_wake_before(self, _: Seconds) -> bool:
        return False

    def handle(self, event: Event, now: Seconds) -> Sequence[Command]:
        assert now >= 0
        if not isinstance(event, Arrived):
            return []
        self.asked.append(event.asked)
        if self._waits is None:
            self._waits = event.call
            return []
        calls, self._waits = (self._waits, event.call), None
        return [StartCall(Grant(1, 1, calls, F, "d", (Part(DEVICE.id, 10),), self.cold))]


class Node:
    def __init__(self) -> None:
        self.told: list[Command] = []

    def execute(self, command: Command) -> None:
        self.told.append(command)


def service(cold: bool) -> tuple[SchedulerService, Node, Batching]:
    engine: Any = Batching(cold)
    made, node = SchedulerService(engine), Node()
    made.join(node, [DEVICE])
    return made, node, engine


@pytest.mark.parametrize("cold", [True, False])
async def test_each_call_of_a_grant_gets_it_and_the_node_gets_it_once_on_a_miss(cold: bool) -> None:
    scheduler, node, engine = service(cold)

    first = scheduler.place(CallId("a"), F, 60.0, asked=Asked(0.5))
    second = scheduler.place(CallId("b"), F, 60.0)

    assert not isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert (second.call, second.calls) == ("b", ("b", "a"))
    assert ((await first).call, (await first).calls) == ("a", ("a", "b"))
    assert [each.grant.calls for each in node.told if isinstance(each, StartCall)] == [("a", "b")] * cold
    assert engine.asked == [Asked(0.5), None]


async def test_the_calls_of_a_grant_may_be_of_several_gateways() -> None:
    scheduler, _, _ = service(cold=True)
    answered: dict[str, list[tuple[CallId, Grant | GpufaasError]]] = {"g1": [], "g2": []}
    for name, answers in answered.items():
        scheduler.gateways[name] = lambda call, grant, to=answers: to.append((call, grant))  # type: ignore[misc]

    for call in ("1@g1", "2@g2"):
        scheduler.handle(Arrived(CallId(call), F))

    for name, call in (("g1", "1@g1"), ("g2", "2@g2")):
        ((got, grant),) = answered[name]
        assert isinstance(grant, Grant)
        assert (got, grant.call) == (call, call)


async def test_a_second_refusal_of_a_grant_does_not_take_the_next_one_from_its_gateway() -> None:
    scheduler = SchedulerService(Engine(policy=make_policy("lb"), replacement=Lru()))
    scheduler.join(Node(), [DEVICE])
    scheduler.deploy(Function(F, "d", profiles={"*": Profile(3.0, 1.0, 10)}))
    first = scheduler.place(CallId("a"), F, 60.0)
    assert isinstance(first, Grant)
    refusal = NodeRefused.of(first, "no")

    scheduler.report(refusal)
    scheduler.report(refusal)

    next_one = await asyncio.wait_for(scheduler.again(CallId("a")), LIMIT_S)
    assert next_one.number > first.number
    assert scheduler.engine.runs(CallId("a"))


async def test_a_call_that_waits_is_told_of_its_grant_before_its_future_has_it() -> None:
    scheduler, _, _ = service(cold=False)
    told: list[tuple[CallId, bool]] = []
    first = scheduler.place(CallId("a"), F, 1.0)
    assert isinstance(first, asyncio.Future)
    scheduler.on_grant(CallId("a"), lambda grant: told.append((grant.call, first.done())))

    scheduler.place(CallId("b"), F, 1.0)

    assert told == [("a", False)]
    assert first.result().call == "a"
    given_up = scheduler.place(CallId("c"), F, 1.0)
    assert isinstance(given_up, asyncio.Future)
    for call in ("c", "b"):  # one waits, the other has its grant
        scheduler.on_grant(CallId(call), lambda grant: told.append((grant.call, False)))
    scheduler.cancel(CallId("c"))
    scheduler.place(CallId("d"), F, 1.0)
    assert told == [("a", False)]
    assert not given_up.done()


async def test_each_call_that_waits_has_its_own_deadline() -> None:
    scheduler = SchedulerService(Engine(policy=make_policy("lb"), replacement=Lru()))
    scheduler.join(Node(), [DEVICE])
    scheduler.deploy(Function(F, "d", profiles={"*": Profile(0.1, 0.1, 10)}))
    assert isinstance(scheduler.place(CallId("runs"), F, 60.0), Grant)

    waiting = [scheduler.place(CallId(f"c{at}"), F, seconds) for at, seconds in enumerate((0.04, 0.02, 0.06))]

    for each in waiting:
        assert isinstance(each, asyncio.Future)
        with pytest.raises(DeadlineExceeded):
            await each
    late = scheduler.place(CallId("late"), F, 0.02)
    assert isinstance(late, asyncio.Future)
    with pytest.raises(DeadlineExceeded):
        await late
