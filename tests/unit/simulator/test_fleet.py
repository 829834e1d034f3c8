"""A fleet that a policy changes: nodes that are procured and released, their delay and their price."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufaas_cache_manager.replacement import Lru
from gpufaas_scheduler.contract import Plan, Procure, Release, Wake
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import PolicySpec, make_policy
from gpufaas_scheduler.policy_contract import ARRIVAL, FLEET, WAKE
from gpufaas_scheduler.view_contract import View
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.fleet import Fleet
from gpufaas_simulator.report import FleetReport, Report, report
from gpufaas_simulator.simulation import Simulation
from gpufaas_simulator.workload import NodeOffer

Write = Callable[[Any], Path]


class Renting:
    """LB, which orders a node when a call waits that no device takes, and gives it back at a set time."""

    name = "renting"
    pass_limit = 0
    watches = ARRIVAL | WAKE | FLEET

    def __init__(self, back_at: float) -> None:
        self.lb = make_policy(PolicySpec("lb"))
        self.back_at = back_at
        self.refused: list[str] = []
        self.prices: dict[str, float] = {}

    def plan(self, view: View) -> Plan:
        self.prices.update((each.id, each.device.price_per_h) for each in view.devices())
        yield from self.lb.plan(view)
        for action in self.wishes(view):
            refusal = yield action
            if refusal is not None:
                self.refused.append(refusal.reason)

    def wishes(self, view: View) -> Iterator[Procure | Release | Wake]:
        if len(view.queue) and not view.ordered and any(each.limit for each in view.offers.values()):
            yield Procure("big")
            yield Wake(self.back_at, "back")
        if "back" in view.woken:
            yield Release("big-1")  # type: ignore[arg-type]


def rented(path: Path, back_at: float) -> tuple[Simulation, Report]:
    policy = Renting(back_at)
    engine = Engine(policy=policy, replacement=Lru(), learn=False)
    simulation = Simulation(read_workload(path), engine)
    record = simulation.run()
    assert policy.refused == []
    return simulation, report(record, "renting")


@pytest.fixture
def given() -> dict[str, Any]:
    """Three calls of 10 s at once; the one device takes the first of them."""
    return {
        "devices": [{"id": "a/0", "memory_mb": 1000}],
        "nodes": {"a": {"price_per_h": 36}},
        "offers": [
            {"kind": "big", "memory_mb": 9000, "devices": 2, "price_per_h": 360, "delay_s": 5, "limit": 1},
        ],
        "functions": {"f": {"occupation_mb": 500, "load_s": 0, "infer_s": 10}},
        "arrivals": [[0, "f"], [0, "f"], [0, "f"], [100, "f"]],
    }  # fmt: skip


def test_a_policy_sees_what_the_node_of_each_device_costs(given: dict[str, Any], written: Write) -> None:
    policy = Renting(back_at=50)
    engine = Engine(policy=policy, replacement=Lru(), learn=False)

    Simulation(read_workload(written(given)), engine).run()

    assert policy.prices == {"a/0": 36.0, "big-1/0": 360.0, "big-1/1": 360.0}


def test_a_procured_node_comes_after_its_delay_and_is_paid_from_the_order(
    given: dict[str, Any], written: Write
) -> None:
    simulation, found = rented(written(given), back_at=50)

    assert list(simulation.record.started) == [0.0, 5.0, 5.0, 100.0]
    assert [(each.id, each.calls) for each in found.devices] == [("a/0", 2), ("big-1/0", 1), ("big-1/1", 1)]
    assert found.fleet is not None
    owned, big = found.fleet.nodes
    assert (owned.node, owned.asked_s, owned.left_s, owned.cost) == ("a", 0.0, None, pytest.approx(36 * 110 / 3600))
    assert (big.node, big.kind, big.asked_s, big.joined_s, big.left_s) == ("big-1", "big", 0.0, 5.0, 50.0)
    assert big.cost == pytest.approx(360 * 50 / 3600)
    assert found.fleet.node_hours == {"gpu": pytest.approx(110 / 3600), "big": pytest.approx(50 / 3600)}
    assert found.fleet.cost == owned.cost + big.cost


def test_a_released_node_leaves_when_it_is_idle(given: dict[str, Any], written: Write) -> None:
    simulation, found = rented(written(given), back_at=12)

    assert list(simulation.record.ended) == [10.0, 15.0, 15.0, 110.0]
    assert found.fleet is not None
    assert found.fleet.nodes[1].left_s == 15.0


def test_nodes_that_come_too_late_for_all_calls_do_not_prolong_the_run(given: dict[str, Any], written: Write) -> None:
    given["offers"][0]["delay_s"] = 1000
    del given["nodes"]

    simulation, found = rented(written(given), back_at=2000)

    assert simulation.record.end_s == 110.0
    assert found.fleet == FleetReport(pytest.approx(11.0), {"big": pytest.approx(110 / 3600)}, found.fleet.nodes)  # type: ignore[arg-type, union-attr]
    assert found.fleet.nodes[0].joined_s is None


def test_without_prices_or_orders_there_is_no_fleet_to_report(given: dict[str, Any], written: Write) -> None:
    del given["nodes"], given["offers"]

    assert rented(written(given), back_at=50)[1].fleet is None


def test_a_limit_is_of_nodes_at_once() -> None:
    fleet = Fleet([NodeOffer("big", 1000, limit=2, delay_s=3)], {"own": 1.0})

    _, (first,) = fleet.procure("big", 0.0)
    fleet.procure("big", 1.0)

    assert [each.limit for each in fleet.offers()] == [0]
    assert fleet.left(first.node, 7.0)
    assert [each.limit for each in fleet.offers()] == [1]
    assert [(each.node, each.asked_s, each.left_s) for each in fleet.stays] == [("big-1", 0, 7.0), ("big-2", 1, None)]
