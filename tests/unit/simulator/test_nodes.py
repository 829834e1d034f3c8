"""
Simulated nodes that run grants beside each other, in batches, under caps and with parts, as an engine of the test asks.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_scheduler import contract
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import View
from gpufaas_simulator.costs import Revisions
from gpufaas_simulator.entries import workload_json
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.record import COMPLETED, FAILED, PENDING, Record
from gpufaas_simulator.report import report
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.simulation import Simulation
from gpufaas_simulator.workload import Workload

Write = Callable[[Any], Path]


class Scripted:
    """
    An engine that starts each call when it arrives, on the parts given for its function, as a hit if the function was
    started before. *batches*: calls that start together, when the last of them arrives. *then*: what it commands beside
    the start of a call.
    """

    wake_at = None

    def __init__(
        self, parts: dict[str, tuple[Part, ...]], batches: tuple[tuple[int, ...], ...] = (),
        then: dict[int, m.Command] | None = None,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.then = then or {}
        self.batches = {each: batch for batch in batches for each in batch}
        self.events: list[tuple[float, m.Event]] = []
        self.warm: set[str] = set()
        self.grants = 0

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        self.events.append((now, event))
        if not isinstance(event, m.Arrived):
            return []
        batch = self.batches.get(int(event.call), (int(event.call),))
        if int(event.call) != batch[-1]:
            return []
        then = [self.then[each] for each in batch if each in self.then]
        self.warm.difference_update(each.function for each in then if isinstance(each, m.EvictCopy))
        cold = event.function not in self.warm
        self.warm.add(event.function)
        self.grants += 1
        calls = tuple(CallId(str(each)) for each in batch)
        return [
            *then,
            m.StartCall(m.Grant(1, self.grants, calls, event.function, "", self.parts[event.function], cold)),
        ]


def one(device: str, share: int = 0, memory: int = 1) -> tuple[Part, ...]:
    return (Part(DeviceId(device), memory, share),)


def workload(functions: dict[str, Any], arrivals: list[list[Any]], **more: Any) -> dict[str, Any]:
    cost = {"occupation_mb": 100, "load_s": 0, "infer_s": 6, "sharing": "spatial", "compute": 50}
    return {
        "devices": [{"id": "g0", "memory_mb": 1000}],
        "functions": {name: {**cost, **each} for name, each in functions.items()},
        "arrivals": arrivals,
        **more,
    }


@pytest.fixture
def ran(written: Write) -> Callable[..., tuple[Record, Scripted]]:
    def run(given: dict[str, Any], engine: Scripted) -> tuple[Record, Scripted]:
        return Simulation(read_workload(written(given)), engine).run(), engine

    return run


Ran = Callable[..., tuple[Record, Scripted]]


def test_two_that_need_half_of_a_device_each_run_as_if_alone(ran: Ran) -> None:
    given = workload({"f": {"load_s": 2}, "g": {"load_s": 1}}, [[0, "f"], [0, "g"], [8, "f"]])

    record, engine = ran(given, Scripted({"f": one("g0"), "g": one("g0")}))

    assert list(record.ended) == [8.0, 7.0, 14.0]
    assert [(at, each.load_s) for at, each in engine.events if isinstance(each, m.Loaded)] == [(1, 1), (2, 2)]
    found = report(record, "scripted")
    assert found.busy_ratio == 1.0
    assert found.utilisation == pytest.approx((6 + 6 + 6) / 2 / 14)


def test_what_uses_more_than_planned_slows_its_neighbours(ran: Ran) -> None:
    """From 3 to 6.6 both use 60 of 100, so each runs at 1/1.2 of its speed."""
    given = workload({"f": {"uses": 60}, "g": {"uses": 60}}, [[0, "f"], [3, "g"]])

    record, engine = ran(given, Scripted({"f": one("g0"), "g": one("g0")}))

    assert list(record.ended) == pytest.approx([6.6, 9.6])
    assert list(record.service_s) == pytest.approx([6.6, 6.6])
    told = [each.service_s for _, each in engine.events if isinstance(each, m.Finished)]
    assert told == pytest.approx([6.6, 6.6])
    # 60 % for the first and last 3 s, and all of the device between them
    assert report(record, "scripted").utilisation == pytest.approx((2 * 0.6 * 3 + 3.6) / 9.6)


def test_a_neighbour_that_disturbs_does_so_while_it_runs(ran: Ran) -> None:
    functions = {"f": {"beside": {"g": 2, "*": 3}}, "g": {"infer_s": 2}, "h": {"infer_s": 1, "compute": 1}}
    given = workload(functions, [[0, "f"], [0, "g"], [5, "h"]])

    record, _ = ran(given, Scripted({each: one("g0") for each in "fgh"}))

    # f: 1 s of work in the first two, 3 in the next three, a third in the next one, and 1.67 are left.
    assert list(record.ended) == pytest.approx([6 + 6 - 4 - 1 / 3, 2.0, 6.0])


def test_what_a_grant_uses_depends_on_its_batch(ran: Ran) -> None:
    """Alone f uses 20 beside the 60 of g; four together use 80, and five as much: 140 of 100 while both run."""
    uses = {"uses": {"2": 20, "4": 80}, "batch": {"4": 6}, "batch_max": 8}
    given = workload({"f": uses, "g": {"uses": 60}}, [[0, "f"], [0, "g"], *([10, "f"],) * 4, [10, "g"]])

    record, _ = ran(given, Scripted({"f": one("g0"), "g": one("g0")}, ((2, 3, 4, 5),)))

    assert list(record.ended) == pytest.approx([6.0, 6.0, *[10 + 6 * 1.4] * 4, 10 + 6 * 1.4])


def test_neighbours_slow_by_what_they_use_also_below_saturation(ran: Ran) -> None:
    """Beside 40 % of g, f takes 1.2 times as long; g does not mind. Beside 80 %, only 60 % are left for neighbours."""
    functions = {"f": {"uses": 40, "near": 0.005}, "g": {"uses": 40, "infer_s": 3}, "h": {"uses": 80, "infer_s": 2.8}}
    given = workload(functions, [[0, "f"], [0, "g"], [20, "f"], [20, "h"]])

    record, _ = ran(given, Scripted({each: one("g0") for each in "fgh"}))

    assert list(record.ended)[:2] == pytest.approx([3 + 6 - 3 / 1.2, 3.0])
    beside_h_s = 2.8 * 1.2
    assert list(record.ended)[2:] == pytest.approx([20 + beside_h_s + 6 - beside_h_s / (1.2 * 1.3), 20 + beside_h_s])


def test_above_saturation_a_power_makes_sharing_dearer_than_queueing(ran: Ran) -> None:
    given = workload({"f": {"uses": 75, "power": 2}, "g": {"uses": 75}}, [[0, "f"], [0, "g"]])

    record, _ = ran(given, Scripted({"f": one("g0"), "g": one("g0")}))

    # Until 9 s g runs at 1/1.5 of its speed, and f at 1/2.25
    assert list(record.ended) == pytest.approx([9 + 6 - 9 / 2.25, 9.0])


@pytest.mark.parametrize("sharing", [{}, {"sharing": "exclusive", "compute": None}])
def test_a_hit_begins_some_time_after_its_grant(sharing: dict[str, Any], ran: Ran) -> None:
    """The way to a busy device takes its time while the device is busy."""
    given = workload({"f": {"start_s": 0.5, **sharing}}, [[0, "f"], [10, "f"], [12, "f"]])

    record, engine = ran(given, Scripted({"f": one("g0")}))

    whole = "sharing" in sharing
    assert list(record.started) == [0.0, 10.5, 16.5 if whole else 12.5]
    assert [each.service_s for _, each in engine.events if isinstance(each, m.Finished)] == [6.0] * 3


def test_what_is_planned_of_batches_caps_and_neighbours_reaches_the_engine_as_a_profile_does(written: Write) -> None:
    planned = {"infer_s": 3, "batch": {"4": 6}, "share": {"50": 2}, "uses": {"1": 30, "4": 60}, "beside": {"*": 1.5}}
    given = workload({"f": {"batch_max": 4, "planned": planned}}, [[0, "f"]])

    [known] = read_workload(written(given)).functions
    profile = known.known_as(FunctionId("f")).profiles["*"]

    found = {(each.batch, each.share, each.neighbours): each.ratio for each in profile.ratios}
    assert profile.service_s == 3.0
    assert found[4, 0, 0] == 2.0
    assert found[2, 0, 0] == pytest.approx(4 / 3), "between two sizes, as in truth"
    assert found[1, 50, 0] == 2.0
    assert found[1, 0, 2] == pytest.approx(1.5**2), "three that use 30 each have room"
    assert found[4, 0, 1] == pytest.approx(2 * 1.2 * 1.5), "two that use 60 each have not"


def test_planned_batch_times_hold_without_learning_and_give_way_to_it(written: Write) -> None:
    cost = {"infer_s": 1, "batch_max": 4, "batch": {"4": 1.5}, "planned": {"batch": {"4": 3}}}
    given = workload({"f": cost}, [[at // 4 * 10, "f"] for at in range(4, 44)])
    expected = {}
    for learn in (False, True):
        engine = engine_header("lb", learn=learn).engine()
        record = Simulation(read_workload(written(given)), engine).run()
        expected[learn] = engine._world.functions[FunctionId("f")].grant_s("gpu", 3)  # what policies see
        assert max(record.service_s) == pytest.approx(1 + 2 / 6)

    assert expected[False] == pytest.approx(1 + 2 / 3 * 2, rel=1e-3)
    assert expected[True] < expected[False]


def test_a_batch_is_served_together(ran: Ran) -> None:
    functions = {
        "f": {"batch_max": 8, "infer_s": 1, "batch": {"2": 1.5, "4": 2.5}},
        "g": {"batch_max": 2, "infer_s": 1},
    }
    given = workload(functions, [[0, "f"], *([10, "f"],) * 3, *([20, "f"],) * 8, [40, "g"], [40, "g"]])
    batches = ((1, 2, 3), tuple(range(4, 12)), (12, 13))

    record, engine = ran(given, Scripted({"f": one("g0"), "g": one("g0")}, batches))

    # Three are between two and four; eight take twice as long as four; without a table, two take twice as long as one.
    assert list(record.ended) == [1.0, *[12.0] * 3, *[25.0] * 8, 42.0, 42.0]
    finished = [int(each.call) for _, each in engine.events if isinstance(each, m.Finished)]
    assert finished == list(range(14))


def test_calls_of_a_batch_with_times_of_their_own_take_their_mean(ran: Ran) -> None:
    given = workload({"f": {"infer_s": 1, "batch": {"2": 1.5}}}, [[0, "f", 3], [0, "f", 1]])

    record, _ = ran(given, Scripted({"f": one("g0")}, ((0, 1),)))

    assert list(record.ended) == [3.0, 3.0]


def test_a_capped_copy_is_slower_and_its_grants_share_the_cap(ran: Ran) -> None:
    capped = {"sharing": "share", "compute": 25, "slots": 2}
    functions = {
        "f": {**capped, "uses": 50, "infer_s": 3}, "g": {**capped, "share": {"20": 3, "60": 1.5}, "infer_s": 2},
    }  # fmt: skip
    given = workload(functions, [[0, "f"], [10, "g"], [30, "f"], [30, "f"]])

    record, _ = ran(given, Scripted({"f": one("g0", 25), "g": one("g0", 25)}))

    # f gets half of what it uses; g is an eighth of the way from 20 to 60; two grants of f have a quarter together.
    assert list(record.ended) == [6.0, 10 + 2 * (3 - 1.5 / 8), 42.0, 42.0]


def test_a_copy_with_parts_loads_each_on_its_device_and_runs_as_one(ran: Ran) -> None:
    slow = {"occupation_mb": 100, "load_s": 20, "infer_s": 2, "uses": 50}
    functions = {
        "f": {"load_s": 8, "infer_s": 1, "kinds": {"slow": slow}},
        "g": {"infer_s": 4, "uses": 100},
    }  # fmt: skip
    devices = [{"id": "g0", "memory_mb": 100}, {"id": "g1", "memory_mb": 100, "kind": "slow"}]
    given = workload(functions, [[0, "f"], [9, "g"]], devices=devices)
    parts = (Part(DeviceId("g0"), 60), Part(DeviceId("g1"), 40))

    record, engine = ran(given, Scripted({"f": parts, "g": one("g1")}))

    # 0.6 of 8 s and 0.4 of 20 s: the second is longer. g1 is the slower one, and from 9 on g slows it to 2/3.
    assert [at for at, each in engine.events if isinstance(each, m.Loaded)] == [8.0, 9.0]
    assert list(record.ended) == pytest.approx([10.5, 9 + 1.5 + 3])


def test_what_spans_a_device_that_leaves_is_lost_and_leaves_its_neighbours_the_rest(ran: Ran) -> None:
    functions = {"f": {"uses": 100}, "g": {"uses": 100}}
    changes = [{"t": 2, "event": "device_leaves", "device": "g1"}]
    devices = [{"id": "g0", "memory_mb": 100}, {"id": "g1", "memory_mb": 100}]
    given = workload(functions, [[0, "f"], [0, "g"]], devices=devices, changes=changes)
    parts = (Part(DeviceId("g0"), 1), Part(DeviceId("g1"), 1))

    record, engine = ran(given, Scripted({"f": parts, "g": one("g0")}))

    assert list(record.outcome) == [FAILED, COMPLETED]
    assert record.ended[1] == 7.0
    assert sum(isinstance(each, m.Finished) for _, each in engine.events) == 1


def test_a_grant_waits_for_its_copy_and_slows_others_only_then(ran: Ran) -> None:
    functions = {"f": {"load_s": 4, "uses": 100, "infer_s": 1, "slots": 2}, "g": {"uses": 100, "infer_s": 4}}
    given = workload(functions, [[0, "f"], [0, "g"], [1, "f"]])

    record, _ = ran(given, Scripted({"f": one("g0"), "g": one("g0")}))

    assert list(record.started) == [0.0, 0.0, 4.0]
    assert list(record.ended) == [6.0, 4.0, 6.0]


def test_a_limit_holds_from_the_moment_when_it_is_set(ran: Ran) -> None:
    functions = {"f": {"sharing": "auto", "compute": 100}, "g": {"infer_s": 0, "compute": 1}}
    given = workload(functions, [[0, "f"], [2, "g"], [20, "f"]])

    record, _ = ran(given, Scripted({"f": one("g0"), "g": one("g0")}, then={1: m.SetLimit("f", "g0", 0, 50)}))  # type: ignore[arg-type]

    # Four of six seconds were left: they take eight. The next grant takes twelve.
    assert list(record.ended) == [10.0, 2.0, 32.0]


WHOLE = {"sharing": "exclusive", "compute": None}


@pytest.mark.parametrize(("need", "load_s"), [(WHOLE, 0), (WHOLE, 1), ({}, 0), ({}, 1)])
def test_a_call_that_is_stopped_frees_its_device(need: dict[str, Any], load_s: float, ran: Ran) -> None:
    """At 2, long before its end. The engine of this test does not start it again."""
    functions = {"f": {**need, "uses": 100, "load_s": load_s}, "g": {"infer_s": 2, "uses": 100, **need}}
    devices = [{"id": "g0", "memory_mb": 100}, {"id": "g1", "memory_mb": 100}]
    given = workload(functions, [[0, "f"], [2, "g"], [3, "f"]], devices=devices)
    if need:
        for each in given["functions"].values():
            del each["uses"]
    stop = m.Abort(CallId("0"), DeviceId("g0"), True, "it is in the way", 1)

    record, engine = ran(given, Scripted({"f": one("g0"), "g": one("g1" if need else "g0")}, then={1: stop}))

    assert [(at, each) for at, each in engine.events if isinstance(each, m.NodeRefused)] == [
        (2, m.NodeRefused(CallId("0"), DeviceId("g0"), "it is in the way", opened=True))
    ]
    # Where both run on one device, they share it from 3 to 5.
    assert list(record.ended)[1:] == ([4.0, 9.0] if need else [5.0, 10.0])
    assert (list(record.outcome), record.preempted) == ([PENDING, COMPLETED, COMPLETED], 1)
    assert record.devices[0][1].busy_s == (8.0 if need else 10.0)


@pytest.mark.parametrize("need", [WHOLE, {}])
def test_a_load_goes_on_when_its_call_is_stopped(need: dict[str, Any], ran: Ran) -> None:
    functions = {"f": {**need, "load_s": 4}, "g": need or {"infer_s": 1, "compute": 1}}
    devices = [{"id": "g0", "memory_mb": 100}, {"id": "g1", "memory_mb": 100}]
    given = workload(functions, [[0, "f"], [2, "g"], [3, "f"]], devices=devices)
    stop = m.Abort(CallId("0"), DeviceId("g0"), False, "it is in the way", 1)

    record, engine = ran(given, Scripted({"f": one("g0"), "g": one("g1")}, then={1: stop}))

    assert [at for at, each in engine.events if isinstance(each, m.Loaded) and each.function == "f"] == [4.0]
    ended = [(at, each.ok) for at, each in engine.events if isinstance(each, m.Finished) and each.call == "0"]
    assert ended == [(2.0, False)]
    assert record.outcome[0] == FAILED
    assert (record.started[2], record.ended[2]) == (4.0, 10.0)
    assert record.devices[0][1].busy_s == 10.0


def test_what_is_evicted_to_the_host_is_loaded_from_there(ran: Ran) -> None:
    """The host has room for one model: the last that was loaded, or evicted to it."""
    cost = {"load_s": 4, "host_load_s": 1, "infer_s": 0}
    given = workload({"f": cost, "g": cost}, [[0, "f"], [10, "g"], [20, "f"]], nodes={"": {"host_memory_mb": 100}})

    evicted = {2: m.EvictCopy("f", "g0", 0, "host")}  # type: ignore[arg-type]
    to_host, _ = ran(given, Scripted({"f": one("g0"), "g": one("g0")}, then=evicted))
    nowhere, _ = ran(given, Scripted({"f": one("g0"), "g": one("g0")}, then={2: m.EvictCopy("f", "g0")}))  # type: ignore[arg-type]

    assert (to_host.ended[2], nowhere.ended[2]) == (21.0, 24.0)


@pytest.mark.parametrize("plans", [False, True])
def test_a_grant_of_an_auto_function_has_its_device_to_itself_unless_plans_may_say_otherwise(
    written: Write, *, plans: bool
) -> None:
    functions = read_workload(written(workload({"f": {"sharing": "auto", "compute": 100}}, []))).functions
    revisions = Revisions(functions, plans=plans)

    assert revisions.of(revisions.current[0], "gpu").whole is not plans


def test_the_cost_model_answers_what_nodes_do(written: Write) -> None:
    given = workload(
        {"f": {"uses": 80, "batch": {"2": 9}, "beside": {"g": 1.5}, "host_load_s": 1, "load_s": 3}, "g": {}}, []
    )
    revisions = Revisions(read_workload(written(given)).functions)
    f, g = (revisions.of(each, "gpu") for each in revisions.current)

    assert f.service_s() == 6
    assert f.service_s(2, 40) == 18
    assert f.disturbed([g]) == 1.5
    assert (f.cost.load_s, f.cost.host_load_s) == (3, 1)


@pytest.mark.parametrize("learn", [False, True])
def test_the_engine_plans_with_what_it_is_told_until_it_learns(
    learn: bool, small: dict[str, Any], written: Write
) -> None:
    small["functions"]["f"]["planned"] = {"infer_s": 5}
    small["arrivals"] = [[10 * at, "f"] for at in range(20)]
    engine = engine_header("lb", learn=learn).engine()

    record = Simulation(read_workload(written(small)), engine).run()

    assert list(record.service_s) == [1.25] * 20
    assert engine.status(record.end_s).devices[0].served == 20
    learnt = [each.profile.service_s for each in engine.take_learnt() if each.function == "f"]
    assert learnt == ([pytest.approx(1.25, abs=0.5)] if learn else [])


def test_planned_costs_decide_and_true_ones_happen(written: Write) -> None:
    """By plan the busy device is done sooner than a load takes; in truth it is not."""
    cost = {"occupation_mb": 100, "load_s": 3, "infer_s": 10}
    given = {
        "devices": [{"id": "g0", "memory_mb": 100}, {"id": "g1", "memory_mb": 100}],
        "functions": {"f": {**cost, "planned": {"infer_s": 0.5}}, "g": cost},
        "arrivals": [[0, "f"], [1, "f"]],
    }  # fmt: skip

    told = simulate(read_workload(written(given)), engine_header("lalb"))[0]
    del given["functions"]["f"]["planned"]  # type: ignore[attr-defined]
    knows = simulate(read_workload(written(given)), engine_header("lalb"))[0]

    assert told.ended[0] == knows.ended[0] == 13.0
    assert knows.ended[1] == 14.0
    assert told.ended[1] > 14.0


def test_the_engine_s_batches_are_served_together(written: Write) -> None:
    cost = {"sharing": "exclusive", "compute": None, "infer_s": 2, "load_s": 4, "batch_max": 4, "batch": {"4": 3}}
    given = workload({"f": cost}, [[0, "f"], [1, "f"], [2, "f"], [3, "f"], [4, "f"], [5, "f"]])

    record, found = simulate(read_workload(written(given)), engine_header("lb+batching=waiting"))

    assert list(record.ended) == [6.0, 9.0, 9.0, 9.0, 9.0, 11.0]
    assert found.completed == 6


def test_a_simulated_device_waits_for_more_calls_of_a_batch(written: Write) -> None:
    cost = {"sharing": "exclusive", "compute": None, "infer_s": 2, "load_s": 4, "batch_max": 4, "batch": {"4": 3}}
    arrivals = [[0, "f"], [10, "f"], [10.25, "f"], [10.75, "f"], [20, "f"]]
    given = workload({"f": {**cost, "batch_wait_s": 0.5}}, arrivals)

    record, found = simulate(read_workload(written(given)), engine_header("lalb"))

    assert list(record.started) == [0.0, 10.5, 10.5, 12.833333333333334, 20.5], "two of the batch take 7/3 s"
    assert found.completed == 5


@pytest.mark.parametrize("policy", ["lb", "lalb-o3", "least-wait"])
def test_the_engine_runs_grants_beside_each_other_while_there_is_compute(policy: str, written: Write) -> None:
    """Of three that need 40 % each, two run at once, and they use 60 %: so they slow each other."""
    functions = {each: {"compute": 40, "uses": 60} for each in "fgh"}
    given = workload(functions, [[0, "f"], [0, "g"], [0, "h"]])

    record, _ = simulate(read_workload(written(given)), engine_header(policy))

    assert sorted(record.ended) == pytest.approx([7.2, 7.2, 13.2])
    assert sorted(record.started) == pytest.approx([0.0, 0.0, 7.2])


def test_all_that_a_file_says_is_written_as_it_was_read(written: Write, tmp_path: Path) -> None:
    given = workload(
        {
            "f": {
                "kinds": {"h100": {"occupation_mb": 50, "load_s": 1, "infer_s": 1, "batch": {"4": 2}, "uses": 20}},
                "planned": {"load_s": 9, "uses": 7, "kinds": {"h100": {"infer_s": 3, "batch": {"2": 4}}}},
                "uses": {"1": 10, "4": 40}, "near": 0.002, "power": 1.5, "start_s": 0.01, "share": {"25": 3.5},
                "beside": {"g": 1.5},
                "batch_max": 4, "batch_wait_s": 0.1, "latency_goal_s": 2, "batch_adaptive": True, "weight": 2.5,
                "priority": 3, "task": "classify", "accuracy": 0.8, "namespace": "red",
            },
            "g": {"sharing": "share", "compute": 30, "slots": 3},
        },
        [[0, "f"], [1, "g", 2]],
        devices=[{"id": "a/0", "memory_mb": 1000, "compute": 70}],
        nodes={"a": {"price_per_h": 2}, "b": {"host_memory_mb": 10}},
        offers=[{"kind": "h100", "memory_mb": 80000, "devices": 2, "price_per_h": 8, "delay_s": 60, "limit": 3}],
    )  # fmt: skip
    given["functions"]["c"] = {"occupation_mb": 1, "load_s": 1, "infer_s": 1, "slots": 4}
    given["functions"]["s"] = {"occupation_mb": 1, "load_s": 1, "infer_s": 1, "slots": 4, "sharing": "exclusive"}
    first = read_workload(written(given))
    again = tmp_path / "again.json"
    again.write_bytes(workload_json(first))

    second: Workload = read_workload(again)

    assert (second.functions, second.devices, second.offers) == (first.functions, first.devices, first.offers)
    assert (second.prices, second.host_memory) == (first.prices, first.host_memory)
    needs = {each.name: (each.need.compute, each.need.slots, each.need.sharing) for each in first.functions}
    assert needs == {
        "f": (50, 1, "spatial"), "g": (30, 3, "share"), "c": (0, 4, "exclusive"), "s": (100, 4, "exclusive"),
    }  # fmt: skip
    assert json.loads(again.read_bytes())["functions"]["f"]["kinds"]["h100"]["batch"] == {"4": 2.0}


class Spread:
    """Starts each call at once on all devices, each with a part of the memory, or as a hit."""

    name = "spread"
    watches = 0

    def plan(self, view: View) -> contract.Plan:
        call = view.queue.first()
        if call is not None:
            held = [each.id for device in view.idle() for each in view.residents(device)]
            parts = (Part(DeviceId("g0"), 60), Part(DeviceId("g1"), 40))
            yield contract.Start((call.id,), held[0]) if held else contract.Start((call.id,), parts=parts)


def test_the_engine_starts_a_copy_with_parts_as_one(written: Write) -> None:
    functions = {"f": {"load_s": 10, "infer_s": 2, "compute": None, "sharing": "exclusive"}}
    devices = [{"id": "g0", "memory_mb": 100}, {"id": "g1", "memory_mb": 100}]
    changes = [{"t": 30, "event": "device_leaves", "device": "g1"}]
    given = workload(functions, [[0, "f"], [1, "f"], [29, "f"]], devices=devices, changes=changes)
    engine = Engine(policy=Spread(), replacement=Lru(), learn=False)

    record = Simulation(read_workload(written(given)), engine).run()

    assert list(record.started) == [0.0, 8.0, 29.0]
    assert list(record.ended)[:2] == pytest.approx([8.0, 10.0])
    assert list(record.outcome) == [COMPLETED, COMPLETED, FAILED]
    assert not any(record.holders.values()), "the copy went with its second device"
    assert engine.status(31.0).devices[0].used == 0


class Ahead:
    """Has what a call needs fetched before it starts the call."""

    name = "ahead"

    def __init__(self) -> None:
        self.answers: list[contract.Refusal | None] = []

    def plan(self, view: View) -> contract.Plan:
        for device in view.idle():
            call = view.queue.first()
            if call is not None:
                self.answers.append((yield contract.Fetch(call.function, (device.node,))))
                yield contract.start_on(device, call)


def test_a_fetch_ahead_is_refused_as_simulated_nodes_say_that_they_do_none(written: Write) -> None:
    functions = {"f": {"occupation_mb": 10, "load_s": 10, "infer_s": 2}}
    given = workload(functions, [[0, "f"]], devices=[{"id": "n/g0", "memory_mb": 100}])
    policy = Ahead()

    Simulation(read_workload(written(given)), Engine(policy=policy, replacement=Lru())).run()

    (refusal,) = policy.answers
    assert refusal is not None
    assert refusal.reason == "node n fetches nothing ahead of a load"
