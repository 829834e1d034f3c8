"""A drained device completes its calls, evicts its copies, and takes nothing new until the drain is undone."""

import pytest
from tests.unit.scheduler.world import World, starts, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, FunctionId

OTHER = {"a": "b", "b": "a"}
every_policy = pytest.mark.parametrize("policy", ["lb", "lalb", "lalb-o3", "least-wait"])
each_kind = pytest.mark.parametrize("slots", [None, 2], ids=["model", "cpu"])


def two_devices(policy: str = "lalb-o3", functions: str = "f", **declared: object) -> World:
    return world_of(functions, "a b", policy=policy, load_s=1.0, size=40, **declared)


def loaded_by(world: World, call: str) -> str:
    """A call of f loads it; return the device."""
    world.call(call, "f")
    ((_, device),) = world.started
    world.loaded("f", device)
    return device


def drain(world: World, device: str, *, undone: bool = False) -> list[m.Command]:
    return world.tell(m.DeviceDrained(DeviceId(device), drain=not undone))


def evicted(commands: list[m.Command]) -> list[str]:
    return [each.device for each in commands if isinstance(each, m.EvictCopy)]


@every_policy
@each_kind
def test_a_drained_device_takes_no_call(policy: str, slots: int | None) -> None:
    world = two_devices(policy, "f g", slots=slots)
    drain(world, "a")

    for at, name in enumerate("fgfg"):
        world.now = 1.0 + at
        world.call(f"c{at}", name)
        for call, device in world.started:
            assert device == "b"
            world.finish(call, 0.1)


@every_policy
@each_kind
def test_what_runs_there_ends_and_then_its_copy_goes(policy: str, slots: int | None) -> None:
    world = two_devices(policy, slots=slots)
    device = loaded_by(world, "c")

    assert not evicted(drain(world, device))
    assert evicted(world.finish("c")) == [device]
    world.call("d", "f")
    assert world.started == [("d", OTHER[device])]


def test_idle_copies_go_at_once() -> None:
    world = two_devices()
    device = loaded_by(world, "c")
    world.finish("c")

    assert drain(world, device) == [m.EvictCopy(FunctionId("f"), DeviceId(device))]


def test_a_minimum_of_copies_is_kept_elsewhere() -> None:
    world = two_devices(min_copies=1)
    ((_, device, _),) = world.loading()
    world.loaded("f", device)

    commands = drain(world, device)

    assert evicted(commands) == [device]
    assert [each.device for each in commands if isinstance(each, m.LoadCopy)] == [OTHER[device]]


@every_policy
def test_calls_wait_while_all_is_drained_and_go_on_when_a_device_is_taken_back(policy: str) -> None:
    world = two_devices(policy)
    drain(world, "a")
    drain(world, "b")
    world.call("c", "f")
    assert not world.started

    drain(world, "b", undone=True)

    assert world.started == [("c", "b")]


@pytest.mark.parametrize("policy", ["lalb", "lalb-o3", "least-wait"])
def test_a_local_queue_goes_elsewhere(policy: str) -> None:
    world = two_devices(policy)
    device = loaded_by(world, "c0")
    drain(world, OTHER[device])
    world.call("c1", "f")
    assert not world.started
    drain(world, OTHER[device], undone=True)

    commands = drain(world, device)
    assert not world.started or world.started[0][1] == OTHER[device]
    ended = world.finish("c0")

    assert {on for _, on in starts([*commands, *ended])} <= {OTHER[device]}
    assert world.engine.knows(CallId("c1"))
