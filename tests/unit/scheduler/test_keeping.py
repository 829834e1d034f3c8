"""Which grants a gateway may keep, and what the scheduler counts of the calls that ran by one."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from tests.unit.scheduler.world import World, state_of, world_of

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.keeping import KEEP_S
from gpufaas_scheduler.policies import make_policy

ECHO = FunctionId("echo")


def warm(slots: int = 4) -> World:
    """Return a world where `echo`, a CPU function, has a copy that is loaded."""
    return world_of("echo", warm="echo", slots=slots)


def kept(world: World, call: str) -> float:
    return world.engine.keep_s(world.running[call])


def test_a_hit_of_a_function_whose_calls_start_at_once_may_be_kept() -> None:
    world = warm()
    world.call("c", "echo")

    assert kept(world, "c") == KEEP_S


def test_half_of_the_slots_of_a_copy_stay_free_for_others() -> None:
    world = warm(slots=5)
    may = []
    for number in range(4):
        world.call(f"c{number}", "echo")
        may.append(kept(world, f"c{number}") > 0)

    assert may == [True, True, False, False]


def test_a_copy_with_one_slot_is_not_kept() -> None:
    world = warm(slots=1)
    world.call("c", "echo")

    assert kept(world, "c") == 0.0


def test_a_call_that_reserves_compute_is_placed_each_time() -> None:
    world = world_of("f", warm="f")
    world.call("c", "f")

    assert not world.running["c"].cold
    assert kept(world, "c") == 0.0


def test_a_share_is_held_anyway_so_its_calls_are_like_those_of_a_cpu_function() -> None:
    device, half = DeviceId("a"), FunctionId("half")
    engine = Engine(policy=make_policy("lb"), replacement=Lru())
    function = Function(half, "d", Need(50, "share", slots=4), {"*": Profile(3.0, 1.0, 10)})
    for event in (
        m.DeviceJoined(Device(device, "gpu", 100)), m.FunctionDeployed(function), m.Arrived(CallId("cold"), half),
        m.Loaded(half, device, 3.0, 10), m.Finished(CallId("cold"), device, 1.0),
    ):  # fmt: skip
        engine.handle(event, 0.0)
    (command,) = engine.handle(m.Arrived(CallId("c"), half), 1.0)

    assert isinstance(command, m.StartCall)
    assert engine.keep_s(command.grant) == KEEP_S


def _cold(world: World) -> None:
    world.call("c", "echo")
    world.running["c"] = replace(world.running["c"], cold=True)


def _waited_for_a_load(world: World) -> None:
    world.call("c", "echo")
    world.running["c"] = replace(world.running["c"], load_s=1.0)


def _loads(world: World) -> None:
    world.tell(m.WorkerExited(ECHO, DeviceId("a"), "it was killed"))
    world.calls("miss c", "echo")


def _nested(world: World) -> None:
    world.call("outer", "echo")
    outer = m.Outer(DeviceId("a"), ECHO, world.running["outer"].copy, "outer")
    world.tell(m.Arrived(CallId("c"), ECHO, 9.0, outer=outer))


def _drains(world: World) -> None:
    world.call("c", "echo")
    world.tell(m.DeviceDrained(DeviceId("a")))


def _others_wait_for_room(world: World) -> None:
    world.call("c", "echo")
    world.deploy("large", size=95, slots=4)
    world.call("waits", "large")
    assert "waits" in world.waiting


def _removed(world: World) -> None:
    world.call("c", "echo")
    world.tell(m.FunctionRemoved(ECHO))


@pytest.mark.parametrize(
    "happens", [_cold, _waited_for_a_load, _loads, _nested, _drains, _others_wait_for_room, _removed]
)
def test_what_others_may_need_is_not_kept(happens: Callable[[World], None]) -> None:
    world = warm(slots=8)
    happens(world)

    assert kept(world, "c") == 0.0


def test_calls_that_may_make_others_are_placed_each_time_since_those_end_with_them() -> None:
    """Else an inner call would end with the first call by its grant, which may have another time limit."""
    world = warm()
    world.deploy("outer", slots=4)
    world.warm("outer", "a")
    world.call("first", "outer")
    before = kept(world, "first")
    outer = m.Outer(DeviceId("a"), FunctionId("outer"), world.running["first"].copy, "first")
    world.tell(m.Arrived(CallId("inner"), ECHO, 9.0, outer=outer))
    world.finish("inner")
    world.finish("first")

    world.call("c", "outer")
    world.call("other", "echo")

    assert (before, kept(world, "c"), kept(world, "other")) == (KEEP_S, 0.0, KEEP_S)


def test_a_grant_that_is_over_is_not_kept() -> None:
    world = warm()
    world.call("c", "echo")
    grant = world.running["c"]
    world.finish("c")

    assert world.engine.keep_s(grant) == 0.0


def test_further_calls_of_a_grant_are_counted_as_hits_that_were_served() -> None:
    world, alone = warm(), warm()
    for number in range(5):
        alone.call(f"c{number}", "echo")
        alone.finish(f"c{number}", 0.5)

    world.call("c", "echo")
    world.tell(m.Finished(CallId("c"), DeviceId("a"), 0.5, further=4))

    def counted(one: World) -> tuple[object, ...]:
        device = state_of(one.engine).devices[DeviceId("a")]
        return device.hits, device.misses, device.served, state_of(one.engine).functions[ECHO].called

    assert counted(world) == counted(alone)
    assert world.model("echo", "a").running == 0


def test_of_a_grant_that_is_over_already_nothing_is_counted() -> None:
    world = warm()
    world.call("c", "echo")
    world.finish("c")
    before = state_of(world.engine).devices[DeviceId("a")].served

    world.tell(m.Finished(CallId("c"), DeviceId("a"), 0.5, further=4))

    assert state_of(world.engine).devices[DeviceId("a")].served == before
    assert world.engine.ignored["Finished"] == 1
