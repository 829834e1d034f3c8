"""The effects of a changed number of copies."""

from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, FunctionId, Part


def warm_copies(copies: int, *, slots: int = 1, devices: str = "abc", **options):  # type: ignore[no-untyped-def]
    """echo is ready on the first *copies* of the devices."""
    world = World()
    for name in devices:
        world.device(name)
    world.deploy("echo", slots=slots, **options)
    world.scale("echo", copies)
    for name in devices[:copies]:
        world.loaded("echo", name)
    return world


def test_a_function_that_is_scaled_up_gets_its_copies_one_after_the_other() -> None:
    world = world_of("echo", "a b", slots=1)

    world.scale("echo", 2)

    assert world.out == [m.LoadCopy(1, 1, FunctionId("echo"), "digest of echo", (Part(DeviceId("a"), 10),))]
    assert world.status.desired == {"echo": 2}
    world.loaded("echo", "a")
    assert world.out == [m.LoadCopy(1, 2, FunctionId("echo"), "digest of echo", (Part(DeviceId("b"), 10),), copy=1)]


def test_calls_that_waited_are_spread_over_the_copies_that_run_the_fewest() -> None:
    world = warm_copies(2, slots=2)
    world.scale("echo", 0)
    assert world.copies == {}
    world.calls(4, "echo")  # the first loads it on a
    assert world.status.queued == {"echo": 2}

    world.scale("echo", 2)
    world.loaded("echo", "a")
    world.loaded("echo", "b")

    assert world.started == [("c2", "b"), ("c3", "b")]
    world.finish("c0")
    world.call("next", "echo")
    assert world.started == [("next", "a")]


def test_a_call_does_not_wait_for_a_load_while_a_ready_copy_has_a_free_slot() -> None:
    world = warm_copies(1, slots=2)
    world.call("c0", "echo")
    world.scale("echo", 2)

    world.call("c1", "echo")

    assert world.started == [("c1", "a")]


def test_a_call_of_a_model_does_not_wait_for_a_load_while_its_ready_copy_is_idle() -> None:
    world = world_of("f g h", "a b", policy="least-wait", memory=30)
    world.warm("f", "a")
    world.call("on a", "f")
    world.warm("g", "b")
    world.finish("on a")
    world.call("on b", "g")
    for _ in range(3):
        world.warm("h", "a")  # so what else a holds would be missed more than what b holds
    world.finish("on b")
    world.scale("f", 2)
    assert world.loading() == [("f", "b", 1)]

    world.call("c", "f")

    assert world.running["c"].device == "a"


def test_a_surplus_copy_takes_no_new_call_and_goes_when_its_last_one_ends() -> None:
    world = warm_copies(2, slots=2)
    world.calls(3, "echo")  # two on a, one on b

    world.scale("echo", 1)

    assert world.out == []
    assert world.draining == {("echo", "b", 1)}
    world.call("c3", "echo")
    assert world.status.queued == {"echo": 1}
    world.finish("c0")
    assert world.started == [("c3", "a")]
    world.finish("c1")
    assert world.out == [m.EvictCopy(FunctionId("echo"), DeviceId("b"), 1)]
    assert world.copies == {"echo": 1}


def test_a_copy_that_drains_is_taken_back_before_another_is_loaded() -> None:
    world = warm_copies(2)
    world.calls("c0 c1", "echo")
    world.scale("echo", 1)
    assert world.draining

    world.scale("echo", 2)

    assert world.out == []
    assert world.draining == set()
    assert world.copies == {"echo": 2}


def test_a_copy_that_drains_is_taken_back_when_the_others_die() -> None:
    world = warm_copies(2, devices="ab")
    world.calls("c0 c1", "echo")
    world.scale("echo", 1)
    ((_, drains, _),) = world.draining
    stays = "a" if drains == "b" else "b"
    world.call("waits", "echo")

    world.tell(m.WorkerExited(FunctionId("echo"), DeviceId(stays), "killed"))

    assert world.draining == set()
    world.finish("c0" if drains == "a" else "c1")
    assert world.started == [("waits", drains)]


def test_a_function_that_is_scaled_to_zero_leaves_the_memory_at_once_when_it_is_idle() -> None:
    world = warm_copies(2)

    world.scale("echo", 0)

    assert world.out == [m.EvictCopy(FunctionId("echo"), DeviceId(name), copy) for copy, name in enumerate("ab")]
    assert world.status.desired == {"echo": 0}


def test_a_call_at_zero_loads_its_function_and_ends_the_zero() -> None:
    world = warm_copies(1)
    world.scale("echo", 0)

    world.call("c", "echo")

    assert world.running["c"].cold
    assert world.status.desired == {}
    world.finish("c")
    assert world.copies == {"echo": 1}


