"""When the planner plans, as a table of times and of what it sees then."""

from typing import Final

import pytest
from msgspec.structs import replace

from gpufaas_core.errors import BadPlan
from gpufaas_core.model import Device, DeviceId, Function, FunctionId, Need
from gpufaas_core.plans import Snapshot
from gpufaas_planner.planner import Planner

A, B = (Device(DeviceId(f"n{number}/cuda:0"), "gpu", 100) for number in (1, 2))
F, G = (Function(FunctionId(f"{name}.fn@1"), digest="") for name in "fg")
RATE: Final = {"f.fn": 10.0}
SEEN: Final = Snapshot((F,), (A,), RATE)


def at_rate(rate: float) -> Snapshot:
    return replace(SEEN, rates={"f.fn": rate})


class Looks:
    """A planner, and what it is shown at each look."""

    def __init__(self) -> None:
        self.seen = SEEN
        self.planner = Planner("s", lambda _now, _profiled: self.seen)

    def why(self, now: float, seen: Snapshot = SEEN) -> str:
        """Return why it plans now; empty: it does not."""
        self.seen = seen
        asked = self.planner.due(now, None)
        return "" if asked is None else asked.why


def planned(*looks: tuple[float, Snapshot]) -> list[tuple[float, str]]:
    """Return the times at which it plans, and why; each plan succeeds."""
    there, found = Looks(), []
    for now, seen in looks:
        if why := there.why(now, seen):
            there.planner.succeeded(1)
            found.append((now, why))
    return found[1:]  # the first plan is for what is there at the start


def test_nothing_that_changes_gives_no_reason() -> None:
    assert planned((0, SEEN), (1, SEEN), (1_000, SEEN)) == []


@pytest.mark.parametrize("empty", [Snapshot(), Snapshot((F,)), Snapshot((), (A,))])
def test_without_functions_or_devices_there_is_nothing_to_plan(empty: Snapshot) -> None:
    assert Looks().why(0, empty) == ""


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ((A, B), "devices: n2/cuda:0 came"),
        ((B,), "devices: n2/cuda:0 came, and 1 more"),
        ((replace(A, compute=50),), "devices: n1/cuda:0 has changed"),
    ],
)
def test_a_change_of_the_fleet_is_planned_at_once(devices: tuple[Device, ...], why: str) -> None:
    assert planned((0, SEEN), (1, replace(SEEN, devices=devices))) == [(1, why)]


def test_the_order_of_devices_is_no_change() -> None:
    assert planned((0, replace(SEEN, devices=(A, B))), (100, replace(SEEN, devices=(B, A)))) == []


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        ((F, G), "functions: g.fn came"),
        ((G,), "functions: g.fn came, and 1 more"),
        ((replace(F, id=FunctionId("f.fn@2")),), "functions: f.fn has changed"),
        ((replace(F, need=Need(slots=2)),), "functions: f.fn has changed"),
    ],
)
def test_a_change_of_functions_is_planned_within_a_minute(functions: tuple[Function, ...], why: str) -> None:
    new = replace(SEEN, functions=functions)
    assert planned((0, SEEN), (1, new), (59, new), (60, new), (61, new), (120, new)) == [(60, why)]


@pytest.mark.parametrize(
    ("rates", "plans"),
    [
        ([(60, 11.9)], []),
        ([(60, 12.1)], [60]),
        ([(60, 7.9)], [60]),
        ([(30, 12.1), (60, 12.1)], [60]),
        ([(30, 12.1), (50, 11.5), (60, 11.5)], [60]),  # it has drifted, and has not come back within 10 %
        ([(30, 12.1), (50, 10.9), (60, 11.5)], []),  # it came back
        ([(60, 12.1), (120, 10.1), (180, 12.1), (240, 10.1)], [60]),  # 12.1 counts from the first plan on
        ([(60, 20.0), (90, 40.0), (119, 40.0), (120, 40.0), (121, 80.0)], [60, 120]),
        ([(60, 0.0), (120, 0.001)], [60]),  # a single call is no drift
    ],
)
def test_a_drift_of_a_rate_is_planned_once_a_minute_at_most(
    rates: list[tuple[float, float]], plans: list[float]
) -> None:
    assert [at for at, _ in planned((0, SEEN), *((at, at_rate(rate)) for at, rate in rates))] == plans


def test_a_drift_says_whose_calls_and_by_how_much() -> None:
    assert planned((0, SEEN), (60, at_rate(25.0))) == [(60, "calls of f.fn: 25 per second, 10 before")]


def test_on_demand_it_plans_at_once_and_once() -> None:
    there = Looks()
    there.why(0)
    there.planner.succeeded(1)
    there.planner.ask("alice asked")

    assert there.why(1) == "alice asked"
    there.planner.succeeded(2)
    assert there.why(2) == ""


def test_what_changes_while_a_plan_is_made_leads_to_the_next_one() -> None:
    there = Looks()
    there.why(0)
    there.planner.ask("alice asked")
    there.planner.succeeded(1)

    assert there.why(30) == "alice asked"
    there.planner.succeeded(2)
    assert there.why(31, replace(SEEN, devices=(A, B))) == "devices: n2/cuda:0 came"


def test_after_failures_it_tries_again_after_ever_longer_times() -> None:
    there, now, waits = Looks(), 0.0, []
    there.why(now)
    for _ in range(8):
        there.planner.failed(BadPlan("no"), now)
        retry_at = now + there.planner.status(now)["retry_in_s"]
        assert there.why(retry_at - 0.1, at_rate(100.0)) == ""
        assert there.why(retry_at) == "devices: n1/cuda:0 came"
        waits.append(retry_at - now)
        now = retry_at

    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
    assert there.planner.status(now)["failing_for_s"] == now
    there.planner.failed(BadPlan("no"), now)
    assert there.why(now + 1, replace(SEEN, devices=(A, B))) == "devices: n2/cuda:0 came"
    there.planner.succeeded(1)
    assert there.why(now + 400, replace(SEEN, devices=(A, B))) == ""
