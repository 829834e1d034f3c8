"""Where the latency of calls went, and how many were answered in their goal."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from msgspec.structs import astuple
from tests.examples import examples

from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.record import Record
from gpufaas_simulator.report import Report, answered, segments
from gpufaas_simulator.run import engine_header, simulate


def simulated(given: dict[str, Any], policy: str = "lb") -> tuple[Record, Report]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "w.json")
        path.write_text(json.dumps(given))
        return simulate(read_workload(path), engine_header(policy))


def rows(record: Record) -> list[list[float]]:
    """The parts of each answered call: queue, hold, load, run, slowed."""
    return [[round(part, 6) for part in each] for each in segments(record).T.tolist()]


def function(**more: Any) -> dict[str, Any]:
    return {"occupation_mb": 100, "load_s": 3, "infer_s": 2, **more}


def cluster(functions: dict[str, Any], arrivals: list[list[Any]], devices: int = 1, **more: Any) -> dict[str, Any]:
    on = [{"id": f"n{at}/0", "memory_mb": 1000} for at in range(devices)]
    return {"devices": on, "functions": functions, "arrivals": arrivals, **more}


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Functions of all sorts of sharing, with and without batches, holds, delays and neighbours that disturb."""
    functions = {}
    for name in "fgh"[: draw(st.integers(1, 3))]:
        sharing = draw(st.sampled_from(["exclusive", "spatial", "share", "time"]))
        one = function(
            sharing=sharing, latency_goal_s=draw(st.sampled_from([2.5, 5, 50])), beside={"*": 1.2},
            near=draw(st.sampled_from([0, 0.002])), power=draw(st.sampled_from([1, 1.5])),
            start_s=draw(st.sampled_from([0, 0.25])), uses=draw(st.sampled_from([30, 80])),
        )  # fmt: skip
        if sharing in ("spatial", "share"):
            one["compute"] = draw(st.sampled_from([20, 50]))
        if sharing != "time":
            one["slots"] = draw(st.integers(1, 3))
        if sharing != "share":
            one |= {"batch_max": draw(st.integers(1, 4)), "batch": {"4": 3}}
            one["batch_wait_s"] = draw(st.sampled_from([0, 0.3, 2]))
        functions[name] = one
    times = sorted(draw(st.lists(st.sampled_from([0, 0, 0.2, 1, 3, 3.1, 7, 20, 21]), min_size=1, max_size=14)))
    arrivals = [[at, draw(st.sampled_from(sorted(functions)))] for at in times]
    changes = [{"t": 4, "event": "host_load", "node": "n0", "compute": 40}]
    changes += [{"t": 9, "event": "kind_leaves", "kind": "*", "down_s": 2}] * draw(st.booleans())
    return cluster(functions, arrivals, draw(st.integers(1, 2)), changes=changes)


@drawn(clusters(), st.sampled_from(["lb", "lalb-o3", "least-wait"]))
@examples(60)
def test_the_parts_of_each_latency_add_up_to_it(given: dict[str, Any], policy: str) -> None:
    record, found = simulated(given, policy)

    parts = segments(record)
    assert parts.sum(axis=0) == pytest.approx(answered(record))
    assert parts.min(initial=0.0) >= -1e-9, "no part is negative"
    assert sum(each.calls for each in found.functions.values()) == len(record.outcome)
    if found.segments is not None:
        assert sum(astuple(found.segments)) == pytest.approx(found.latency.mean)


def test_a_miss_queues_loads_and_runs() -> None:
    record, _ = simulated(cluster({"f": function(), "g": function()}, [[0, "f"], [1, "g"]]))

    assert rows(record) == [[0, 0, 3, 2, 0], [4, 0, 3, 2, 0]]


def test_a_call_that_comes_while_its_copy_loads_waits_for_the_load() -> None:
    spatial = function(sharing="spatial", compute=10, slots=2)

    record, _ = simulated(cluster({"f": spatial}, [[0, "f"], [1, "f"], [2, "f"]]))

    assert rows(record) == [[0, 0, 3, 2, 0], [0, 0, 2, 2, 0], [2, 0, 1, 2, 0]]


def test_a_call_that_is_held_back_says_for_how_long() -> None:
    batched = function(batch_max=4, batch={"4": 3}, batch_wait_s=0.5)

    record, _ = simulated(cluster({"f": batched}, [[0, "f"], [10, "f"], [10.25, "f"]]))

    run_s = round(2 + 1 / 3, 6)
    assert rows(record) == [[0, 0, 3, 2, 0], [0, 0.5, 0, run_s, 0], [0, 0.25, 0, run_s, 0]]


def test_neighbours_and_the_work_of_the_host_slow_a_call() -> None:
    spatial = function(load_s=0, sharing="spatial", compute=50)
    busy = {"t": 3, "event": "host_load", "node": "n0", "compute": 75}

    record, _ = simulated(cluster({"f": spatial | {"uses": 100}, "g": spatial}, [[0, "f"], [0, "g"], [10, "g"]],
                                  changes=[busy]))  # fmt: skip

    assert rows(record) == [[0, 0, 0, 2, 1], [0, 0, 0, 2, 1], [0, 0, 0, 2, 2]]


def test_a_call_that_no_device_can_take_queues() -> None:
    """The device fails in the load of the first call, and comes back for the second one."""
    given = cluster({"f": function()}, [[0, "f"], [1, "f"]], changes=[
        {"t": 2, "event": "kind_leaves", "kind": "gpu", "down_s": 2},
    ])  # fmt: skip

    record, found = simulated(given)

    assert (found.failed, rows(record)) == (1, [[3, 0, 3, 2, 0]])


def test_goodput_is_what_is_answered_in_its_goal_by_function_too() -> None:
    functions = {"f": function(latency_goal_s=5.5), "g": function(load_s=0)}

    _, found = simulated(cluster(functions, [[0, "f"], [1, "f"], [1, "g"]]))

    assert (found.in_goal, found.goodput) == (0.5, pytest.approx(2 / found.duration_s))
    assert {name: (each.calls, each.in_goal) for name, each in found.functions.items()} == {
        "f": (2, 0.5),
        "g": (1, None),
    }
    assert found.functions["f"].goodput == pytest.approx(1 / found.duration_s)


def test_without_goals_there_is_no_goodput() -> None:
    _, found = simulated(cluster({"f": function()}, [[0, "f"]]))

    assert (found.in_goal, found.goodput) == (None, None)
