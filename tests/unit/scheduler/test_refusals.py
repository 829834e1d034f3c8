"""Calls that a node refuses, or whose device leaves, are placed again."""

import pytest
from tests.unit.scheduler.world import World, two_devices, world_of

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_core.snapshot import DeviceSnapshot, ResidentSnapshot, RunningCall
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy


def loading_in_place_of_another() -> World:
    """The call ``c`` loads ``f`` on the only device, and ``g`` had to leave for it."""
    world = world_of("f g", warm="g", size=60)
    world.call("c", "f")
    return world


def test_a_refused_call_is_placed_again_and_its_reservation_is_undone() -> None:
    world = loading_in_place_of_another()
    first = world.running["c"]
    assert first.victims == ("g#0",)

    world.refuse("c")

    # The victim's memory was promised: the node is told to make sure that it is gone.
    assert world.out[0] == m.EvictCopy(FunctionId("g"), DeviceId("a"))
    again = world.running["c"]
    assert again.cold
    assert again.number > first.number
    assert again.victims == ()
    assert world.models("a") == ["f"]
    assert world.on("a").misses == 2


def test_what_a_node_loads_for_a_call_whose_gateway_does_not_reach_it_stays() -> None:
    world = loading_in_place_of_another()

    world.refuse("c", opened=True)

    again = world.running["c"]
    assert not any(isinstance(each, m.EvictCopy) for each in world.out)
    assert (again.device, again.cold) == ("a", False), "it hits what is loading there"
    assert world.models("a") == ["f"]
    assert world.on("a").misses == 2


def test_a_node_that_comes_back_without_having_heard_of_an_abort_is_told_again() -> None:
    engine = Engine(policy=make_policy("lalb"), replacement=Lru())
    function, call = FunctionId("f"), CallId("c")
    device = Device(DeviceId("n/gpu:0"), "gpu", 100)
    engine.handle(m.FunctionDeployed(Function(function, "d", profiles={"*": Profile(1.0, 1.0, 60)})), 0.0)
    engine.handle(m.DeviceJoined(device), 0.0)
    engine.handle(m.Arrived(call, function), 0.0)
    assert engine.handle(m.CallerLeft(call), 1.0) == [m.Abort(call, device.id)]
    resident = ResidentSnapshot(function, "d", 60)

    for abandoned, told in ((False, [m.Abort(call, device.id)]), (True, [])):
        running = RunningCall(call, function, begun=True, abandoned=abandoned)
        snapshot = DeviceSnapshot(device, (resident,), (running,))
        assert engine.handle(m.DeviceJoined(device, snapshot), 2.0) == told


def test_a_refused_call_keeps_its_place_in_the_queue() -> None:
    world = world_of("f g h", policy="lalb", size=60)
    world.call("first", "f")
    world.call("second", "g")

    world.refuse("first")

    assert world.started == [("first", "a")]


def test_three_refusals_are_enough() -> None:
    world = world_of("f")
    world.call("c", "f")

    world.refuse("c")
    world.refuse("c")
    world.refuse("c")

    assert world.rejected == [("c", "refused")]
    assert world.on("a").busy is False


@pytest.mark.parametrize(
    "goes",
    [m.DeviceLeft(DeviceId("b"), "its node is silent"), m.WorkerExited(FunctionId("g"), DeviceId("b"), "killed")],
    ids=["device", "worker"],
)
def test_the_local_queue_of_a_device_that_leaves_or_whose_worker_exits_is_placed_elsewhere(goes: m.Event) -> None:
    world = two_devices()
    world.calls("runs local", "g")

    world.tell(goes)

    assert world.started == [("local", "a")]
    assert "runs" not in world.running
    assert not [each for each in world.status.devices if each.device.id == "b" and each.busy]


def test_calls_beside_one_that_was_refused_cold_are_over_when_their_device_leaves() -> None:
    """Their copy is taken for gone by then; their node was not."""
    world = world_of("cpu", size=10, slots=3)
    for name in ("loads it", "waits for the load", "too"):
        world.call(name, "cpu")
    world.refuse("loads it")
    assert world.status.running == {"cpu": 3}, "the first one again, on a copy of its own"

    world.engine.handle(m.DeviceLeft(DeviceId("a"), "gone"), 1.0)

    assert world.engine.status(1.0).running == {}
    assert world.engine.calls() == []
