"""Weights in the host memory of simulated nodes: what is kept, what the engine is told of it, and what it asks for."""

from array import array

import pytest

from gpufaas_core import messages as m
from gpufaas_core.cost import Cost
from gpufaas_core.model import DeviceId, FunctionId, NodeId
from gpufaas_simulator.report import report
from gpufaas_simulator.run import engine_header
from gpufaas_simulator.simulation import Simulation
from gpufaas_simulator.workload import SimulatedDevice, SimulatedFunction, Workload

COST = Cost(occupation=100, load_s=4.0, service_s=1.0, host_load_s=1.0)


def workload(
    arrivals: list[tuple[float, str]], *, devices: tuple[str, ...] = ("n/a",), host: int = 1000,
    node: str | None = None, costs: dict[str, Cost] | None = None,
) -> Workload:  # fmt: skip
    names = sorted({name for _, name in arrivals})
    functions = [SimulatedFunction(name, {"*": (costs or {}).get(name, COST)}) for name in names]
    on = [
        SimulatedDevice(DeviceId(each), 100, node=each.rpartition("/")[0] if node is None else node) for each in devices
    ]
    memory = {each.node: host for each in on}
    times, calls = array("d", [at for at, _ in arrivals]), array("i", [names.index(name) for _, name in arrivals])
    return Workload(on, functions, times, calls, host_memory=memory)


class Told:
    """An engine that keeps what it is told, and what it commands."""

    def __init__(self, policy: str) -> None:
        self.engine = engine_header(policy).engine()
        self.facts: list[tuple[float, m.Event]] = []
        self.stages: list[tuple[float, str]] = []

    @property
    def wake_at(self) -> float | None:
        return self.engine.wake_at

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        if isinstance(event, m.Staged | m.Unstaged):
            self.facts.append((now, event))
        commands = self.engine.handle(event, now)
        self.stages += [(now, each.function) for each in commands if isinstance(each, m.Stage)]
        return commands


def run(given: Workload, policy: str = "lalb-o3") -> tuple[list[float], Told, Simulation]:
    """Return the latencies of the calls."""
    engine = Told(policy)
    simulation = Simulation(given, engine)
    record = simulation.run()
    return [ended - at for at, ended in zip(given.times, record.ended, strict=True)], engine, simulation


def staged(function: str, size: int = 100) -> m.Staged:
    return m.Staged(NodeId("n"), FunctionId(function), size)


def test_weights_that_were_read_once_are_loaded_from_the_host_and_the_engine_is_told() -> None:
    latency, engine, simulation = run(workload([(0, "f"), (10, "g"), (20, "f"), (30, "g")]))

    assert latency == [5.0, 5.0, 2.0, 2.0]
    assert engine.facts == [(4.0, staged("f")), (14.0, staged("g"))]
    assert simulation.record.host_loads == 2


def test_a_host_that_is_too_small_keeps_what_is_loaded_more_often() -> None:
    arrivals = [(10.0 * at, name) for at, name in enumerate("fgfgfhf")]

    latency, engine, _ = run(workload(arrivals, host=200))

    assert latency == [5.0, 5.0, 2.0, 2.0, 2.0, 5.0, 2.0]
    assert engine.facts == [(4.0, staged("f")), (14.0, staged("g"))], "h was not worth more than either"


def test_what_gives_way_is_told_before_what_comes() -> None:
    _, engine, _ = run(workload([(10.0 * at, name) for at, name in enumerate("fghg")], host=100))

    gone = m.Unstaged(NodeId("n"), FunctionId("f"))
    assert [each for _, each in engine.facts][:3] == [staged("f"), gone, staged("g")]


def test_an_engine_that_cannot_know_the_node_of_a_device_is_told_nothing() -> None:
    latency, engine, _ = run(workload([(0, "f"), (10, "g"), (20, "f")], node="elsewhere"))

    assert (latency, engine.facts) == ([5.0, 5.0, 2.0], [])


def test_a_call_waits_for_a_copy_only_as_long_as_a_load_from_the_host_takes() -> None:
    """At 30, a load of f on b takes 1 s, and f on a is busy for 4 s: without the host, the call waits for a."""
    slow = Cost(occupation=100, load_s=10.0, service_s=8.0, host_load_s=1.0)
    given = workload([(0, "f"), (26, "f"), (30, "f")], devices=("n/a", "n/b"), costs={"f": slow})

    assert run(given)[0] == [18.0, 8.0, 9.0]
    assert run(workload([(0, "f"), (26, "f"), (30, "f")], devices=("n/a", "n/b"), costs={"f": slow}, host=0))[0] == [
        18.0, 8.0, 12.0,
    ]  # fmt: skip


PREFETCH = "lalb-o3+prefetch=next-misses"


@pytest.mark.parametrize(("policy", "last"), [("lalb-o3", 13.0), (PREFETCH, 10.0)])
def test_what_is_staged_while_a_device_computes_loads_sooner_after_it(policy: str, last: float) -> None:
    long = Cost(occupation=100, load_s=4.0, service_s=5.0, host_load_s=1.0)

    latency, engine, simulation = run(workload([(0, "f"), (1, "g")], costs={"f": long}), policy)

    assert latency == [9.0, last]
    assert engine.stages == ([(1.0, "g")] if policy == PREFETCH else [])
    assert simulation.record.staged == len(engine.stages)


def test_what_is_asked_for_is_read_one_after_the_other() -> None:
    long = Cost(occupation=100, load_s=4.0, service_s=50.0, host_load_s=1.0)

    _, engine, _ = run(workload([(0, "f"), (1, "g"), (1, "h")], costs={"f": long}), PREFETCH)

    assert engine.facts[:3] == [(4.0, staged("f")), (4.0, staged("g")), (7.0, staged("h"))]


def test_what_is_not_worth_its_place_is_not_read() -> None:
    """g was never loaded; f was, twice."""
    long = Cost(occupation=100, load_s=4.0, service_s=20.0, host_load_s=1.0)
    given = workload([(0, "f"), (30, "f"), (31, "g")], costs={"f": long}, host=100)

    latency, engine, _ = run(given, PREFETCH)

    assert engine.facts[1] == (31.0, m.Unstaged(NodeId("n"), FunctionId("g"), "other weights are worth more"))
    assert latency[2] == 19.0 + 5.0


def test_a_load_from_the_host_beside_a_call_leaves_the_rest_of_it() -> None:
    """g is staged from 1 to 4 and loaded beside f from 4 to 5; h, for which there is no room, after both."""
    long = Cost(occupation=50, load_s=4.0, service_s=5.0, host_load_s=1.0)
    short = Cost(occupation=50, load_s=4.0, service_s=1.0, host_load_s=1.0)
    given = workload([(0, "f"), (1, "g"), (1, "h")], costs={"f": long, "g": short, "h": short})

    latency, _, simulation = run(given, PREFETCH)

    assert latency == [9.0, 9.0, 11.0]
    assert (simulation.record.prefetches, simulation.record.host_loads) == (1, 2)


def test_a_report_counts_loads_from_the_host_and_what_was_staged() -> None:
    long = Cost(occupation=100, load_s=4.0, service_s=5.0, host_load_s=1.0)

    _, _, simulation = run(workload([(0, "f"), (1, "g")], costs={"f": long}), PREFETCH)

    found = report(simulation.record, "any")
    assert (found.misses, found.host_loads, found.staged) == (2, 1, 1)