def test_a_call_that_comes_while_the_last_copy_drains_is_a_hit_on_it() -> None:
    world = warm_copies(1, slots=2)
    world.call("runs", "echo")
    world.scale("echo", 0)
    assert world.draining == {("echo", "a", 0)}

    world.call("c", "echo")

    assert world.started == [("c", "a")]
    assert not world.running["c"].cold
    assert world.draining == set()


def test_a_function_with_waiting_calls_is_not_scaled_to_zero() -> None:
    world = warm_copies(1)
    world.calls("runs waits", "echo")

    world.scale("echo", 0)

    assert world.status.desired == {}
    world.finish("runs")
    assert world.started == [("waits", "a")]


def test_bounds_hold_against_scaling() -> None:
    world = warm_copies(2, min_copies=1, max_copies=2)

    world.scale("echo", 9)
    assert world.status.desired == {"echo": 2}
    world.scale("echo", 0)
    assert world.status.desired == {"echo": 1}
    assert world.copies == {"echo": 1}


def test_scaling_up_takes_the_memory_of_idle_copies_and_of_nobody_else() -> None:
    world = world_of("pinned", "a b", size=60, min_copies=1)
    world.loaded("pinned", "a")
    world.deploy("idle", size=60)
    world.call("c", "idle")
    world.finish("c")
    world.deploy("echo", size=60, slots=1)

    world.scale("echo", 2)

    (load,) = world.out
    assert isinstance(load, m.LoadCopy)
    assert (load.device, load.victims) == ("b", ("idle#0",))
    world.loaded("echo", "b")
    assert world.out == []
    assert world.copies == {"pinned": 1, "echo": 1}


def test_copies_beyond_the_minimum_give_way_and_come_back_when_there_is_room() -> None:
    world = world_of("echo", size=60, slots=1)
    world.scale("echo", 1)
    world.loaded("echo", "a")
    world.deploy("f", size=60)

    world.call("c", "f")

    assert world.running["c"].victims == ("echo#0",)
    world.finish("c")
    assert world.out == []  # f is idle now, but who gives way does not push
    assert world.status.desired == {"echo": 1}
    world.tell(m.FunctionRemoved(FunctionId("f")))
    assert [type(each) for each in world.out] == [m.EvictCopy, m.LoadCopy]


def test_a_copy_that_gave_way_comes_back_when_calls_wait_for_it() -> None:
    world = warm_copies(2, devices="ab", size=60)
    world.deploy("f", size=60)
    world.call("c", "f")
    world.finish("c")
    assert world.copies == {"echo": 1, "f": 1}
    world.call("runs", "echo")

    world.call("waits", "echo")

    (load,) = world.out
    assert isinstance(load, m.LoadCopy)
    assert load.victims == ("f#0",)
    world.loaded("echo", load.device)
    assert world.started == [("waits", load.device)]


def test_two_functions_that_do_not_fit_together_do_not_evict_each_other_in_turns() -> None:
    world = World()
    world.device("a")
    for name in ("one", "other"):
        world.deploy(name, size=60, slots=1)
        world.scale(name, 1)
        world.loaded(name, "a")

    assert world.out == []
    assert world.copies == {"other": 1}


def test_replicas_that_the_policy_made_stay_when_a_model_is_scaled() -> None:
    world = world_of("f", "a b c", load_s=0.5)
    world.calls(3, "f")
    for number in range(3):
        world.finish(f"c{number}")
    assert world.copies == {"f": 3}

    world.scale("f", 1)
    assert world.copies == {"f": 3}
    world.scale("f", 0)
    assert world.copies == {}


def test_a_model_gives_up_the_copies_that_it_was_asked_to_have_and_no_others() -> None:
    world = world_of("f", "a b c d", load_s=0.5)
    world.scale("f", 3)
    for name in "abc":
        world.loaded("f", name)
    world.calls(4, "f")
    assert world.copies == {"f": 4}

    world.scale("f", 1)

    assert len(world.draining) == 2
    for number in range(4):
        world.finish(f"c{number}")
    assert world.copies == {"f": 2}


def test_a_model_that_drains_serves_its_local_queue_and_gets_no_more_into_it() -> None:
    world = world_of("f", "a b", policy="lalb-o3", load_s=9.0)
    world.scale("f", 2)
    for name in "ab":
        world.loaded("f", name)
    world.device("idle", 5)  # too small for f; the policy runs because of it
    world.calls(4, "f")
    assert (world.on("a").local_queue, world.on("b").local_queue) == (1, 1)

    world.scale("f", 1)
    world.call("late", "f")

    ((_, drains, _),) = world.draining
    assert world.on(drains).local_queue == 1
    for call in ("c0", "c1", "c2", "c3"):
        world.finish(call)
    assert world.copies == {"f": 1}
    assert "late" in world.running


def test_scaling_what_is_not_there_changes_nothing() -> None:
    world = World()

    assert world.scale("nothing", 3) == []
    assert world.engine.ignored["Scaled"] == 1
