"""CPU functions share a device: slots, free memory first, the copy with the fewest calls."""

from tests.unit.scheduler.world import World, world_of


def test_a_cpu_function_runs_as_many_calls_as_it_has_slots_and_queues_the_rest() -> None:
    world = world_of("echo", slots=2)

    world.calls(3, "echo")

    assert list(world.running) == ["c0", "c1"]
    assert [grant.cold for grant in world.running.values()] == [True, False]
    world.finish("c0")
    assert world.started == [("c2", "a")]


def test_a_function_may_call_another_on_its_own_device() -> None:
    """The model function is busy until its inner call ends: the inner one must not wait for the device."""
    world = world_of("outer")
    world.deploy("inner", slots=1)
    world.call("o", "outer")

    world.call("i", "inner")

    assert world.started == [("i", "a")]
    assert world.on("a").busy


def test_a_cpu_function_takes_free_memory_before_it_evicts() -> None:
    world = World()
    world.device("a", 100)
    world.device("b", 80)
    world.deploy("f", size=90)
    world.warm("f", "a")
    world.deploy("echo", slots=1, size=20)

    world.call("c", "echo")

    assert world.started == [("c", "b")]
    assert world.running["c"].victims == ()


def test_a_cpu_function_evicts_what_is_cheapest_to_load_again() -> None:
    world = world_of("dear", size=90, load_s=9.0)
    world.deploy("cheap", size=90, load_s=1.0)
    world.warm("dear", "a")
    world.device("b")
    world.call("occupy", "dear")
    world.warm("cheap", "b")
    world.finish("occupy")
    world.deploy("echo", slots=1, size=20)

    world.call("c", "echo")

    assert world.running["c"].victims == ("cheap#0",)


def test_a_cpu_function_that_does_not_fit_now_is_placed_when_a_pin_ends() -> None:
    world = world_of("f", size=90)
    world.deploy("echo", slots=1, size=20)
    world.call("pins", "f")
    world.call("c", "echo")
    assert world.started == []

    world.finish("pins")

    assert world.started == [("c", "a")]


def test_the_worker_with_the_fewest_calls_is_taken() -> None:
    world = world_of("echo", "a b", slots=3, min_copies=2)
    world.loaded("echo", "a")
    world.loaded("echo", "b")

    world.calls(4, "echo")

    assert [grant.device for grant in world.running.values()] == ["a", "b", "a", "b"]
