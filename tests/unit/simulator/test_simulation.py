"""Simulated nodes, through the simulator's API: times, failures, updates, tiers, tenants."""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from gpufaas_simulator.decisions import DecisionLog
from gpufaas_simulator.entries import workload_json
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.record import COMPLETED, Record
from gpufaas_simulator.report import Report, report
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.simulation import Simulation
from gpufaas_simulator.synthetic import SHAPES, make_workload
from gpufaas_simulator.timeline import Stay, Timeline

Write = Callable[[Any], Path]
Lines = list[dict[str, Any]]


def simulated(path: Path, policy: str = "lalb-o3", **more: Any) -> tuple[Record, Report, Lines]:
    out = BytesIO()
    record, found = simulate(read_workload(path), engine_header(policy, **more), observers=[DecisionLog(out)])
    return record, found, [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_small_workload_by_hand(small: dict[str, Any], written: Write) -> None:
    """f loads on g0; g fits g0 only and waits; the second f misses on g1; both are hits later."""
    record, found, lines = simulated(written(small))

    assert lines == [
        {"t": 0.0, "call": 0, "device": "g0", "hit": False, "victims": [], "via": "global"},
        {"t": 0.5, "call": 2, "device": "g1", "hit": False, "victims": [], "via": "global"},
        {"t": 3.75, "call": 1, "device": "g0", "hit": False, "victims": ["f"], "via": "global"},
        {"t": 10.0, "call": 3, "device": "g0", "hit": True, "victims": [], "via": "global"},
        {"t": 10.0, "call": 4, "device": "g1", "hit": True, "victims": [], "via": "global"},
    ]
    assert list(record.ended) == [3.75, 7.75, 4.25, 11.0, 11.25]
    assert (found.completed, found.misses, found.evictions, found.prefetches) == (5, 3, 1, 0)
    assert found.false_miss_ratio == pytest.approx(1 / 3)  # the second f: g0 held it
    assert found.latency.max == 7.25
    assert found.fairness.worst_wait_s == 6.25
    assert found.fairness.most_overtaken == 1
    # f is on g0 for 3.75 s, and on g1 from 0.5 s to the end.
    assert found.hottest_copies == pytest.approx((3.75 + 10.75) / 11.25)
    assert [each.busy_ratio for each in found.devices] == pytest.approx([(3.75 + 4 + 1) / 11.25, (3.75 + 1.25) / 11.25])
    assert found.utilisation == pytest.approx((3 * 1.25 + 2) / 22.5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_written_workload_is_read_back_as_it_was(shape: str, tmp_path: Path) -> None:
    workload = make_workload(shape, working_set=5, rpm=60, minutes=2, seed=3)
    path = tmp_path / "w.json"
    path.write_bytes(workload_json(workload))

    back = read_workload(path)

    assert (back.times, back.calls) == (workload.times, workload.calls)
    assert list(back.functions) == list(workload.functions)
    assert list(back.devices) == list(workload.devices)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_gives_the_same_workload_of_about_the_rate_that_was_asked_for(shape: str) -> None:
    first, again, other = (make_workload(shape, rpm=300, minutes=10, seed=seed) for seed in (1, 1, 2))

    assert first == again
    assert first != other
    assert list(first.times) == sorted(first.times)
    assert first.times[-1] < 600
    assert 0.8 < len(first) / 3000 < 1.2


def test_the_power_law_has_the_same_calls_in_every_minute() -> None:
    workload = make_workload("power-law", working_set=10, rpm=100, minutes=3)

    minutes = [
        sorted(call for time, call in zip(workload.times, workload.calls, strict=True) if int(time // 60) == minute)
        for minute in range(3)
    ]

    assert len(minutes[0]) == 100
    assert minutes[0] == minutes[1] == minutes[2]
    assert minutes[0].count(0) > minutes[0].count(1) > minutes[0].count(9) > 0


def test_devices_of_other_kinds_have_other_costs(small: dict[str, Any], written: Write) -> None:
    small["devices"] = [{"id": "fast", "memory_mb": 100, "kind": "h100"}, {"id": "slow", "memory_mb": 100}]
    small["functions"] = {
        "f": {
            "occupation_mb": 50, "load_s": 8, "infer_s": 4,
            "kinds": {"h100": {"occupation_mb": 60, "load_s": 2, "infer_s": 1}},
        }
    }  # fmt: skip
    small["arrivals"] = [[0, "f"], [0, "f"]]

    record, _, _ = simulated(written(small), "lb")

    assert list(record.ended) == [3.0, 12.0]


def test_calls_of_a_device_that_fails_are_lost_and_those_that_wait_for_it_are_not(
    small: dict[str, Any], written: Write
) -> None:
    small["devices"] = [{"id": "a/0", "memory_mb": 8000}, {"id": "b/0", "memory_mb": 8000}]
    small["arrivals"] = [[0, "f"], [2, "f"], [20, "f"]]
    small["changes"] = [{"t": 3, "event": "node_leaves", "node": "a"}]

    record, found, lines = simulated(written(small))

    # The second waited for a/0, which would have been ready in 1.75 s.
    assert [(each["call"], each["t"], each["device"]) for each in lines] == [
        (0, 0, "a/0"),
        (1, 3, "b/0"),
        (2, 20, "b/0"),
    ]
    assert (found.completed, found.failed) == (2, 1)
    assert record.ended[1] == 6.75


def test_a_device_that_joins_takes_what_waits(small: dict[str, Any], written: Write) -> None:
    small["devices"] = [{"id": "g0", "memory_mb": 1300}]
    small["functions"]["h"] = {"occupation_mb": 1300, "load_s": 1, "infer_s": 100}
    del small["functions"]["g"]
    small["arrivals"] = [[0, "h"], [0, "f"]]
    small["changes"] = [{"t": 7, "event": "device_joins", "device": {"id": "g1", "memory_mb": 2000}}]

    _, _, lines = simulated(written(small))

    assert [(each["call"], each["t"], each["device"]) for each in lines] == [(0, 0, "g0"), (1, 7, "g1")]


def test_what_nothing_can_serve_is_counted_as_never_served(small: dict[str, Any], written: Write) -> None:
    small["changes"] = [
        {"t": 1, "event": "device_leaves", "device": "g0"}, {"t": 1, "event": "device_leaves", "device": "g1"},
    ]  # fmt: skip

    _, found, _ = simulated(written(small))

    assert (found.completed, found.failed, found.unfinished) == (0, 2, 3)


def test_a_call_that_waits_too_long_is_given_up(small: dict[str, Any], written: Write) -> None:
    small["functions"]["g"]["timeout_s"] = 1
    small["arrivals"] = [[0, "f"], [0, "g"]]

    record, found, _ = simulated(written(small))

    assert (found.completed, found.rejected) == (1, 1)
    assert record.rejections == {"deadline": 1}


def test_an_updated_model_is_loaded_anew_and_the_old_one_goes(small: dict[str, Any], written: Write) -> None:
    small["arrivals"] = [[0, "f"], [10, "f"], [20, "f"]]
    small["changes"] = [
        {"t": 5, "event": "function_updated", "function": "f", "occupation_mb": 2000, "load_s": 1, "infer_s": 2}
    ]

    record, _, lines = simulated(written(small))

    assert [each.get("hit", each.get("evict")) for each in lines] == [False, "f", False, True]
    assert list(record.ended) == [3.75, 13.0, 22.0]


def test_weights_in_host_memory_load_sooner(small: dict[str, Any], written: Write) -> None:
    """Each needs the whole device; the host keeps one of them, the one that was loaded more often."""
    cost = {"occupation_mb": 100, "load_s": 4, "infer_s": 1, "host_load_s": 0.5}
    small["devices"] = [{"id": "g0", "memory_mb": 100, "node": "n"}, {"id": "g1", "memory_mb": 100, "node": "n"}]
    small["functions"] = {"f": cost, "g": cost}
    small["nodes"] = {"n": {"host_memory_mb": 150}}
    small["arrivals"] = [[0, "f"], [10, "f"], [10, "f"], [20, "g"], [30, "f"]]

    record, _, _ = simulated(written(small), "lb")

    latency = [ended - at for ended, at in zip(record.ended, (0, 10, 10, 20, 30), strict=True)]
    assert latency == [5.0, 1.0, 1.5, 5.0, 1.5 if record.start[4] > 1 else 1.0]


def test_tenants_are_reported_apart(small: dict[str, Any], written: Write) -> None:
    small["functions"]["f"]["namespace"] = "red"
    small["functions"]["g"]["namespace"] = "blue"

    _, found, _ = simulated(written(small))

    assert {name: (each.calls, each.latency.max) for name, each in found.tenants.items()} == {
        "red": (3, 3.75), "blue": (2, 7.25),
    }  # fmt: skip


def test_a_load_without_a_call_keeps_its_device_busy(small: dict[str, Any], written: Write) -> None:
    """A minimum of copies is loaded at once; a call of another function that comes meanwhile begins after it."""
    small["devices"] = [{"id": "g0", "memory_mb": 9000}]
    small["functions"]["f"]["min_copies"] = 1
    small["arrivals"] = [[1, "g"]]

    record, found, lines = simulated(written(small))

    assert lines == [
        {"t": 0.0, "device": "g0", "prefetch": "f", "victims": []},
        {"t": 2.5, "call": 0, "device": "g0", "hit": False, "victims": [], "via": "global"},
    ]
    assert record.ended[0] == 6.5
    assert found.prefetches == 1


def test_a_call_joins_the_load_of_its_own_function(small: dict[str, Any], written: Write) -> None:
    small["functions"]["f"]["min_copies"] = 1
    small["arrivals"] = [[1, "f"]]

    record, _, lines = simulated(written(small))

    assert [(each["t"], each.get("hit")) for each in lines] == [(0.0, None), (2.5, True)]
    assert record.ended[0] == 3.75


def test_cpu_functions_share_a_device_with_a_model(small: dict[str, Any], written: Write) -> None:
    small["devices"] = [{"id": "g0", "memory_mb": 9000}]
    small["functions"]["g"] |= {"slots": 2}
    small["arrivals"] = [[0, "f"], [0, "g"], [0, "g"], [0, "g"]]

    record, found, _ = simulated(written(small))

    assert list(record.ended) == [3.75, 4.0, 4.0, 5.0]
    assert found.completed == 4


def test_an_engine_that_was_made_elsewhere_can_be_run(small: dict[str, Any], written: Write) -> None:
    engine = engine_header("lb").engine()

    record = Simulation(read_workload(written(small)), engine).run()

    assert report(record, engine.policy.name).completed == 5
    assert engine.status(record.end_s).devices[0].served == 3


def test_a_timeline_has_each_stay_from_the_start_of_its_load(small: dict[str, Any], written: Write) -> None:
    timeline = Timeline()
    simulate(read_workload(written(small)), observers=[timeline])

    assert timeline.stays(12.0) == [
        Stay("g0", "f", 0.0, 3.75), Stay("g1", "f", 0.5, 12.0), Stay("g0", "g", 3.75, 12.0),
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["lb", "lalb-o3", "least-wait"])
@pytest.mark.parametrize("min_copies", [0, 1])
def test_700_calls_of_one_moment_start_as_batches_where_calls_wait_for_others(
    policy: str, min_copies: int, written: Write
) -> None:
    """On a loaded copy, and on one that loads for the first of them."""
    function = {
        "occupation_mb": 1000, "load_s": 2, "infer_s": 0.15, "batch": {"128": 0.16}, "sharing": "spatial",
        "compute": 10, "slots": 10, "batch_max": 128, "batch_wait_s": 0.005, "latency_goal_s": 0.2,
        "min_copies": min_copies,
    }  # fmt: skip
    at = 10.0 if min_copies else 0.0
    given = {
        "devices": [{"id": "a/0", "memory_mb": 16000}], "functions": {"f": function}, "arrivals": [[at, "f"]] * 700,
    }  # fmt: skip

    record, _, lines = simulated(written(given), policy)

    sizes = [1 + len(each.get("with", ())) for each in lines if "call" in each]
    assert sorted(sizes) == ([60] + [128] * 5 if min_copies else [1, 59] + [128] * 5)
    assert set(record.outcome) == {COMPLETED}
