"""Plans in simulations: those that come at a stated time, and those of a solver."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.solvers import install_solvers

from gpufaas_core.errors import BadPlan
from gpufaas_simulator.entries import workload_json
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.timeline import Done, LoadBegun, Started

Run = Callable[..., Result]
Write = Callable[[Any], Path]


@pytest.fixture
def solvers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "solvers").mkdir()
    install_solvers(tmp_path / "solvers", monkeypatch)


@pytest.fixture
def calm() -> dict[str, Any]:
    """A function that fits both devices, and a call a second for a minute."""
    return {
        "devices": [{"id": "g0", "memory_mb": 8000}, {"id": "g1", "memory_mb": 8000}],
        "functions": {"f": {"occupation_mb": 1000, "load_s": 2, "infer_s": 0.25}},
        "arrivals": [[second, "f"] for second in range(60)],
    }


def where(path: Path) -> dict[float, str]:
    """Return the device of each start, by its time."""
    found: dict[float, str] = {}

    def note(done: Done) -> None:
        if isinstance(done, Started):
            found[done.t] = done.device

    simulate(read_workload(path), engine_header("lalb"), observers=[note])
    return found


def test_a_plan_that_comes_late_moves_a_function_without_a_miss(written: Write, calm: dict[str, Any]) -> None:
    calm["changes"] = [
        {"t": 20.5, "event": "plan", "replicas": [{"function": "f", "device": "g1"}]},
        {"t": 40.5, "event": "plan", "replicas": []},
    ]
    loads: list[float] = []
    workload = read_workload(written(calm))

    _, report = simulate(
        workload,
        engine_header("lalb"),
        observers=[lambda done: loads.append(done.t) if isinstance(done, LoadBegun) else None],
    )
    starts = where(written(calm))

    assert loads == [20.5]
    assert {device for at, device in starts.items() if at < 20} == {"g0"}
    assert {device for at, device in starts.items() if at > 24} == {"g1"}
    assert report.completed == 60


@pytest.mark.usefixtures("solvers")
def test_the_answer_of_a_solver_is_in_force_after_its_time(written: Write, calm: dict[str, Any]) -> None:
    """`gathers` plans all functions on the last device."""
    calm["planner"] = {"solver": "gathers", "solve_s": 10}

    starts = where(written(calm))

    assert {device for at, device in starts.items() if at < 10} == {"g0"}
    assert {device for at, device in starts.items() if at > 14} == {"g1"}


@pytest.mark.usefixtures("solvers")
def test_a_device_that_joins_is_planned_at_once(written: Write, calm: dict[str, Any]) -> None:
    calm["planner"] = {"solver": "gathers"}
    calm["changes"] = [{"t": 30, "event": "device_joins", "device": {"id": "g2", "memory_mb": 8000}}]

    starts = where(written(calm))

    assert {device for at, device in starts.items() if 10 < at < 30} == {"g1"}
    assert {device for at, device in starts.items() if at > 35} == {"g2"}


@pytest.mark.usefixtures("solvers")
def test_a_plan_that_comes_while_a_solver_works_wins_and_the_solver_is_asked_again(
    written: Write, calm: dict[str, Any]
) -> None:
    calm["planner"] = {"solver": "spread", "solve_s": 10}
    calm["changes"] = [{"t": 5, "event": "plan", "replicas": [{"function": "f", "device": "g1", "pinned": True}]}]

    starts = where(written(calm))

    assert {device for at, device in starts.items() if at > 9} == {"g1"}


@pytest.mark.usefixtures("solvers")
def test_a_solver_that_breaks_a_pin_ends_the_simulation(written: Write, calm: dict[str, Any]) -> None:
    calm["planner"] = {"solver": "gathers"}
    calm["changes"] = [
        {"t": 5, "event": "plan", "replicas": [{"function": "f", "device": "g0", "pinned": True}]},
        {"t": 6, "event": "device_joins", "device": {"id": "g2", "memory_mb": 8000}},
    ]

    with pytest.raises(BadPlan, match="changes what is pinned: f on g0"):
        simulate(read_workload(written(calm)))


@pytest.mark.usefixtures("solvers")
def test_a_pin_on_a_device_that_has_gone_stops_no_plan(written: Write, calm: dict[str, Any]) -> None:
    calm["functions"]["g"] = calm["functions"]["f"]
    calm["arrivals"] = [[second, "fg"[second % 2]] for second in range(60)]
    calm["planner"] = {"solver": "spread"}
    calm["changes"] = [
        {"t": 5, "event": "plan", "replicas": [{"function": "f", "device": "g0", "pinned": True}]},
        {"t": 10, "event": "device_leaves", "device": "g0"},
        {"t": 20, "event": "device_joins", "device": {"id": "g2", "memory_mb": 8000}},
    ]

    _, report = simulate(read_workload(written(calm)), engine_header("lalb"))

    assert report.completed >= 59


@pytest.mark.usefixtures("solvers")
def test_calls_that_are_never_served_end_a_simulation_with_a_planner(written: Write, calm: dict[str, Any]) -> None:
    calm["planner"] = {"solver": "spread"}
    calm["changes"] = [{"t": 5, "event": "device_leaves", "device": each} for each in ("g0", "g1")]

    _, report = simulate(read_workload(written(calm)))

    assert report.completed < 60


@pytest.mark.usefixtures("solvers")
def test_plans_and_planner_are_written_as_they_were_read(written: Write, calm: dict[str, Any]) -> None:
    calm["planner"] = {"solver": "gathers", "solve_s": 10.0}
    calm["changes"] = [
        {"t": 5.0, "event": "plan", "replicas": [{"function": "f", "device": "g0", "slots": 1, "pinned": True}]}
    ]

    again = json.loads(workload_json(read_workload(written(calm))))

    assert (again["planner"], again["changes"]) == (calm["planner"], calm["changes"])


@pytest.mark.usefixtures("solvers")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"planner": {"solver": "gathers", "limit": 1}}, "unknown key 'limit' in planner"),
        ({"changes": [{"t": 1, "event": "plan"}]}, "replicas is missing in changes[0]: write a list"),
        (
            {"changes": [{"t": 1, "event": "plan", "replicas": [{"function": "f", "device": "g0", "shares": 1}]}]},
            "unknown key 'shares' in changes[0].replicas[0]",
        ),
        (
            {"changes": [{"t": 1, "event": "plan", "replicas": [{"function": "g", "device": "g0"}]}]},
            "replica 1, g on g0: there is no such function",
        ),
        (
            {
                "changes": [
                    {"t": 1, "event": "device_leaves", "device": "g0"},
                    {"t": 2, "event": "plan", "replicas": [{"function": "f", "device": "g0"}]},
                ]
            },
            "replica 1, f on g0: there is no such device: there are g1",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_place(
    run: Run, written: Write, calm: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    path = written({**calm, **more})

    result = run("simulate", "--workload", path)

    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"gpufaas: {path}:")
    assert said in line


@pytest.mark.usefixtures("solvers")
def test_an_unknown_solver_is_refused(run: Run, written: Write, calm: dict[str, Any]) -> None:
    result = run("simulate", "--workload", written({**calm, "planner": {"solver": "gather"}}))

    assert result.exit_code == 1
    assert result.stderr.startswith("gpufaas: no solver is called 'gather': choose one of babbles")
