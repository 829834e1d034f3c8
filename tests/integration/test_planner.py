"""The planner on the real platform: solvers that are installed plan where copies are, and some of them fail."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.conftest import ECHO_MODEL, Platform, until
from tests.solvers import install_solvers

PLAN = "/system/plan"


def plan(platform: Platform) -> dict[str, Any]:
    found: dict[str, Any] = platform.http.get(PLAN).raise_for_status().json()
    return found


def test_a_solver_plans_at_a_change_and_on_demand_and_its_end_is_told(
    make_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_solvers(tmp_path_factory.mktemp("solvers"), monkeypatch)
    platform = make_platform("--device", "cpu:0=200MiB", "--device", "cpu:1=200MiB", "--planner", "gathers").start()
    path = platform.deploy("echo", ECHO_MODEL)

    until(lambda: plan(platform)["version"], "the planner plans when the first function comes")
    first = plan(platform)
    platform.http.post(f"{PLAN}/pin", json={"function": "echo", "device": "local/cpu:0"}).raise_for_status()
    made = platform.http.post(f"{PLAN}/make")

    assert (first["by"], first["why"]) == ("planner gathers", "devices: local/cpu:0 came, and 1 more")
    assert [(each["function"], each["device"]) for each in first["replicas"]] == [("echo.openfaas-fn", "local/cpu:1")]
    assert made.status_code == 400
    assert made.text.strip() == (
        "the planner made no plan: solver gathers changes what is pinned: echo.openfaas-fn on local/cpu:0"
    )
    now = plan(platform)
    assert (now["version"], now["by"], now["planner"]["failures"]) == (2, "admin", 1)
    assert platform.call(path, b"x").headers["x-gpufaas-device"] == "local/cpu:0"

    platform.http.post(f"{PLAN}/unpin", json={"function": "echo"}).raise_for_status()
    again = platform.http.post(f"{PLAN}/make").raise_for_status().json()

    assert (again["version"], again["by"], again["why"]) == (4, "planner gathers", "admin asked")
    assert set(plan(platform)["planner"]) == {"solver", "why", "version"}


def test_a_solver_that_is_not_there_is_refused_at_the_start(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=200MiB", "--planner", "gathers")
    platform.launch()

    assert platform.wait() == 2
    assert "no solver is called 'gathers': none is installed" in platform.said()
