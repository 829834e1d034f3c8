"""Copies that are loaded without a call, and several copies of one function on a device."""

from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, FunctionId, Part
from gpufaas_core.reservations import reservation
from gpufaas_core.units import MiB
from gpufaas_scheduler.handle.copies import MAX_LOADING


def test_a_minimum_of_copies_is_loaded_one_at_a_time() -> None:
    world = World()
    world.device("a")
    world.device("b")

    world.deploy("f", min_copies=2)

    assert world.out == [m.LoadCopy(1, 1, FunctionId("f"), "digest of f", (Part(DeviceId("a"), 10),))]
    world.loaded("f", "a")
    assert world.out == [m.LoadCopy(1, 2, FunctionId("f"), "digest of f", (Part(DeviceId("b"), 10),), copy=1)]


def test_a_call_joins_a_copy_that_is_loading_without_one() -> None:
    world = world_of("f", load_s=3.0, service_s=1.0, min_copies=1)

    world.call("c", "f")

    assert world.started == [("c", "a")]
    assert not world.running["c"].cold
    assert world.on("a").estimated_finish_s == 4.0


def test_a_copy_within_its_minimum_is_not_evicted() -> None:
    world = world_of("kept", size=60, min_copies=1)
    world.loaded("kept", "a")
    world.deploy("f", size=60)

    world.call("refused", "f")
    assert world.rejected == [("refused", "no_room")]
    assert list(world.status.kept_out) == ["f"]

    world.deploy("kept", size=60, min_copies=0)
    assert world.status.kept_out == {}
    world.call("c", "f")
    assert world.started == [("c", "a")]
    assert world.running["c"].victims == ("kept#0",)


def test_a_copy_that_has_no_room_is_loaded_when_there_is() -> None:
    world = world_of("f", size=90)
    world.call("pins", "f")
    world.deploy("kept", size=60, min_copies=1)
    assert world.out == []

    world.finish("pins")

    assert isinstance(world.out[-1], m.LoadCopy)
    assert world.out[-1].victims == ("f#0",)


def test_who_waits_for_a_slot_gets_one_of_the_next_copy_as_soon_as_it_is_loaded() -> None:
    """Not before: a slot of the first copy may be free sooner."""
    world = world_of("echo", slots=1)
    world.call("runs", "echo")
    world.loaded("echo", "a")
    world.device("b")
    world.call("waits", "echo")
    world.call("waits too", "echo")

    world.deploy("echo", slots=1, min_copies=2)

    assert [type(each) for each in world.out] == [m.LoadCopy]
    world.finish("runs")
    assert world.started == [("waits", "a")]
    world.loaded("echo", "b")
    assert world.started == [("waits too", "b")]
    assert not world.running["waits too"].cold


def copies_on(world, device: str = "a", function: str = "echo") -> list[int]:  # type: ignore[no-untyped-def]
    """Their numbers, the least recently used first."""
    return [each.copy for each in world.on(device).resident if each.function == function]


def load_all(world) -> None:  # type: ignore[no-untyped-def]
    while loading := world.loading():
        world.loaded(*loading[0])


def one_device(copies: int, *, slots: int = 1, memory: int = 100, **options):  # type: ignore[no-untyped-def]
    """echo, of size 10, has so many ready copies on a, which is all there is."""
    world = World()
    world.device("a", memory)
    world.deploy("echo", slots=slots, **options)
    world.scale("echo", copies)
    load_all(world)
    return world


def test_a_cpu_function_has_as_many_copies_on_a_device_as_it_should_have() -> None:
    world = one_device(4)

    assert copies_on(world) == [0, 1, 2, 3]
    assert world.on("a").used == 40


def test_the_minimum_is_loaded_beyond_the_number_of_devices() -> None:
    world = World()
    world.device("a")
    world.device("b")

    world.deploy("echo", slots=1, min_copies=5)
    load_all(world)

    assert world.copies == {"echo": 5}


def test_a_model_function_has_one_copy_per_device_whatever_is_asked_for() -> None:
    world = world_of("f", "a b")

    world.scale("f", 5)
    load_all(world)

    assert [world.models(name) for name in "ab"] == [["f"], ["f"]]
    assert world.status.desired == {"f": 5}


def test_copies_are_spread_over_the_devices_before_one_has_two() -> None:
    world = World()
    world.device("a", 1000)
    world.device("b", 50)
    world.deploy("echo", slots=1)

    world.scale("echo", 3)
    load_all(world)

    assert (len(copies_on(world, "a")), len(copies_on(world, "b"))) == (2, 1)  # the third where most is free


def test_a_second_copy_beside_the_first_comes_before_an_eviction_elsewhere() -> None:
    world = world_of("f", "a b", warm="f", size=95)
    world.deploy("echo", slots=1)

    world.scale("echo", 3)
    load_all(world)

    assert copies_on(world, "b") == [0, 1, 2]
    assert world.models("a") == ["f"]


