"""Several calls at once on one copy of a model: they join the first one within its hold of the device."""

import pytest
from tests.unit.scheduler.world import World, starts, state_of

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, Function, FunctionId, Need, Profile
from gpufaas_scheduler.policies import POLICIES
from gpufaas_scheduler.world.clearing import WAIT_S
from gpufaas_scheduler.world.conditions import Condition


def deploy(world: World, name: str, need: Need, load_s: float = 3.0, size: int = 10) -> None:
    world.tell(m.FunctionDeployed(Function(FunctionId(name), name, need, {"*": Profile(load_s, 1.0, size)})))


def a_world(policy: str = "lalb-o3", devices: str = "a", slots: int = 3) -> World:
    world = World(policy)
    for each in devices:
        world.device(each)
    deploy(world, "f", Need(slots=slots))
    deploy(world, "g", Need())
    return world


@pytest.mark.parametrize("policy", POLICIES)
def test_as_many_calls_run_at_once_on_a_copy_as_it_has_slots(policy: str) -> None:
    world = a_world(policy)

    assert starts(world.call("1", "f")) == [("1", "a")]
    assert starts(world.call("2", "f")) == [("2", "a")], "also while it loads"
    world.loaded("f", "a")
    assert starts(world.call("3", "f")) == [("3", "a")]
    assert starts(world.call("4", "f")) == []
    assert starts(world.finish("2")) == [("4", "a")]
    assert {each.copy for each in world.running.values()} == {0}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_is_free_for_others_when_the_last_call_has_ended(policy: str) -> None:
    world = a_world(policy)
    for name in "12":
        world.call(name, "f")
    world.loaded("f", "a")
    assert starts(world.call("other", "g")) == []

    assert starts(world.finish("1")) == [], "the one that held the device hands it on"
    assert starts(world.finish("2")) == [("other", "a")]
    assert starts(world.call("3", "f")) == [], "it joins calls of its own function only"
    assert starts(world.finish("other")) == [("3", "a")]


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_that_waited_for_the_device_start_together(policy: str) -> None:
    world = a_world(policy)
    world.warm("f", "a")
    world.call("other", "g")
    for name in "1234":
        assert starts(world.call(name, "f")) == []

    assert sorted(starts(world.finish("other"))) == [("1", "a"), ("2", "a"), ("3", "a")]


@pytest.mark.parametrize("policy", [each for each in POLICIES if each != "lb"])
def test_an_idle_holder_comes_before_a_copy_that_runs_calls(policy: str) -> None:
    world = a_world(policy, "ab")
    world.warm("f", "a")
    world.call("other", "g")
    world.scale("f", 2)
    world.finish("other")
    world.loaded("f", "b", 1)
    assert len({each for name in "12" for _, each in starts(world.call(name, "f"))}) == 2

    assert len(starts(world.call("3", "f"))) == 1, "both are busy: it joins one of them"


def test_a_copy_that_is_to_go_takes_no_further_calls() -> None:
    world = a_world()
    world.call("1", "f")
    world.loaded("f", "a")
    world.tell(m.DeviceDrained(world.status.devices[0].device.id))

    assert starts(world.call("2", "f")) == []
    world.tell(m.DeviceDrained(world.status.devices[0].device.id, drain=False))
    assert starts(world.finish("1")) == [("2", "a")]
    assert world.running["2"].copy == 1


def test_calls_of_a_local_queue_take_the_slots_that_become_free() -> None:
    world = a_world("lalb", "ab", slots=2)
    world.warm("f", "a")
    for name in "1234":
        world.call(name, "f")

    assert [each.call for each in world.running.values()] == ["1", "2"], "the others are there sooner than a load"
    assert starts(world.finish("2")) == [("3", "a")]
    assert starts(world.finish("1")) == [("4", "a")]


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_that_join_each_other_without_a_pause_keep_no_other_model_waiting_for_ever(policy: str) -> None:
    world = a_world(policy, slots=2)
    world.warm("g", "a")
    world.call("f0", "f")
    world.loaded("f", "a")
    world.call("f1", "f")
    world.call("other", "g")
    for number in range(2, 100):
        world.now += 0.5
        world.call(f"f{number}", "f")
        if f := [each for each, grant in world.running.items() if grant.function == "f"]:
            world.finish(f[0])
        if "other" in world.running:
            break

    assert world.now <= WAIT_S + 2.0, "two calls of f ran at any time"
    world.finish("other")
    assert [grant.function for grant in world.running.values()] == ["f", "f"]


def test_times_of_calls_beside_others_of_their_copy_are_learnt_apart_from_those_of_calls_alone() -> None:
    world = World("lalb", learn=True)
    world.device("a")
    deploy(world, "f", Need(slots=3))
    world.call("first", "f")
    world.loaded("f", "a")
    world.finish("first", 1.0)
    costs = world.costs("f")

    for number in range(5):
        world.call(f"a{number}", "f")
        world.call(f"b{number}", "f")
        world.finish(f"b{number}", 1.8)
        world.finish(f"a{number}", 2.0)  # alone at its end, but not all the time

    assert costs.service_s == 1.0
    assert costs.grant_s(0.0, Condition(neighbours=1)) == pytest.approx(1.9, abs=0.1)
    world.calls("alone joins", "f")
    alone, joins = state_of(world.engine).devices[DeviceId("a")].grants()
    assert (alone.estimate_s, joins.estimate_s) == (1.0, costs.grant_s(0.0, Condition(neighbours=1)))
