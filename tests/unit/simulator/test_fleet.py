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
from gpufaas_simulator.record import COMPLETED, FAILED
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


# --- fleets that change -----------------------------------------------------------------------------------------------


def changed(given: dict[str, Any], *changes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**given, "changes": [{"t": t, **each} for each in changes for t in [each.pop("t")]], **more}


def test_a_node_that_was_procured_can_be_killed_and_does_nothing_if_it_is_not_there(
    given: dict[str, Any], written: Write
) -> None:
    gone = {"t": 8, "event": "node_leaves", "node": "big-1"}
    never = {"t": 9, "event": "node_leaves", "node": "big-7"}

    simulation, found = rented(written(changed(given, gone, never)), back_at=1000)

    assert list(simulation.record.outcome) == [COMPLETED, FAILED, FAILED, COMPLETED]
    assert found.fleet is not None
    assert [(each.node, each.left_s) for each in found.fleet.nodes] == [("a", None), ("big-1", 8.0)]
    assert found.fleet.nodes[1].cost == pytest.approx(360 * 8 / 3600)


def test_one_device_of_a_node_that_was_procured_can_fail(given: dict[str, Any], written: Write) -> None:
    simulation, _ = rented(written(changed(given, {"t": 8, "event": "device_leaves", "device": "big-1/1"})), back_at=50)

    assert sorted(simulation.record.outcome) == [COMPLETED, COMPLETED, COMPLETED, FAILED]


def test_what_is_offered_changes_and_counts_for_orders_from_then_on(given: dict[str, Any], written: Write) -> None:
    given["offers"][0]["limit"] = 0
    given["arrivals"].insert(3, [20, "f"])
    given["arrivals"].insert(3, [20, "f"])
    change = {"t": 19, "event": "offer_changes", "kind": "big", "limit": 1, "price_per_h": 72, "delay_s": 1}

    simulation, found = rented(written(changed(given, change)), back_at=50)

    assert found.fleet is not None
    big = found.fleet.nodes[1]
    assert (big.asked_s, big.joined_s, big.left_s, big.cost) == (19.0, 20.0, 50.0, pytest.approx(72 * 31 / 3600))
    assert simulation.record.started[1] == 10.0, "nothing could be ordered before"


@pytest.mark.parametrize("kind", ["gpu", "*"])
def test_the_node_of_a_kind_that_is_in_use_fails_and_comes_back(
    kind: str, given: dict[str, Any], written: Write
) -> None:
    """Of b, which has two calls, and a, which has one."""
    given["devices"] = [{"id": each, "memory_mb": 1000} for each in ("a/0", "b/0", "b/1")]
    del given["nodes"], given["offers"]
    given["arrivals"].append([100, "f"])
    path = written(changed(given, {"t": 5, "event": "kind_leaves", "kind": kind, "down_s": 60}))

    simulation = Simulation(read_workload(path), Engine(policy=make_policy(PolicySpec("lb")), replacement=Lru()))
    record = simulation.run()

    assert [(device.id, state.joined_at, state.left_at) for device, state in record.devices] == [
        ("a/0", 0.0, None), ("b/0", 0.0, 5.0), ("b/1", 0.0, 5.0), ("b/0", 65.0, None), ("b/1", 65.0, None),
    ]  # fmt: skip
    assert sorted(record.outcome) == [COMPLETED] * 3 + [FAILED] * 2


def test_while_a_procured_node_is_down_no_other_one_of_its_kind_can_be_had(
    given: dict[str, Any], written: Write
) -> None:
    given["offers"][0] |= {"delay_s": 0}
    given["arrivals"] = [[0, "f"], [0, "f"], [20, "f"], [20, "f"], [20, "f"]]

    simulation, found = rented(
        written(changed(given, {"t": 5, "event": "kind_leaves", "kind": "big", "down_s": 20})), back_at=1000
    )

    assert list(simulation.record.outcome) == [COMPLETED, FAILED, COMPLETED, COMPLETED, COMPLETED]
    assert found.fleet is not None
    assert [(each.node, each.asked_s) for each in found.fleet.nodes] == [("a", 0.0), ("big-1", 0.0), ("big-2", 25.0)]
    assert list(simulation.record.started)[2:] == [20.0, 25.0, 25.0]


def test_a_kind_of_which_no_node_is_there_cannot_fail(given: dict[str, Any], written: Write) -> None:
    change = {"t": 1, "event": "kind_leaves", "kind": "big"}  # the node is still on its way

    simulation, found = rented(written(changed(given, change)), back_at=50)

    assert list(simulation.record.outcome) == [COMPLETED] * 4
    assert found.fleet is not None
    assert found.fleet.nodes[1].joined_s == 5.0


def test_what_else_runs_on_a_host_takes_a_share_of_the_compute(given: dict[str, Any], written: Write) -> None:
    """Half of it from 4 to 8, and a fifth of that of the node that comes."""
    loads = [(0, "big-1", 20), (4, "a", 50), (8, "a", 0)]
    events = [{"t": t, "event": "host_load", "node": node, "compute": taken} for t, node, taken in loads]

    simulation, _ = rented(written(changed(given, *events)), back_at=50)

    assert list(simulation.record.ended) == pytest.approx([12.0, 5 + 10 / 0.8, 5 + 10 / 0.8, 110.0])
