"""Orders of an engine, carried out: noted, started, joined, given back; and what a broker finds after one that died."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from tests.unit.providers.fakes import Clock, FakeLedger, FakeProvider
from tests.waiting import eventually

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, FunctionId, NodeId, OrderId
from gpufaas_core.orders import NodeOffer
from gpufaas_providers.bill import bill
from gpufaas_providers.broker import KEPT_S, Broker

ONE, TWO = OrderId("1-1"), OrderId("1-2")
N1 = NodeId("node-1-1")
OFFERS = (NodeOffer("big", 100, devices=2, price_per_h=3.6, start_s=5.0, limit=2), NodeOffer("free", 100))


class Died(BaseException):
    """The leader was killed."""


class Site:
    """A provider and a ledger, and the brokers of one term after the other."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.dies_at = -1
        """The number of the step, counted from 0, at which the leader is killed."""
        self.steps: list[str] = []
        self.dead = asyncio.Event()
        self.provider = FakeProvider(self.clock, self._step)
        self.ledger = FakeLedger(self._step)
        self.told: list[m.Event] = []
        self.busy: dict[NodeId, float] = {}
        self.broker: Broker

    def _step(self, what: str) -> None:
        if len(self.steps) == self.dies_at:
            self.dies_at = -1
            self.dead.set()
        if self.dead.is_set():
            raise Died
        self.steps.append(what)

    @asynccontextmanager
    async def term(self, look_s: float = 0.005, answer_s: float = 60.0) -> AsyncIterator[m.Offered]:
        """Yield what the engine is told at the start."""
        self.dead.clear()
        self.told.clear()
        self.broker = Broker(
            "fake", self.provider, OFFERS, self.ledger, self.told.append, busy=lambda: self.busy, clock=self.clock,
            answer_s=answer_s, join_s=60.0, look_s=look_s,
        )  # fmt: skip
        offered = await self.broker.begin()
        running = asyncio.create_task(self.broker.run())
        try:
            yield offered
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, BaseExceptionGroup):
                await running

    def order(self, order: OrderId, kind: str = "big") -> None:
        self.broker.execute(m.ProcureNodes(kind, order))

    def failed(self) -> list[m.Event]:
        return [each for each in self.told if isinstance(each, m.OrderFailed)]

    async def started(self, order: OrderId) -> None:
        await eventually(lambda: order in self.ledger.kept and bool(self.ledger.kept[order].node))


@pytest.fixture
async def site() -> Site:
    return Site()


async def test_a_node_is_ordered_noted_joins_and_is_given_back(site: Site) -> None:
    async with site.term() as offered:
        assert [(each.kind, each.limit, each.price_per_h) for each in offered.offers] == [
            ("big", 2, 3.6),
            ("free", 1, 0),
        ]
        assert offered.ordered == ()
        site.order(ONE)
        await site.started(ONE)
        site.clock.now += 7
        site.broker.joined(ONE, N1)
        await eventually(lambda: site.ledger.kept[ONE].joined_at == 1007.0)
        site.clock.now += 93
        site.broker.execute(m.ReleaseNode(N1))
        await eventually(lambda: site.ledger.kept[ONE].until == 1100.0)

    assert site.provider.there == []
    assert site.failed() == []
    assert isinstance(site.told[-1], m.Offered)
    assert site.told[-1].offers[0].limit == 2, "another one can be ordered"
    assert site.ledger.kept[ONE].since == 1000.0


@pytest.mark.parametrize(
    ("fails", "hangs", "why"),
    [
        (RuntimeError("sold out"), False, "provider fake: sold out"),
        (None, True, "provider fake gave no answer in 0.01 s"),
    ],
)
async def test_an_order_of_a_provider_that_fails_or_hangs_has_failed(
    site: Site, fails: Exception | None, hangs: bool, why: str
) -> None:
    site.provider.fails, site.provider.hangs = fails, hangs
    async with site.term(answer_s=0.01):
        site.order(ONE)
        await eventually(lambda: bool(site.failed()))

    assert site.failed() == [m.OrderFailed(ONE, why)]
    assert (site.ledger.kept[ONE].until, site.ledger.kept[ONE].why) == (1000.0, why)


async def test_a_node_that_never_joins_is_stopped_and_its_order_has_failed(site: Site) -> None:
    async with site.term():
        site.order(ONE)
        await site.started(ONE)
        site.clock.now += 64
        looks = len(site.steps)
        await eventually(lambda: site.steps[looks:].count("listed") > 1)
        assert site.failed() == [], "it has 5 s to start and 60 s to join"
        site.clock.now += 2
        await eventually(lambda: bool(site.failed()))

    assert site.failed() == [m.OrderFailed(ONE, "node node-1-1 did not join within 65 s")]
    assert site.provider.there == []


async def test_a_node_that_ends_before_it_joins_fails_its_order_and_is_paid_until_then(site: Site) -> None:
    async with site.term():
        site.order(ONE)
        await site.started(ONE)
        site.clock.now += 5
        await site.provider.stop(N1)
        site.clock.now += 5
        await eventually(lambda: bool(site.failed()))

    assert site.failed() == [m.OrderFailed(ONE, "node node-1-1 ended before it joined")]
    assert site.ledger.kept[ONE].until == 1005.0


