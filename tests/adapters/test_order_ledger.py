"""What every `Ledger` of orders does: the fake that tests use, and etcd."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.providers.fakes import FakeLedger

from gpufaas_adapters.etcd.client import Etcd, EtcdSettings, created_at
from gpufaas_adapters.etcd.orders import EtcdLedger
from gpufaas_core.model import NodeId, OrderId
from gpufaas_core.orders import Stay
from gpufaas_providers.ports import Ledger

STAY = Stay(
    OrderId("7-1"), "cpu", 1000.25, 2, 0.05, NodeId("n"), 1001.0, 1002.0, True, 1003.0, "why", 4.0, {"f.ns": 2.5}
)


@pytest.fixture(params=["fake", "etcd"])
async def ledger(request: pytest.FixtureRequest, settings: EtcdSettings) -> AsyncIterator[Ledger]:
    if request.param == "etcd":
        async with Etcd(settings) as etcd:
            yield EtcdLedger(etcd)
    else:
        yield FakeLedger()


async def test_a_stay_comes_back_as_it_was_put_last(ledger: Ledger) -> None:
    assert await ledger.stays() == []
    assert await ledger.put(Stay(OrderId("7-1"), "cpu", 1000.25))
    assert await ledger.put(STAY)
    assert await ledger.put(Stay(OrderId("7-2"), "cpu", 1.0))

    assert sorted(await ledger.stays(), key=lambda each: each.order) == [STAY, Stay(OrderId("7-2"), "cpu", 1.0)]


async def test_what_is_forgotten_is_not_there_any_more(ledger: Ledger) -> None:
    await ledger.put(STAY)
    await ledger.forget(STAY.order)
    await ledger.forget(OrderId("9-9"))

    assert await ledger.stays() == []


async def test_a_scheduler_that_does_not_lead_writes_nothing(etcd: Etcd) -> None:
    ledger = EtcdLedger(etcd, created_at("v1/scheduler/leader", 12345))

    assert not await ledger.put(STAY)
    assert await ledger.stays() == []
