"""A revision that succeeds another one is loaded beside it, before calls are placed at it."""

import pytest
from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, FunctionId, NodeId

OLD, NEW = FunctionId("f@1"), FunctionId("f@2")


def removed(world: World, name: str, *, drain: bool = True) -> None:
    world.tell(m.FunctionRemoved(FunctionId(name), drain))


def two_devices(memory: int = 100) -> World:
    """Each holds an idle copy of f@1, of 10 bytes."""
    world = World().set_up("f@1", "a b", memory=memory)
    world.scale("f@1", 2)
    for device in "ab":
        world.loaded("f@1", device)
    return world


def test_it_is_loaded_where_and_as_often_as_the_old_one_is_and_that_one_goes_on() -> None:
    world = two_devices()

    world.deploy("f@2", 20, succeeds="f@1")
    world.loaded("f@2", world.loading()[0][1])
    world.loaded("f@2", world.loading()[0][1])
    world.call("old", "f@1")

    assert world.copies == {OLD: 2, NEW: 2}
    assert world.running["old"].function == OLD
    assert not world.running["old"].cold


def test_no_copy_of_the_old_one_is_evicted_for_it_but_idle_copies_of_others_are() -> None:
    world = World().set_up("f@1 g", "a", memory=25, warm="f@1 g")

    world.deploy("f@2", 10, succeeds="f@1")

    assert world.models("a") == ["f@1", "f@2"]


def test_without_room_beside_it_nothing_is_evicted_and_the_status_says_that_it_lacks_copies() -> None:
    world = World().set_up("f@1", "a", memory=25, warm="f@1")

    world.deploy("f@2", 20, succeeds="f@1")

    assert world.models("a") == ["f@1"]
    assert NEW in world.status.lacking


def test_without_room_its_weights_are_brought_to_where_the_old_one_is_and_only_then_it_lacks_copies() -> None:
    world = World()
    world.deploy("f@1", 10)
    world.tell(m.DeviceJoined(Device(DeviceId("n/a"), "gpu", 25, host_memory=100)))
    world.warm("f@1", "n/a")

    world.deploy("f@2", 20, succeeds="f@1")

    assert m.Stage(NEW, NodeId("n")) in world.out
    assert world.status.lacking == {}
    world.tell(m.Staged(NodeId("n"), NEW, 20))
    assert NEW in world.status.lacking


@pytest.mark.parametrize("kept", [True, False])
def test_it_is_kept_out_by_the_minimum_of_others_and_not_by_that_of_the_old_one(kept: bool) -> None:
    world = World()
    world.deploy("f@1", 10, min_copies=1)
    world.deploy("g", 10, min_copies=int(kept))
    world.device("a", 25)
    for name, device, _ in world.loading():
        world.loaded(name, device)

    world.deploy("f@2", 20, min_copies=1, succeeds="f@1")

    assert list(world.status.kept_out) == ([NEW] if kept else [])


def test_when_the_old_one_is_removed_it_takes_the_room_without_a_call() -> None:
    world = World().set_up("f@1", "a", memory=25, warm="f@1")
    world.call("runs", "f@1")
    world.deploy("f@2", 20, succeeds="f@1")

    removed(world, "f@1")
    world.call("waits", "f@2")
    assert world.models("a") == ["f@1"]
    world.finish("runs")

    assert world.models("a") == ["f@2"]
    world.loaded("f@2", "a")
    assert world.running["waits"].function == NEW


@pytest.mark.parametrize("first", ["loaded", "removed"])
def test_once_it_is_loaded_and_the_old_one_removed_its_calls_decide_about_its_copies(first: str) -> None:
    world = World().set_up("f@1 g", "a", memory=20, warm="f@1")
    world.deploy("f@2", 10, succeeds="f@1")
    for step in (first, "loaded" if first == "removed" else "removed"):
        if step == "removed":
            removed(world, "f@1")
        else:
            assert NEW in world.status.desired
            world.loaded("f@2", "a")

    assert world.status.desired == {}
    world.deploy("h", 20)
    world.call("other", "h")
    assert world.models("a") == ["h"], "it is no more pinned than others"


def test_if_it_is_removed_the_old_one_is_as_before() -> None:
    world = World().set_up("f@1", "a", memory=25, warm="f@1")
    world.deploy("f@2", 20, succeeds="f@1")

    removed(world, "f@2", drain=False)

    assert world.status.lacking == {}
    world.call("old", "f@1")
    assert not world.running["old"].cold


