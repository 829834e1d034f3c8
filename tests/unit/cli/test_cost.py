"""``gpufaas cost``: what is asked of the gateway, and how the bill is shown."""

import json
from typing import Any

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import WireLog

BILL: list[dict[str, Any]] = [
    {"name": "f.a", "node_s": 3600.0, "cost": 0.25, "unpriced_s": 0.0},
    {"name": "(idle)", "node_s": 1800.0, "cost": 0.125, "unpriced_s": 900.0},
]


@pytest.fixture(autouse=True)
def _bill(wire: WireLog) -> None:
    wire.answer("GET", "/system/cost", BILL)


def test_the_bill_is_shown_with_its_sum_and_what_had_no_price(run: Run) -> None:
    result = run("cost", "--since", "2h", "--by", "function")

    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["Name", "Node", "hours", "Cost"],
        ["f.a", "1.000", "0.2500"],
        ["(idle)", "0.500", "0.1250"],
        ["total", "1.500", "0.3750"],
        ["0.250", "node", "hours", "are", "of", "offers", "without", "a", "price,", "and", "cost", "0"],
    ]


def test_the_bill_as_json_and_as_csv(run: Run) -> None:
    assert json.loads(run("cost", "--json").stdout) == BILL
    assert run("cost", "--csv").stdout.splitlines() == [
        "name,node_s,cost,unpriced_s", "f.a,3600.0,0.25,0.0", "(idle),1800.0,0.125,900.0",
    ]  # fmt: skip


@pytest.mark.parametrize("given", [("--since", "long"), ("--by", "colour")])
def test_what_cannot_be_asked_is_wrong_usage(run: Run, given: tuple[str, str]) -> None:
    assert run("cost", *given).exit_code == 2


def test_offers_are_shown_with_open_orders_and_the_last_failure(run: Run, wire: WireLog) -> None:
    offer = {"kind": "cpu-0.5", "memory": 2 << 30, "devices": 1, "price_per_h": 0.05, "delay_s": 2.0, "limit": 3}
    status = {"offers": [offer], "ordered": {"1-2": "cpu-0.5"}, "unmet": {"cpu-0.5": "sold out"}, "devices": []}
    wire.answer("GET", "/system/status", status)

    result = run("node", "offers")

    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split() == [
        "cpu-0.5", "1", "2.0", "GiB", "0.05", "2", "s", "3", "1", "sold", "out",
    ]  # fmt: skip
