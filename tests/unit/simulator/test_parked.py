"""Parked copies in the simulator: they share host memory with staged weights, and wake sooner than they load."""

from array import array
from pathlib import Path

from gpufaas_core.cost import Cost
from gpufaas_core.model import DeviceId
from gpufaas_simulator.entries import workload_json
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.report import Report
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.workload import MB, SimulatedDevice, SimulatedFunction, Workload

CALLS = "abababab"
SIZE = 60 * MB


def workload(host: int, *, parks: bool = True, wake_s: float | None = 0.1) -> Workload:
    """A device with room for one of two models, which take turns."""
    cost = Cost(SIZE, 4.0, 1.0, 2.0, wake_s)
    return Workload(
        [SimulatedDevice(DeviceId("n/d"), 100 * MB, node="n")],
        [SimulatedFunction("a", {"*": cost}), SimulatedFunction("b", {"*": cost})],
        array("d", [10.0 * at for at in range(len(CALLS))]),
        array("i", [ord(each) - ord("a") for each in CALLS]),
        host_memory={"n": host * MB},
        parks={"n"} if parks else (),
    )


def simulated(given: Workload, policy: str = "least-wait") -> Report:
    return simulate(given, engine_header(policy))[1]


def test_victims_are_parked_and_wake() -> None:
    found = simulated(workload(1000))

    assert (found.misses, found.wakes, found.host_loads) == (8, 6, 0)
    assert found.latency.mean == (2 * 5.0 + 6 * 1.1) / 8


def test_without_a_time_of_its_own_a_wake_takes_half_of_a_load_from_host_memory() -> None:
    assert simulated(workload(1000, wake_s=None)).latency.mean == (2 * 5.0 + 6 * 2.0) / 8


def test_nothing_is_parked_where_the_node_or_the_policy_does_not() -> None:
    for found in (simulated(workload(1000, parks=False)), simulated(workload(1000), "lalb-o3")):
        assert (found.wakes, found.host_loads) == (0, 6)


def test_parked_copies_are_charged_to_host_memory_and_give_way_to_weights() -> None:
    """There is room for the weights of both, but not for a parked copy beside them."""
    found = simulated(workload(150))

    assert found.wakes < 3
    assert found.wakes + found.host_loads == 6
    assert simulated(workload(100)).latency.mean > found.latency.mean


def test_a_workload_with_parking_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_bytes(workload_json(workload(1000)))
    read = read_workload(tmp_path / "w.json")

    assert set(read.parks) == {"n"}
    assert read.functions[0].costs["*"].wake_s == 0.1