async def test_a_node_that_had_joined_and_ends_closes_its_stay_and_fails_no_order(site: Site) -> None:
    async with site.term():
        site.order(ONE)
        await site.started(ONE)
        site.broker.joined(ONE, N1)
        site.clock.now += 5
        await site.provider.stop(N1)
        await eventually(lambda: bool(site.ledger.kept[ONE].until))

    assert site.failed() == []
    assert site.ledger.kept[ONE].why == ""


async def test_a_node_that_is_started_after_its_order_has_failed_is_given_back(site: Site) -> None:
    site.provider.hangs = True
    async with site.term(answer_s=0.01):
        site.order(ONE)
        await eventually(lambda: bool(site.failed()))
        site.provider.hangs = False
        await site.provider.start(ONE, OFFERS[0])
        await eventually(lambda: site.provider.there == [])


async def test_an_order_that_cannot_be_noted_starts_nothing(site: Site) -> None:
    site.ledger.away = True
    async with site.term(look_s=60.0):
        site.order(ONE)
        await eventually(lambda: site.broker._busy == set())
        assert site.provider.log == {}
        assert site.failed() == [], "it is tried again when the ledger is back"

    site.ledger.away = False


async def test_a_node_that_was_not_ordered_is_taken_back_by_nobody(site: Site) -> None:
    async with site.term():
        site.broker.execute(m.ReleaseNode(NodeId("mine")))
        await eventually(lambda: site.steps.count("listed") > 1)

    assert "stop" not in site.steps


async def test_use_is_noted_by_function(site: Site) -> None:
    async with site.term():
        site.order(ONE)
        await site.started(ONE)
        site.broker.joined(ONE, N1)
        site.broker.finished(DeviceId("node-1-1/cpu:0"), FunctionId("f.ns@1"), 2.0)
        site.broker.finished(DeviceId("node-1-1/cpu:0"), FunctionId("f.ns@2"), 1.0)
        site.broker.finished(DeviceId("elsewhere/cpu:0"), FunctionId("g.ns@1"), 9.0)
        site.busy[N1] = 2.5
        await eventually(lambda: site.ledger.kept[ONE].used_s == {"f.ns": 3.0})

    assert site.ledger.kept[ONE].busy_s == 2.5


async def test_stays_that_have_ended_long_ago_are_forgotten(site: Site) -> None:
    async with site.term():
        site.order(ONE)
        await site.started(ONE)
        await site.provider.stop(N1)
        await eventually(lambda: bool(site.ledger.kept[ONE].until))
    site.clock.now += KEPT_S + 1
    async with site.term():
        pass

    assert site.ledger.kept == {}


class Wish:
    """A node that joins, serves 100 s, and is given back: as an engine has it, through any number of terms."""

    def __init__(self, site: Site) -> None:
        self.site, self.served, self.orders = site, False, 0

    async def fulfil(self) -> None:
        over = False
        while not over:
            async with self.site.term() as offered:
                over = await self._term(offered)

    async def _term(self, offered: m.Offered) -> bool:
        """Return whether it is over; False: the leader was killed."""
        site, broker, kept = self.site, self.site.broker, self.site.ledger.kept
        if not self.served and not offered.ordered and not broker.open:
            self.orders += 1
            site.order(OrderId(f"1-{self.orders}"))
        if any(not each.releasing for each in broker.open.values()):
            if await self._dies_before(lambda: all(each.node for each in broker.open.values())):
                return False
            (stay,) = broker.open.values()
            broker.joined(stay.order, stay.node)
            if await self._dies_before(lambda: kept[stay.order].joined_at):
                return False
            site.clock.now += 0.0 if self.served else 100.0
            self.served = True
            broker.execute(m.ReleaseNode(stay.node))
        if await self._dies_before(lambda: not broker.open):
            return False
        looks = site.steps.count("listed")
        return not await self._dies_before(lambda: site.steps.count("listed") > looks + 1)

    async def _dies_before(self, claim: Callable[[], object]) -> bool:
        await eventually(lambda: self.site.dead.is_set() or claim())
        return self.site.dead.is_set()


async def test_a_leader_that_is_killed_at_any_step_loses_no_node_and_doubles_none_and_the_bill_is_right() -> None:
    whole = Site()
    await Wish(whole).fulfil()
    assert len(whole.provider.log) == 1
    for at in range(whole.steps.index("stopped") + 4):
        site = Site()
        site.dies_at = at

        await Wish(site).fulfil()

        assert site.dies_at == -1, f"it was not killed at step {at}"
        assert site.provider.there == [], f"a node is left over: killed at step {at}"
        assert len(site.provider.log) == 1, f"killed at step {at}"
        (paid,) = bill(site.ledger.kept.values(), 0.0, site.clock.now, "offer")
        (held,) = site.provider.log.values()
        assert paid.node_s == pytest.approx(held.until - held.since, abs=1.0), f"killed at step {at}"
        assert paid.cost == pytest.approx(0.1)


async def test_a_broker_that_has_not_read_its_ledger_yet_gives_nothing_back(site: Site) -> None:
    async with site.term():
        site.order(ONE)
        await site.started(ONE)
    broker = Broker("fake", site.provider, OFFERS, site.ledger, site.told.append, clock=site.clock, look_s=0.005)
    running = asyncio.create_task(broker.run())
    looks = site.steps.count("listed")
    for _ in range(20):
        await asyncio.sleep(0)
    assert site.steps.count("listed") == looks

    await broker.begin()
    await eventually(lambda: site.steps.count("listed") > looks + 1)

    assert site.provider.there == [ONE]
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