def test_a_minimum_of_copies_is_loaded_beside_that_of_the_old_one() -> None:
    world = World()
    world.deploy("f@1", 10, min_copies=1)
    world.device("a", 30)
    world.loaded("f@1", "a")

    world.deploy("f@2", 10, min_copies=1, succeeds="f@1")
    world.loaded("f@2", "a")

    assert world.models("a") == ["f@1", "f@2"]


def test_a_revision_that_is_to_succeed_one_that_is_gone_is_loaded_by_its_calls() -> None:
    world = world_of("f@2")

    world.deploy("f@2", 10, succeeds="f@1")

    assert world.copies == {}
    assert world.status.desired == {}


# --- where each device has room for one copy only ---


def full(devices: str, **declared: object) -> World:
    """Each device holds an idle copy of f@1, and has no room for another one; f@2 is to succeed it."""
    world = World().set_up("f@1", devices, memory=15, **declared)
    world.scale("f@1", len(devices.split()))
    for device in devices.split():
        world.loaded("f@1", device)
    return world


def test_it_takes_the_device_of_one_copy_and_calls_go_to_the_others() -> None:
    world = full("a b")

    world.deploy("f@2", 10, succeeds="f@1")

    [(_, device, _)] = world.loading()
    assert world.copies == {OLD: 1, NEW: 1}
    world.call("old", "f@1")
    assert not world.running["old"].cold
    world.loaded("f@2", device)
    removed(world, "f@1")
    world.call("new", "f@2")
    assert not world.running["new"].cold


def test_it_takes_one_device_after_the_other_until_the_old_one_has_as_many() -> None:
    world = full("a b c d e")

    world.deploy("f@2", 10, succeeds="f@1")
    seen = []
    while world.loading():
        seen.append((world.copies[OLD], world.copies[NEW]))
        world.loaded("f@2", world.loading()[0][1])

    assert seen == [(4, 1), (3, 2)]
    assert NEW in world.status.lacking, "the rest has no room while the old one serves"


def test_where_all_copies_run_calls_one_drains_and_calls_that_wait_do_not_take_its_device() -> None:
    world = full("a b")
    world.calls(8, "f@1")

    world.deploy("f@2", 10, succeeds="f@1")

    assert world.status.rolling == (NEW,)
    [drained] = {each for each in "ab" if world.model("f@1", each).draining}
    while not world.loading():
        [call] = [call for call, grant in world.running.items() if grant.device == drained]
        world.finish(call)
    assert [each[:2] for each in world.loading()] == [("f@2", drained)]
    assert world.status.rolling == ()
    while world.running:
        call, grant = next(iter(world.running.items()))
        assert (grant.device, grant.cold) == ({"a": "b", "b": "a"}[drained], False)
        world.finish(call)
    assert len(world.ended) == 8


def test_calls_that_wait_for_the_old_one_do_not_take_the_room_of_the_new_one_before_it_has_the_calls() -> None:
    """They evicted it as soon as it was loaded: it was loaded again and again, until the gateway saw it in between."""
    world = full("a b")
    world.calls(8, "f@1")
    world.deploy("f@2", 10, succeeds="f@1")
    while not world.loading():
        world.finish(next(iter(world.running)))

    world.loaded("f@2", world.loading()[0][1])

    assert world.waiting
    assert world.copies == {OLD: 1, NEW: 1}
    while world.running:
        world.finish(next(iter(world.running)))
    assert len(world.ended) == 8


def test_a_minimum_of_copies_is_not_loaded_again_until_the_new_one_is_given_up() -> None:
    world = full("a b", min_copies=2)

    world.deploy("f@2", 10, min_copies=2, succeeds="f@1")
    assert world.copies == {OLD: 1, NEW: 1}
    removed(world, "f@2", drain=False)

    assert world.copies == {OLD: 2}
    assert [each[0] for each in world.loading()] == [OLD]


def test_a_copy_that_is_needed_for_a_call_without_an_end_does_not_drain() -> None:
    world = full("a b")
    for name in ("c0", "c1"):
        world.tell(m.Arrived(CallId(name), OLD, endless=True))

    world.deploy("f@2", 10, succeeds="f@1")

    assert world.status.rolling == ()
    assert NEW in world.status.lacking


def test_no_copy_goes_where_the_new_one_would_not_fit_either() -> None:
    world = full("a b")

    world.deploy("f@2", 20, succeeds="f@1")

    assert world.copies == {OLD: 2}