def test_the_first_copy_shows_that_it_loads_before_several_load_at_once() -> None:
    world = world_of("echo", memory=1000, slots=1)

    world.scale("echo", 20)
    assert len(world.loading()) == 1
    world.loaded("echo", "a")
    assert len(world.loading()) == MAX_LOADING
    load_all(world)

    assert world.copies == {"echo": 20}


def test_copies_are_loaded_only_as_far_as_the_memory_goes() -> None:
    world = one_device(9, memory=45)

    assert world.copies == {"echo": 4}
    assert world.status.desired == {"echo": 9}
    world.device("b", 25)
    load_all(world)
    assert world.copies == {"echo": 6}


def test_calls_are_spread_over_the_copies_of_a_device() -> None:
    world = one_device(3, slots=2)

    world.calls(6, "echo")

    assert [world.running[f"c{number}"].copy for number in range(6)] == [0, 1, 2, 0, 1, 2]
    world.call("waits", "echo")
    assert world.status.queued == {"echo": 1}
    world.finish("c4")
    assert world.running["waits"].copy == 1


def test_calls_that_come_one_at_a_time_go_round_the_copies() -> None:
    """As a service spreads them over its pods: no copy is spared the traffic that another gets."""
    world = one_device(3, slots=2)

    served = []
    for number in range(6):
        world.call(f"c{number}", "echo")
        served.append(world.running[f"c{number}"].copy)
        world.finish(f"c{number}")

    assert served == [0, 1, 2, 0, 1, 2]


def test_a_copy_that_dies_is_replaced_under_a_new_number_and_the_others_serve_on() -> None:
    world = one_device(3)
    world.calls(3, "echo")

    world.tell(m.WorkerExited(FunctionId("echo"), DeviceId("a"), "killed", 1))

    assert world.out == [m.LoadCopy(1, 7, FunctionId("echo"), "digest of echo", (Part(DeviceId("a"), 10),), (), 3)]
    assert world.ended == {"c1"}
    world.loaded("echo", "a", 3)
    world.call("next", "echo")
    assert world.running["next"].copy == 3


def test_surplus_copies_of_a_device_are_named_by_their_numbers_and_drain() -> None:
    world = one_device(4)
    world.calls("c0 c1", "echo")

    world.scale("echo", 1)

    assert {(each.device, each.copy) for each in world.out} == {("a", 2), ("a", 3)}
    assert all(isinstance(each, m.EvictCopy) for each in world.out)
    assert world.draining == {("echo", "a", 0)}  # of the two that run a call, the one that began longer ago
    world.finish("c1")
    assert world.out == []
    world.finish("c0")
    assert world.out == [m.EvictCopy(FunctionId("echo"), DeviceId("a"))]


def test_scaling_down_takes_copies_first_where_there_are_most() -> None:
    world = World()
    world.device("a", 30)
    world.device("b", 20)
    world.deploy("echo", slots=1)
    world.scale("echo", 5)
    load_all(world)

    world.scale("echo", 2)

    assert (len(copies_on(world, "a")), len(copies_on(world, "b"))) == (1, 1)


def test_idle_copies_of_a_device_are_victims_one_by_one_and_come_back_when_calls_wait() -> None:
    world = one_device(9, min_copies=2)
    world.deploy("f", size=45)

    world.call("c", "f")

    assert world.running["c"].victims == ("echo#0", "echo#1", "echo#2", "echo#3")
    assert world.copies == {"echo": 5, "f": 1}
    world.finish("c")
    assert world.out == []
    world.calls(6, "echo")
    assert [each.victims for each in world.out] == [("f#0",), (), (), ()]
    assert [each.copy for each in world.out] == [9, 10, 11, 12]


def test_a_refused_miss_ends_the_copies_that_were_to_make_room_for_it() -> None:
    world = one_device(9)
    world.deploy("f", size=25)
    world.call("c", "f")
    assert world.running["c"].victims == ("echo#0", "echo#1")

    world.refuse("c")

    evicted = [(each.function, each.copy) for each in world.out if isinstance(each, m.EvictCopy)]
    assert evicted == [("echo", 0), ("echo", 1)]


def test_what_one_copy_was_measured_to_need_is_what_it_is_charged() -> None:
    world = world_of("echo", learn=True, memory=1000 * MiB, slots=1, size=100 * MiB)
    world.scale("echo", 2)
    load_all(world)

    world.tell(m.Measured(FunctionId("echo"), DeviceId("a"), 20 * MiB, 1))

    expected = reservation(20 * MiB)
    assert world.model("echo", "a", 1).memory == expected
    assert world.model("echo", "a", 0).memory == 100 * MiB
    world.scale("echo", 3)
    assert world.model("echo", "a", 2).memory == expected
