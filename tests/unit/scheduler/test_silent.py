"""A copy whose worker gives no sign of life gets no calls until it does, and is not evicted for that."""

import pytest
from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, Function, FunctionId, Need, Profile
from gpufaas_scheduler.policies import POLICIES


def falls_silent(world: World, function: str, device: str) -> list[m.Command]:
    return world.tell(m.CopySilent(FunctionId(function), DeviceId(device), silent=True))


def is_heard(world: World, function: str, device: str) -> list[m.Command]:
    return world.tell(m.CopySilent(FunctionId(function), DeviceId(device), silent=False))


def slotted(policy: str) -> World:
    """Return a world with a model f of two slots; a holds it, and runs one call of it. b is idle."""
    world = World(policy)
    world.device("a")
    function = Function(FunctionId("f"), "d", Need(100, slots=2), {"gpu": Profile(0.5, 1.0, 60)})
    world.tell(m.FunctionDeployed(function))
    world.warm("f", "a")
    world.call("runs", "f")
    world.device("b")
    return world


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_does_not_join_those_of_a_silent_copy(policy: str) -> None:
    world = slotted(policy)

    falls_silent(world, "f", "a")
    world.call("other", "f")
    assert world.started == [("other", "b")]
    is_heard(world, "f", "a")
    world.finish("other")
    world.calls("x y z", "f")

    assert {device for _, device in world.started} <= {"a", "b"}
    assert sum(grant.device == "a" for grant in world.running.values()) == 2, "it has its second slot again"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_it_had_not_begun_runs_elsewhere_and_it_stays(policy: str) -> None:
    world = world_of("f", "a b", size=60, warm="f", policy=policy)
    world.call("c", "f")
    assert world.running["c"].device == "a"

    falls_silent(world, "f", "a")
    world.refuse("c")

    assert world.started == [("c", "b")]
    assert not any(isinstance(each, m.EvictCopy) for each in world.log)
    assert world.model("f", "a").silent


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("other", ["", "g"])
def test_a_call_waits_for_the_only_device_and_runs_when_it_is_heard(policy: str, other: str) -> None:
    world = world_of("f g", "a", size=60, warm="f", policy=policy)
    falls_silent(world, "f", "a")

    world.call("c", "f")
    if other:
        world.call("d", other)
    assert world.running == {}
    is_heard(world, "f", "a")

    assert world.started == [("c", "a")]
    assert not world.running["c"].cold


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_runs_where_a_copy_was_silent_once_that_has_ended(policy: str) -> None:
    world = world_of("f", "a", size=60, warm="f", policy=policy)
    falls_silent(world, "f", "a")
    world.call("c", "f")

    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "killed", world.model("f", "a").copy))

    assert world.started == [("c", "a")]
    assert world.running["c"].cold


def test_the_calls_in_its_local_queue_go_back() -> None:
    world = world_of("f", "a", size=60, warm="f", policy="lalb", load_s=30.0)
    world.call("runs", "f")
    world.device("b")
    world.call("c", "f")
    assert world.on("a").local_queue == 1

    falls_silent(world, "f", "a")

    assert world.started == [("c", "b")]
    world.finish("runs")


@pytest.mark.parametrize("policy", POLICIES)
def test_no_call_follows_on_a_device_with_a_silent_copy(policy: str) -> None:
    world = world_of("f g", "a", size=40, warm="f g", policy=policy)
    world.calls("first next", "f")

    falls_silent(world, "g", "a")
    world.finish("first")
    assert world.running == {}, "as if the policy had been asked"
    is_heard(world, "g", "a")

    assert set(world.running) == {"next"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_with_a_silent_copy_takes_calls_of_others_only_while_functions_share_devices(policy: str) -> None:
    world = world_of("f g", "a", size=40, warm="f g", policy=policy)
    falls_silent(world, "g", "a")
    world.call("c", "f")
    assert world.running == {}

    shares = Function(FunctionId("s"), "d", Need(50, "spatial"), {"gpu": Profile(0.5, 1.0, 60)})
    world.tell(m.FunctionDeployed(shares))
    assert set(world.running) == {"c"}
    world.finish("c")
    world.tell(m.FunctionRemoved(shares.id, drain=True))
    world.call("later", "f")

    assert world.running == {}


def test_a_call_of_a_cpu_function_loads_another_copy_beside_one_that_is_silent() -> None:
    world = world_of("f", "a", size=10, slots=4, warm="f")
    falls_silent(world, "f", "a")

    world.call("c", "f")
    assert (world.started, world.running["c"].cold) == ([("c", "a")], True)
    world.tell(m.CopySilent(FunctionId("f"), DeviceId("a"), 0, False))

    assert not any(each.draining for each in world.on("a").resident)


def test_a_silent_copy_goes_with_its_device_and_with_its_function() -> None:
    world = world_of("f g", "a b", size=60, warm="f")
    falls_silent(world, "f", "a")
    world.tell(m.DeviceDrained(DeviceId("a")))
    assert world.models("a") == []

    world.call("c", "g")
    world.finish("c")
    falls_silent(world, "g", "b")
    world.tell(m.FunctionRemoved(FunctionId("g")))
    assert world.models("b") == []
    world.call("d", "f")
    assert world.started == [("d", "b")]


def test_one_that_falls_silent_while_it_drains_gets_no_calls_again_before_it_is_heard() -> None:
    world = world_of("f", "a b", size=60, warm="f")
    world.scale("f", 2)
    world.calls("x y", "f")
    world.scale("f", 1)
    (drains,) = [device for device in "ab" if world.model("f", device).draining]
    falls_silent(world, "f", drains)

    world.scale("f", 2)
    assert world.model("f", drains).draining
    is_heard(world, "f", drains)

    assert not world.model("f", drains).draining
