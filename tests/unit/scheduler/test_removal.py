"""Functions that are removed, with and without waiting for their calls."""

import pytest
from msgspec.structs import replace
from tests.unit.scheduler.world import world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need


def test_a_function_that_is_removed_serves_who_waits_and_is_then_evicted() -> None:
    world = world_of("f")
    world.calls("runs waits", "f")

    world.tell(m.FunctionRemoved(FunctionId("f")))

    world.call("late", "f")
    assert world.rejected == [("late", "removed")]
    world.finish("runs")
    assert world.started == [("waits", "a")]
    world.finish("waits")
    assert world.out == [m.EvictCopy(FunctionId("f"), DeviceId("a"))]
    assert world.models("a") == []
    world.call("later", "f")
    assert world.rejected == [("later", "unknown_function")]


@pytest.mark.parametrize(("endless", "loaded", "aborted"), [(False, True, 0), (True, True, 1), (False, False, 1)])
def test_a_function_that_is_removed_at_once_ends_what_has_begun_and_has_an_end(
    endless: bool, loaded: bool, aborted: int
) -> None:
    world = world_of("f")
    world.tell(m.Arrived(CallId("runs"), FunctionId("f"), endless=endless))
    world.call("waits", "f")
    if loaded:
        world.loaded("f", "a")

    world.tell(m.FunctionRemoved(FunctionId("f"), drain=False))

    assert world.rejected == [("waits", "removed")]
    assert world.out.count(m.Abort(CallId("runs"), DeviceId("a"))) == aborted
    assert world.models("a") == ["f"]
    world.finish("runs", ok=not aborted)
    assert world.models("a") == []


@pytest.mark.parametrize("drain", [False, True])
def test_a_call_that_its_node_gives_back_after_the_removal_loads_nothing(drain: bool) -> None:
    """It is rejected; after an update its gateway places it at the new revision."""
    world = world_of("f", warm="f")
    world.call("runs", "f")
    world.tell(m.FunctionRemoved(FunctionId("f"), drain))

    world.tell(m.NodeRefused.of(world.running["runs"], "its worker ended"))

    assert world.rejected == [("runs", "removed")]
    assert world.models("a") == []


@pytest.mark.parametrize("policy", ["lb", "lalb", "lalb-o3", "least-wait"])
@pytest.mark.parametrize("need", [Need(0, slots=4), Need(30, "spatial"), Need(100, slots=2)])
def test_a_function_that_is_deployed_again_keeps_its_need(policy: str, need: Need) -> None:
    """Two gateways of different versions may read two needs from one record."""
    world = world_of("f", policy=policy)
    world.calls(4, "f")
    function = world.functions[FunctionId("f")]

    world.tell(m.FunctionDeployed(replace(function, need=need, max_queue=6)))

    assert world.engine.ignored["FunctionDeployed"] == 1
    world.calls(range(4, 8), "f")
    assert world.rejected == [("c7", "overloaded")], "all else is taken over"
    for _ in range(7):
        assert len(world.running) == 1
        world.finish(next(iter(world.running)))
    assert not world.waiting


def test_no_replica_is_asked_for_of_a_function_that_was_removed() -> None:
    world = world_of("f", policy="least-wait", load_s=1.0, service_s=0.2)
    for number in range(5):
        world.now += 0.2
        world.call(f"c{number}", "f")
    world.tell(m.FunctionRemoved(FunctionId("f")))

    world.device("b")

    assert not world.engine.refusals
    while world.running:
        world.finish(next(iter(world.running)))
    assert not world.waiting
