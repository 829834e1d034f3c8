"""What was paid, by function, namespace and offer: node-seconds divided by device-seconds, idle time apart."""

import pytest
from msgspec.structs import replace

from gpufaas_core.model import NodeId, OrderId
from gpufaas_core.orders import Stay
from gpufaas_providers.bill import IDLE, By, bill

STAY = Stay(
    OrderId("1-1"), "big", asked_at=90.0, devices=2, price_per_h=36.0, node=NodeId("n"), since=100.0, joined_at=110.0,
    until=200.0, busy_s=50.0, used_s={"f.a": 30.0, "g.a": 10.0, "f.b": 40.0},
)  # fmt: skip
"""100 s for 1.0; a quarter of its 200 device-seconds was busy."""


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("offer", {"big": (100.0, 1.0)}),
        ("function", {IDLE: (75.0, 0.75), "f.b": (12.5, 0.125), "f.a": (9.375, 0.09375), "g.a": (3.125, 0.03125)}),
        ("namespace", {IDLE: (75.0, 0.75), "a": (12.5, 0.125), "b": (12.5, 0.125)}),
    ],
)
def test_what_was_paid_is_divided(by: By, expected: dict[str, tuple[float, float]]) -> None:
    found = bill([STAY], 0.0, 1000.0, by)

    assert [each.name for each in found] == list(expected)
    for each in found:
        assert (each.node_s, each.cost) == pytest.approx(expected[each.name])
        assert each.unpriced_s == 0.0


def test_a_node_that_is_there_is_paid_until_now_and_only_what_lies_in_the_time_asked_for_counts() -> None:
    there = replace(STAY, until=0.0)

    assert [(each.node_s, each.cost) for each in bill([there], 0.0, 150.0, "offer")] == [(50.0, 0.5)]
    assert [each.node_s for each in bill([there], 140.0, 150.0, "offer")] == [10.0]
    assert bill([STAY], 200.0, 300.0, "offer") == []


def test_an_offer_without_a_price_costs_nothing_and_the_bill_says_so() -> None:
    (free,) = bill([replace(STAY, price_per_h=None)], 0.0, 1000.0, "offer")

    assert (free.cost, free.node_s, free.unpriced_s) == (0.0, 100.0, 100.0)


def test_an_order_that_failed_before_a_node_was_started_is_not_paid() -> None:
    failed = Stay(OrderId("1-2"), "big", 90.0, price_per_h=36.0, since=0.0, until=95.0, why="sold out")

    assert bill([failed], 0.0, 1000.0, "offer") == []


def test_a_node_that_nobody_used_is_idle() -> None:
    (idle,) = bill([replace(STAY, busy_s=0.0, used_s={})], 0.0, 1000.0, "function")

    assert (idle.name, idle.cost) == (IDLE, 1.0)
