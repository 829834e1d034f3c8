"""Functions that are removed, with and without waiting for their calls."""

from tests.unit.scheduler.world import World

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, FunctionId


def test_a_function_that_is_removed_serves_who_waits_and_is_then_evicted() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("runs", "f")
    world.call("waits", "f")

    world.tell(m.FunctionRemoved(FunctionId("f")))

    world.call("late", "f")
    assert world.rejected == [("late", "removed")]
    world.finish("runs")
    assert world.started == [("waits", "a")]
    world.finish("waits")
    assert world.out == [m.Evict(FunctionId("f"), DeviceId("a"))]
    assert world.models("a") == []
    world.call("later", "f")
    assert world.rejected == [("later", "unknown_function")]


def test_a_function_that_is_removed_at_once_rejects_who_waits_and_aborts_who_runs() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("runs", "f")
    world.call("waits", "f")

    world.tell(m.FunctionRemoved(FunctionId("f"), drain=False))

    assert world.rejected == [("waits", "removed")]
    assert world.out[-1] == m.Abort(CallId("runs"), DeviceId("a"))
    world.finish("runs", ok=False)
    assert world.models("a") == []
