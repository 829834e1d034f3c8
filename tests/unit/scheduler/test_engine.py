"""What the engine does, by example. The readings of specs/gpu-faas.md 3.4 first, then everything around them."""

import importlib.util
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpufaas_cache_manager.replacement import make_replacement
from gpufaas_core import messages as m
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.messages import Event
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_core.snapshot import DeviceSnapshot, ResidentSnapshot, RunningCall
from gpufaas_core.units import MiB
from gpufaas_scheduler.engine import MAX_LOADING, Engine
from gpufaas_scheduler.memory import reservation
from gpufaas_scheduler.policies import POLICIES, Plan, Start, View, make_policy


def _beside(name: str):  # type: ignore[no-untyped-def]
    """Import a helper of this folder, which is no package."""
    full = f"scheduler_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


World = _beside("world").World


def two_devices(policy: str = "lalb-o3", **options):  # type: ignore[no-untyped-def]
    """a holds f, b holds g; both idle, a with more starts. Each takes one function of size 60."""
    world = World(policy, **options)
    for name in "fgh":
        world.deploy(name, size=60)
    world.device("a")
    world.warm("f", "a")
    world.device("b")
    world.call("occupy", "f")
    world.warm("g", "b")
    world.finish("occupy")
    return world


# --- 3.2 to 3.4 -------------------------------------------------------------------------------------------------------


def test_a_call_goes_to_the_idle_device_that_holds_its_model() -> None:
    world = two_devices()

    world.call("c", "g")

    assert world.started == [("c", "b")]
    assert not world.running["c"].cold
    assert world.running["c"].victims == ()


def test_a_model_that_nobody_holds_is_loaded_on_the_device_with_most_starts() -> None:
    world = two_devices()

    world.call("c", "h")

    lease = world.running["c"]
    assert (lease.device, lease.cold, lease.victims, lease.memory) == ("a", True, ("f",), 60)


def test_devices_with_equally_many_starts_are_taken_in_the_order_in_which_they_joined() -> None:
    world = World()
    world.deploy("f")
    for name in ("z", "b", "a"):
        world.device(name)

    world.call("c", "f")

    assert world.started == [("c", "z")]


def test_a_call_waits_for_a_busy_holder_that_is_done_before_a_load_would_be() -> None:
    world = two_devices()
    world.call("runs", "g")
    world.now = 0.5

    world.call("c", "g")  # 0.5 s left on b against 3 s of load on a

    assert world.started == []
    assert world.on("b").local_queue == 1
    world.now = 1.0
    world.finish("runs")
    assert world.started == [("c", "b")]
    assert world.running["c"].local


def test_waiting_exactly_as_long_as_a_load_is_too_long() -> None:
    world = two_devices()
    world.call("runs", "g")
    world.call("local 1", "g")
    world.call("local 2", "g")
    assert world.on("b").local_queue == 2
    assert world.on("b").estimated_finish_s == 3.0

    world.call("c", "g")

    assert world.started == [("c", "a")]
    assert world.running["c"].cold


def test_of_several_busy_holders_the_one_that_finishes_earliest_is_waited_for() -> None:
    world = World("lalb-o3")
    world.deploy("f", load_s=3.0, service_s=1.0, min_copies=2)
    for name in "ab":
        world.device(name)
        world.loaded("f", name)
    world.device("c")
    world.call("on a", "f")
    world.now = 0.5
    world.call("on b", "f")

    world.call("x", "f")  # 0.5 s on a, 1.0 s on b
    assert (world.on("a").local_queue, world.on("b").local_queue) == (1, 0)

    world.call("y", "f")  # 1.5 s on a, 1.0 s on b
    assert (world.on("a").local_queue, world.on("b").local_queue) == (1, 1)


def test_a_device_that_is_still_loading_a_model_holds_it() -> None:
    world = World("lalb-o3")
    world.deploy("f", load_s=3.0, service_s=1.0)
    world.deploy("g", load_s=10.0)
    world.device("a", 20)
    world.call("loads", "f")
    world.device("b", 20)
    world.now = 2.5

    world.call("c", "f")  # 0.5 + 1 s against 3 s

    assert world.started == []
    assert world.on("a").local_queue == 1


def test_the_time_left_of_a_load_counts_when_waiting_is_weighed() -> None:
    world = World()
    world.deploy("f", load_s=3.0, service_s=1.0)
    world.device("a")
    world.call("loads", "f")
    world.device("b")

    world.call("c", "f")  # 4 s on a, 3 s on b

    assert world.started == [("c", "b")]
    assert world.running["c"].cold


def test_a_pinned_model_is_no_victim_and_its_device_no_candidate() -> None:
    world = World()
    world.deploy("cpu", size=60, slots=4)
    world.deploy("f", size=60)
    world.device("a")
    world.call("pins", "cpu")

    world.call("c", "f")

    assert world.started == []
    world.finish("pins")
    assert world.started == [("c", "a")]
    assert world.running["c"].victims == ("cpu",)


def test_a_model_larger_than_a_device_goes_to_the_larger_one_and_blocks_nobody() -> None:
    world = World()
    world.deploy("large", size=90)
    world.deploy("small", size=20)
    world.device("a", 50)
    world.device("b", 100)
    world.call("occupies", "large")
    world.call("waits", "large", deadline=50.0)
    assert world.running["occupies"].device == "b"
    world.tell(m.Cancelled(CallId("waits")))

    world.call("c", "small")

    assert world.started == [("c", "a")]


def test_victims_are_the_least_recently_used_until_it_fits() -> None:
    world = World()
    world.device("a")
    for name in ("x", "y", "z"):
        world.deploy(name, size=30)
        world.now += 1
        world.warm(name, "a")
    world.deploy("new", size=50)
    world.now += 1
    world.warm("x", "a")
    assert world.models("a") == ["y", "z", "x"]

    world.call("c", "new")

    assert world.running["c"].victims == ("y", "z")
    assert world.models("a") == ["x", "new"]
    assert world.on("a").evictions == 2


def test_a_hit_overtakes_up_to_the_limit_and_not_further() -> None:
    """Two calls of f arrive for each that ends, so that f could go on forever; g waits its turn twice."""
    world = World("lalb-o3", limit=2)
    for name in "fg":
        world.deploy(name, size=60)
    world.device("a")
    world.warm("f", "a")
    world.call("f0", "f")
    world.call("g", "g")
    for number in range(1, 5):
        world.call(f"f{number}", "f")

    order = []
    running = "f0"
    for _ in range(5):
        world.finish(running)
        ((running, _),) = world.started
        order.append(running)

    assert order == ["f1", "f2", "g", "f3", "f4"]


def test_limit_0_serves_in_order() -> None:
    world = World("lalb")
    for name in "fg":
        world.deploy(name, size=60)
    world.device("a")
    world.warm("f", "a")
    world.call("f0", "f")
    world.call("g", "g")
    world.call("f1", "f")

    world.finish("f0")

    assert world.started == [("g", "a")]


def test_lb_gives_the_head_of_the_queue_to_whoever_is_idle() -> None:
    world = two_devices("lb")

    world.call("c", "g")

    assert world.started == [("c", "a")]
    assert world.running["c"].cold


def test_the_local_queue_of_a_device_goes_before_the_global_queue() -> None:
    world = two_devices()
    world.call("on b", "g")
    world.call("local", "g")
    world.call("on a", "f")
    world.call("global", "h")

    world.finish("on b")

    assert world.started == [("local", "b")]


# --- calls that come back ---------------------------------------------------------------------------------------------


def loading_in_place_of_another() -> World:
    """The call ``c`` loads ``f`` on the only device, and ``g`` had to leave for it."""
    world = World()
    world.deploy("f", size=60)
    world.deploy("g", size=60)
    world.device("a")
    world.warm("g", "a")
    world.call("c", "f")
    return world


def test_a_refused_call_is_placed_again_and_its_reservation_is_undone() -> None:
    world = loading_in_place_of_another()
    first = world.running["c"]
    assert first.victims == ("g",)

    world.refuse("c")

    # The victim's memory was promised: the node is told to make sure that it is gone.
    assert world.out[0] == m.Evict(FunctionId("g"), DeviceId("a"))
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
    assert not any(isinstance(each, m.Evict) for each in world.out)
    assert (again.device, again.cold) == ("a", False), "it hits what is loading there"
    assert world.models("a") == ["f"]
    assert world.on("a").misses == 2


def test_a_node_that_comes_back_without_having_heard_of_an_abort_is_told_again() -> None:
    engine = Engine(policy=make_policy("lalb"), replacement=make_replacement("lru"))
    function, call = FunctionId("f"), CallId("c")
    device = Device(DeviceId("n/gpu:0"), "gpu", 100)
    engine.handle(m.FunctionDeployed(Function(function, "d", profiles={"*": Profile(1.0, 1.0, 60)})), 0.0)
    engine.handle(m.DeviceJoined(device), 0.0)
    engine.handle(m.Arrived(call, function), 0.0)
    assert engine.handle(m.Cancelled(call), 1.0) == [m.Abort(call, device.id)]
    resident = ResidentSnapshot(function, "d", 60)

    for abandoned, told in ((False, [m.Abort(call, device.id)]), (True, [])):
        running = RunningCall(call, function, begun=True, abandoned=abandoned)
        snapshot = DeviceSnapshot(device, (resident,), (running,))
        assert engine.handle(m.DeviceJoined(device, snapshot), 2.0) == told


def test_a_refused_call_keeps_its_place_in_the_queue() -> None:
    world = World("lalb")
    for name in "fgh":
        world.deploy(name, size=60)
    world.device("a")
    world.call("first", "f")
    world.call("second", "g")

    world.refuse("first")

    assert world.started == [("first", "a")]


def test_three_refusals_are_enough() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("c", "f")

    world.refuse("c")
    world.refuse("c")
    world.refuse("c")

    assert world.rejected == [("c", "refused")]
    assert world.on("a").busy is False


def test_the_local_queue_of_a_device_that_leaves_is_placed_elsewhere() -> None:
    world = two_devices()
    world.call("runs", "g")
    world.call("local", "g")

    world.tell(m.DeviceLeft(DeviceId("b"), "its node is silent"))

    assert world.started == [("local", "a")]
    assert "runs" not in world.running


# --- the ends of waiting ----------------------------------------------------------------------------------------------


def test_a_call_whose_deadline_comes_while_it_waits_is_rejected_with_the_time_it_waited() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("runs", "f")
    world.now = 1.0
    world.call("local", "f", deadline=5.0)
    world.call("other", "f", deadline=4.0)
    assert world.engine.wake_at == 4.0

    world.now = 5.5
    world.tell(m.Woken())

    assert world.rejected == [("other", "deadline"), ("local", "deadline")]
    assert isinstance(world.out[0], m.Reject)
    assert "4.500 s" in world.out[0].message
    assert world.engine.wake_at is None


def test_a_deadline_no_longer_matters_once_the_call_runs() -> None:
    world = World()
    world.deploy("f")
    world.device("a")

    world.call("c", "f", deadline=1.0)

    assert world.engine.wake_at is None


def test_a_waiting_call_that_is_cancelled_gives_its_place_up() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("runs", "f")
    world.call("c", "f")

    world.tell(m.Cancelled(CallId("c")))
    world.finish("runs")

    assert world.started == []
    assert world.status.queued == {}


def test_a_running_call_that_is_cancelled_is_aborted_and_still_finishes() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("c", "f")

    world.tell(m.Cancelled(CallId("c")))

    assert world.out == [m.Abort(CallId("c"), DeviceId("a"))]
    assert world.on("a").busy
    world.finish("c", ok=False)
    assert not world.on("a").busy


def test_a_full_queue_turns_calls_away_and_says_when_to_come_back() -> None:
    world = World()
    world.deploy("f", service_s=2.0, max_queue=2)
    world.device("a")
    for number in range(3):
        world.call(f"c{number}", "f")

    world.call("late", "f")

    assert world.rejected == [("late", "overloaded")]
    assert isinstance(world.out[0], m.Reject)
    # Three calls of 2 s each, and as much more as is enough in three of four cases: nobody knows yet how they vary.
    assert world.out[0].retry_after_s == pytest.approx(6.0 * 1.243, rel=1e-3)
    assert "2 calls waiting" in world.out[0].message


def test_the_queue_of_all_functions_together_is_bounded_too() -> None:
    world = World(max_queue=1)
    world.deploy("f")
    world.deploy("g")
    world.device("a")
    world.call("runs", "f")
    world.call("waits", "g")

    world.call("late", "f")

    assert world.rejected == [("late", "overloaded")]


def test_a_call_for_no_known_function_is_rejected() -> None:
    world = World()

    world.call("c", "nothing")

    assert world.rejected == [("c", "unknown_function")]


def test_a_function_that_fits_no_device_is_rejected_with_the_sizes() -> None:
    world = World()
    world.deploy("f", size=200 * MiB)
    world.device("a", 100 * MiB)

    world.call("c", "f")

    assert world.rejected == [("c", "no_device")]
    assert isinstance(world.out[0], m.Reject)
    assert "200 MiB" in world.out[0].message
    assert "100 MiB" in world.out[0].message


def test_a_function_without_a_profile_for_any_kind_of_device_is_rejected() -> None:
    world = World()
    world.deploy("f", kind="tpu")
    world.device("a")

    world.call("c", "f")

    assert world.rejected == [("c", "no_device")]


def test_without_devices_calls_wait_for_the_first_one() -> None:
    world = World()
    world.deploy("f")
    world.call("c", "f")
    assert world.out == []

    world.device("a")

    assert world.started == [("c", "a")]


# --- CPU functions ----------------------------------------------------------------------------------------------------


def test_a_cpu_function_runs_as_many_calls_as_it_has_slots_and_queues_the_rest() -> None:
    world = World()
    world.deploy("echo", slots=2)
    world.device("a")

    for number in range(3):
        world.call(f"c{number}", "echo")

    assert list(world.running) == ["c0", "c1"]
    assert [lease.cold for lease in world.running.values()] == [True, False]
    world.finish("c0")
    assert world.started == [("c2", "a")]


def test_a_function_may_call_another_on_its_own_device() -> None:
    """The model function is busy until its inner call ends: the inner one must not wait for the device."""
    world = World()
    world.deploy("outer")
    world.deploy("inner", slots=1)
    world.device("a")
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
    world = World()
    world.deploy("dear", size=90, load_s=9.0)
    world.deploy("cheap", size=90, load_s=1.0)
    world.device("a")
    world.warm("dear", "a")
    world.device("b")
    world.call("occupy", "dear")
    world.warm("cheap", "b")
    world.finish("occupy")
    world.deploy("echo", slots=1, size=20)

    world.call("c", "echo")

    assert world.running["c"].victims == ("cheap",)


def test_a_cpu_function_that_does_not_fit_now_is_placed_when_a_pin_ends() -> None:
    world = World()
    world.deploy("f", size=90)
    world.deploy("echo", slots=1, size=20)
    world.device("a")
    world.call("pins", "f")
    world.call("c", "echo")
    assert world.started == []

    world.finish("pins")

    assert world.started == [("c", "a")]


def test_the_worker_with_the_fewest_calls_is_taken() -> None:
    world = World()
    world.deploy("echo", slots=3, min_copies=2)
    world.device("a")
    world.device("b")
    world.loaded("echo", "a")
    world.loaded("echo", "b")

    for number in range(4):
        world.call(f"c{number}", "echo")

    assert [lease.device for lease in world.running.values()] == ["a", "b", "a", "b"]


# --- copies without calls ---------------------------------------------------------------------------------------------


def test_a_minimum_of_copies_is_loaded_one_at_a_time() -> None:
    world = World()
    world.device("a")
    world.device("b")

    world.deploy("f", min_copies=2)

    assert world.out == [m.Load(1, 1, FunctionId("f"), "digest of f", DeviceId("a"), 10)]
    world.loaded("f", "a")
    assert world.out == [m.Load(1, 2, FunctionId("f"), "digest of f", DeviceId("b"), 10)]


def test_a_call_joins_a_copy_that_is_loading_without_one() -> None:
    world = World()
    world.device("a")
    world.deploy("f", load_s=3.0, service_s=1.0, min_copies=1)

    world.call("c", "f")

    assert world.started == [("c", "a")]
    assert not world.running["c"].cold
    assert world.on("a").estimated_finish_s == 4.0


def test_a_copy_within_its_minimum_is_not_evicted() -> None:
    world = World()
    world.device("a")
    world.deploy("kept", size=60, min_copies=1)
    world.loaded("kept", "a")
    world.deploy("f", size=60)

    world.call("c", "f")

    assert world.started == []
    world.deploy("kept", size=60, min_copies=0)
    assert world.started == [("c", "a")]
    assert world.running["c"].victims == ("kept",)


def test_a_copy_that_has_no_room_is_loaded_when_there_is() -> None:
    world = World()
    world.deploy("f", size=90)
    world.device("a")
    world.call("pins", "f")
    world.deploy("kept", size=60, min_copies=1)
    assert world.out == []

    world.finish("pins")

    assert isinstance(world.out[-1], m.Load)
    assert world.out[-1].victims == ("f",)


def test_who_waits_for_a_slot_gets_one_of_the_next_copy_as_soon_as_it_is_loaded() -> None:
    """Not before: a slot of the first copy may be free sooner."""
    world = World()
    world.device("a")
    world.deploy("echo", slots=1)
    world.call("runs", "echo")
    world.loaded("echo", "a")
    world.device("b")
    world.call("waits", "echo")
    world.call("waits too", "echo")

    world.deploy("echo", slots=1, min_copies=2)

    assert [type(each) for each in world.out] == [m.Load]
    world.finish("runs")
    assert world.started == [("waits", "a")]
    world.loaded("echo", "b")
    assert world.started == [("waits too", "b")]
    assert not world.running["waits too"].cold


# --- several copies on a device ---------------------------------------------------------------------------------------


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
    world = World()
    world.device("a")
    world.device("b")
    world.deploy("f")

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
    world = World()
    world.device("a")
    world.deploy("f", size=95)
    world.warm("f", "a")
    world.device("b")
    world.deploy("echo", slots=1)

    world.scale("echo", 3)
    load_all(world)

    assert copies_on(world, "b") == [0, 1, 2]
    assert world.models("a") == ["f"]


def test_the_first_copy_shows_that_it_loads_before_several_load_at_once() -> None:
    world = World()
    world.device("a", 1000)
    world.deploy("echo", slots=1)

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

    for number in range(6):
        world.call(f"c{number}", "echo")

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


def test_a_copy_that_dies_is_replaced_under_its_number_and_the_others_serve_on() -> None:
    world = one_device(3)
    for number in range(3):
        world.call(f"c{number}", "echo")

    world.tell(m.WorkerExited(FunctionId("echo"), DeviceId("a"), "killed", 1))

    assert world.out == [m.Load(1, 7, FunctionId("echo"), "digest of echo", DeviceId("a"), 10, (), 1)]
    assert world.ended == {"c1"}
    world.loaded("echo", "a", 1)
    world.call("next", "echo")
    assert world.running["next"].copy == 1


def test_surplus_copies_of_a_device_are_named_by_their_numbers_and_drain() -> None:
    world = one_device(4)
    world.call("c0", "echo")
    world.call("c1", "echo")

    world.scale("echo", 1)

    assert {(each.device, each.copy) for each in world.out} == {("a", 2), ("a", 3)}
    assert all(isinstance(each, m.Evict) for each in world.out)
    assert world.draining == {("echo", "a")}  # of the two that run a call, the one that began longer ago
    world.finish("c1")
    assert world.out == []
    world.finish("c0")
    assert world.out == [m.Evict(FunctionId("echo"), DeviceId("a"))]


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

    assert world.running["c"].victims == ("echo", "echo#1", "echo#2", "echo#3")
    assert world.copies == {"echo": 5, "f": 1}
    world.finish("c")
    assert world.out == []
    for number in range(6):
        world.call(f"c{number}", "echo")
    assert [each.victims for each in world.out] == [("f",), (), (), ()]
    assert [each.copy for each in world.out] == [0, 1, 2, 3]


def test_a_refused_miss_ends_the_copies_that_were_to_make_room_for_it() -> None:
    world = one_device(9)
    world.deploy("f", size=25)
    world.call("c", "f")
    assert world.running["c"].victims == ("echo", "echo#1")

    world.refuse("c")

    evicted = [(each.function, each.copy) for each in world.out if isinstance(each, m.Evict)]
    assert evicted == [("echo", 0), ("echo", 1)]


def test_what_one_copy_was_measured_to_need_is_what_it_is_charged() -> None:
    world = World(learn=True)
    world.device("a", 1000 * MiB)
    world.deploy("echo", slots=1, size=100 * MiB)
    world.scale("echo", 2)
    load_all(world)

    world.tell(m.Measured(FunctionId("echo"), DeviceId("a"), 20 * MiB, 1))

    expected = reservation(20 * MiB)
    assert world.model("echo", "a", 1).memory == expected
    assert world.model("echo", "a", 0).memory == 100 * MiB
    world.scale("echo", 3)
    assert world.model("echo", "a", 2).memory == expected


# --- scaling ----------------------------------------------------------------------------------------------------------


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
    world = World()
    world.device("a")
    world.device("b")
    world.deploy("echo", slots=1)

    world.scale("echo", 2)

    assert world.out == [m.Load(1, 1, FunctionId("echo"), "digest of echo", DeviceId("a"), 10)]
    assert world.status.desired == {"echo": 2}
    world.loaded("echo", "a")
    assert world.out == [m.Load(1, 2, FunctionId("echo"), "digest of echo", DeviceId("b"), 10)]


def test_calls_that_waited_are_spread_over_the_copies_that_run_the_fewest() -> None:
    world = warm_copies(2, slots=2)
    world.scale("echo", 0)
    assert world.copies == {}
    for number in range(4):
        world.call(f"c{number}", "echo")  # the first loads it on a
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


def test_a_surplus_copy_takes_no_new_call_and_goes_when_its_last_one_ends() -> None:
    world = warm_copies(2, slots=2)
    for number in range(3):
        world.call(f"c{number}", "echo")  # two on a, one on b

    world.scale("echo", 1)

    assert world.out == []
    assert world.draining == {("echo", "b")}
    world.call("c3", "echo")
    assert world.status.queued == {"echo": 1}
    world.finish("c0")
    assert world.started == [("c3", "a")]
    world.finish("c1")
    assert world.out == [m.Evict(FunctionId("echo"), DeviceId("b"))]
    assert world.copies == {"echo": 1}


def test_a_copy_that_drains_is_taken_back_before_another_is_loaded() -> None:
    world = warm_copies(2)
    world.call("c0", "echo")
    world.call("c1", "echo")
    world.scale("echo", 1)
    assert world.draining

    world.scale("echo", 2)

    assert world.out == []
    assert world.draining == set()
    assert world.copies == {"echo": 2}


def test_a_copy_that_drains_is_taken_back_when_the_others_die() -> None:
    world = warm_copies(2, devices="ab")
    world.call("c0", "echo")
    world.call("c1", "echo")
    world.scale("echo", 1)
    ((_, drains),) = world.draining
    stays = "a" if drains == "b" else "b"
    world.call("waits", "echo")

    world.tell(m.WorkerExited(FunctionId("echo"), DeviceId(stays), "killed"))

    assert world.draining == set()
    world.finish("c0" if drains == "a" else "c1")
    assert world.started == [("waits", drains)]


def test_a_function_that_is_scaled_to_zero_leaves_the_memory_at_once_when_it_is_idle() -> None:
    world = warm_copies(2)

    world.scale("echo", 0)

    assert world.out == [m.Evict(FunctionId("echo"), DeviceId(name)) for name in "ab"]
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
    assert world.draining == {("echo", "a")}

    world.call("c", "echo")

    assert world.started == [("c", "a")]
    assert not world.running["c"].cold
    assert world.draining == set()


def test_a_function_with_waiting_calls_is_not_scaled_to_zero() -> None:
    world = warm_copies(1)
    world.call("runs", "echo")
    world.call("waits", "echo")

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
    world = World()
    world.device("a")
    world.device("b")
    world.deploy("pinned", size=60, min_copies=1)
    world.loaded("pinned", "a")
    world.deploy("idle", size=60)
    world.call("c", "idle")
    world.finish("c")
    world.deploy("echo", size=60, slots=1)

    world.scale("echo", 2)

    (load,) = world.out
    assert isinstance(load, m.Load)
    assert (load.device, load.victims) == ("b", ("idle",))
    world.loaded("echo", "b")
    assert world.out == []
    assert world.copies == {"pinned": 1, "echo": 1}


def test_copies_beyond_the_minimum_give_way_and_come_back_when_there_is_room() -> None:
    world = World()
    world.device("a")
    world.deploy("echo", size=60, slots=1)
    world.scale("echo", 1)
    world.loaded("echo", "a")
    world.deploy("f", size=60)

    world.call("c", "f")

    assert world.running["c"].victims == ("echo",)
    world.finish("c")
    assert world.out == []  # f is idle now, but who gives way does not push
    assert world.status.desired == {"echo": 1}
    world.tell(m.FunctionRemoved(FunctionId("f")))
    assert [type(each) for each in world.out] == [m.Evict, m.Load]


def test_a_copy_that_gave_way_comes_back_when_calls_wait_for_it() -> None:
    world = warm_copies(2, devices="ab", size=60)
    world.deploy("f", size=60)
    world.call("c", "f")
    world.finish("c")
    assert world.copies == {"echo": 1, "f": 1}
    world.call("runs", "echo")

    world.call("waits", "echo")

    (load,) = world.out
    assert isinstance(load, m.Load)
    assert load.victims == ("f",)
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
    world = World()
    world.deploy("f", load_s=0.5)
    for name in "abc":
        world.device(name)
    for number in range(3):
        world.call(f"c{number}", "f")
    for number in range(3):
        world.finish(f"c{number}")
    assert world.copies == {"f": 3}

    world.scale("f", 1)
    assert world.copies == {"f": 3}
    world.scale("f", 0)
    assert world.copies == {}


def test_a_model_gives_up_the_copies_that_it_was_asked_to_have_and_no_others() -> None:
    world = World()
    world.deploy("f", load_s=0.5)
    for name in "abcd":
        world.device(name)
    world.scale("f", 3)
    for name in "abc":
        world.loaded("f", name)
    for number in range(4):
        world.call(f"c{number}", "f")
    assert world.copies == {"f": 4}

    world.scale("f", 1)

    assert len(world.draining) == 2
    for number in range(4):
        world.finish(f"c{number}")
    assert world.copies == {"f": 2}


def test_a_model_that_drains_serves_its_local_queue_and_gets_no_more_into_it() -> None:
    world = World("lalb-o3")
    world.deploy("f", load_s=9.0)
    for name in "ab":
        world.device(name)
    world.scale("f", 2)
    for name in "ab":
        world.loaded("f", name)
    world.device("idle", 5)  # too small for f; the policy runs because of it
    for number in range(4):
        world.call(f"c{number}", "f")
    assert (world.on("a").local_queue, world.on("b").local_queue) == (1, 1)

    world.scale("f", 1)
    world.call("late", "f")

    ((_, drains),) = world.draining
    assert world.on(drains).local_queue == 1
    for call in ("c0", "c1", "c2", "c3"):
        world.finish(call)
    assert world.copies == {"f": 1}
    assert "late" in world.running


def test_copies_that_cannot_be_loaded_do_not_fail_a_function_that_serves() -> None:
    world = warm_copies(1, devices="ab")
    world.scale("echo", 2)
    for _ in range(3):
        world.tell(m.LoadFailed(FunctionId("echo"), DeviceId("b"), "broken"))

    world.call("c", "echo")

    assert world.started == [("c", "a")]
    world.finish("c")
    assert world.out == []  # nor is it tried before its time: test_backoff.py
    world.now += 1.0
    world.scale("echo", 2)
    assert isinstance(world.out[0], m.Load)


def test_scaling_what_is_not_there_changes_nothing() -> None:
    world = World()

    assert world.scale("nothing", 3) == []
    assert world.engine.ignored["Scaled"] == 1


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_measured_peak_becomes_the_reservation_with_headroom() -> None:
    world = World(learn=True)
    world.deploy("f", size=1000 * MiB)
    world.device("a", 1500 * MiB)
    world.warm("f", "a")

    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 500 * MiB))

    expected = 566 * MiB  # 500 * 1.1 + 16
    assert world.out == []  # what it had beyond that stays lent to it: nobody needs it
    assert world.on("a").used == expected
    assert world.model("f", "a").limit == 1000 * MiB
    (learnt,) = world.engine.take_learnt()
    assert (learnt.function, learnt.kind, learnt.profile.occupation) == ("f", "gpu", expected)
    assert learnt.profile.measured
    assert world.engine.take_learnt() == []


def test_a_reservation_grows_only_into_free_memory_but_the_profile_knows_the_need() -> None:
    world = World(learn=True)
    world.deploy("f", size=100 * MiB)
    world.deploy("g", size=100 * MiB)
    world.device("a", 210 * MiB)
    world.warm("f", "a")
    world.warm("g", "a")
    world.engine.take_learnt()

    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 140 * MiB))

    assert world.out == [m.Resize(FunctionId("f"), DeviceId("a"), 110 * MiB)]
    (learnt,) = world.engine.take_learnt()
    assert learnt.profile.occupation == 170 * MiB


def test_memory_that_a_measurement_frees_is_given_to_who_waits() -> None:
    world = World(learn=True)
    world.deploy("f", size=90 * MiB)
    world.deploy("echo", slots=1, size=40 * MiB)
    world.device("a", 100 * MiB)
    world.call("runs", "f")
    world.call("c", "echo")
    assert world.started == []

    world.loaded("f", "a")
    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 30 * MiB))
    assert world.started == []  # it runs, and may be using all that it has: it is asked for what it does not
    assert world.out == [m.Resize(FunctionId("f"), DeviceId("a"), 49 * MiB)]
    world.tell(m.Resized(FunctionId("f"), DeviceId("a"), 55 * MiB))

    assert world.started == [("c", "a")]
    assert world.model("f", "a").limit == 55 * MiB


def test_times_are_learnt_from_calls_that_went_well() -> None:
    world = World(learn=True)
    world.deploy("f", load_s=4.0, service_s=1.0)
    world.device("a")
    world.call("c", "f")
    world.loaded("f", "a", load_s=2.0)
    world.finish("c", service_s=2.0)
    world.call("bad", "f")
    world.finish("bad", service_s=100.0, ok=False)
    world.call("d", "f")
    world.finish("d", service_s=4.0)

    (learnt,) = world.engine.take_learnt()

    # The first measurement takes the place of what was declared; the next ones move it by a quarter.
    assert replace(learnt.profile, times=None) == Profile(2.0, 2.5, 10, measured=True, estimated=("memory",))
    assert learnt.profile.times is not None
    assert learnt.profile.times.calls == 1, "that the second took twice as long as the first"


def test_an_occupation_is_corrected_once_and_then_only_grows() -> None:
    """A worker that was started after small calls must have room for the large one that was seen before."""
    world = World(learn=True)
    world.deploy("f", size=500 * MiB)
    world.device("a", 1000 * MiB)
    world.warm("f", "a")

    reserved = []
    for peak in (30 * MiB, 200 * MiB, 40 * MiB):
        world.tell(m.Measured(FunctionId("f"), DeviceId("a"), peak))
        reserved.append(world.on("a").used // MiB)

    assert reserved == [49, 236, 236]  # 30 and 200, times 1.1, plus 16


def test_without_learning_profiles_stay() -> None:
    world = World(learn=False)
    world.deploy("f")
    world.device("a")
    world.call("c", "f")
    world.loaded("f", "a", load_s=9.0)
    world.finish("c", service_s=9.0)

    assert world.engine.take_learnt() == []


def test_a_device_counts_how_long_it_was_busy_with_model_functions() -> None:
    world = World()
    world.deploy("f")
    world.deploy("echo", slots=1)
    world.device("a")
    world.now = 10.0
    world.call("c", "f")
    world.call("i", "echo")
    world.now = 12.0
    world.finish("c")
    world.now = 20.0
    world.call("d", "f")
    world.now = 21.0

    assert world.on("a").busy_s == 3.0


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_load_that_ran_out_of_memory_is_tried_again_with_more_in_the_same_call() -> None:
    world = World(learn=True)
    world.deploy("f", size=30 * MiB)
    world.device("a", 100 * MiB)
    world.call("c1", "f", deadline=60.0)
    assert world.running["c1"].memory == 30 * MiB

    for size in (60 * MiB, 100 * MiB):  # doubled, until it is the whole device
        out_of_memory(world, "c1")
        assert world.running["c1"].memory == size

    world.loaded("f", "a")
    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 35 * MiB))
    world.finish("c1")
    (learnt,) = world.engine.take_learnt()
    # What it is measured to have afterwards may be less than it needed: no load has less again than one that failed.
    assert learnt.profile.occupation == reservation(60 * MiB)
    assert world.on("a").misses == 3


def test_a_load_for_which_the_largest_device_is_too_small_says_so_with_numbers() -> None:
    world = World(learn=True)
    world.deploy("f", size=100 * MiB)
    world.device("a", 100 * MiB)
    world.call("c1", "f")

    out_of_memory(world, "c1")

    assert world.rejected == [("c1", "out_of_memory")]
    assert "it had 100 MiB, which is all that the largest gpu device for it has" in world.out[0].message


def test_a_minimum_of_copies_is_widened_without_a_call_too() -> None:
    world = World(learn=True)
    world.device("a", 100 * MiB)
    world.deploy("f", size=30 * MiB, min_copies=1)

    world.tell(m.LoadFailed(FunctionId("f"), DeviceId("a"), "out of memory", True))

    assert [each.memory for each in world.out if isinstance(each, m.Load)] == [60 * MiB]


def out_of_memory(world: World, call: str) -> None:
    """Its load hits the reservation: the node says so, and refuses the call."""
    lease = world.running[call]
    world.tell(m.LoadFailed(lease.function, lease.device, "out of memory", True, lease.copy))
    world.ended.discard(call)
    world.running[call] = lease
    world.tell(m.Refused(lease.call, lease.device, "out of memory"))


def test_a_load_that_ran_out_of_memory_has_the_whole_device_at_last() -> None:
    world = World(learn=True)
    world.deploy("f", size=30)
    world.device("a", 50)
    world.call("c1", "f")
    assert world.running["c1"].memory == 30

    world.tell(m.LoadFailed(FunctionId("f"), DeviceId("a"), "out of memory", True))
    world.call("c2", "f")

    assert world.running["c2"].memory == 50  # twice, but no more than the device
    assert world.on("a").misses == 2


def test_calls_that_waited_for_a_worker_that_exits_are_placed_again() -> None:
    world = two_devices()
    world.call("runs", "g")
    world.call("local", "g")

    world.tell(m.WorkerExited(FunctionId("g"), DeviceId("b"), "killed"))

    assert world.started == [("local", "a")]
    assert "runs" not in world.running
    assert not world.on("b").busy


def test_a_call_whose_lease_comes_to_the_node_after_its_worker_died_is_placed_again() -> None:
    """The node did not know of it when it answered the worker's calls: it refuses it, although the engine let it go."""
    world = World()
    world.deploy("f")
    world.device("a")
    world.warm("f", "a")
    world.call("hit", "f")
    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "killed"))

    out = world.engine.handle(m.Refused(CallId("hit"), DeviceId("a"), "its worker is not there any more"), world.now)
    again = world.engine.handle(m.Refused(CallId("nobody"), DeviceId("a"), "late"), world.now)

    assert [(start.lease.call, start.lease.cold) for start in out if isinstance(start, m.Start)] == [("hit", True)]
    assert again == []


def test_a_call_that_its_worker_took_with_it_is_not_placed_again() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("runs", "f")
    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "killed"))

    world.engine.handle(m.Cancelled(CallId("runs")), world.now)  # its gateway has had the error, and says so

    assert world.engine.handle(m.Refused(CallId("runs"), DeviceId("a"), "late"), world.now) == []


def test_facts_that_do_not_fit_are_counted_and_change_nothing() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("c", "f")
    before = world.status

    facts: list[Event] = [
        m.Finished(CallId("nobody"), DeviceId("a"), 1.0),
        m.Finished(CallId("c"), DeviceId("b"), 1.0),
        m.Loaded(FunctionId("g"), DeviceId("a"), 1.0, 1),
        m.LoadFailed(FunctionId("f"), DeviceId("b"), "late"),
        m.Measured(FunctionId("g"), DeviceId("a"), 1),
        m.WorkerExited(FunctionId("g"), DeviceId("a"), "late"),
        m.Refused(CallId("nobody"), DeviceId("a"), "late"),
        m.Cancelled(CallId("nobody")),
        m.DeviceLeft(DeviceId("b"), "late"),
        m.FunctionRemoved(FunctionId("g")),
        m.Scaled(FunctionId("g"), 2),
        m.Woken(),
    ]
    for fact in facts:
        assert world.engine.handle(fact, 0.0) == []
    assert world.engine.handle(m.Arrived(CallId("c"), FunctionId("f")), 0.0) == []

    assert world.status == before
    assert world.engine.ignored.total() == len(facts)  # all but Woken, and the second arrival of c


# --- functions that go ------------------------------------------------------------------------------------------------


def test_a_function_that_is_removed_serves_who_waits_and_is_then_evicted() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("runs", "f")
    world.call("waits", "f")

    world.tell(m.FunctionRemoved(FunctionId("f")))

    world.call("late", "f")
    assert world.rejected == [("late", "removed")]
    world.finish("runs")
    assert world.started == [("waits", "a")]
    world.finish("waits")
    assert world.out == [m.Evict(FunctionId("f"), DeviceId("a"))]
    assert world.models("a") == []
    world.call("later", "f")
    assert world.rejected == [("later", "unknown_function")]


def test_a_function_that_is_removed_at_once_rejects_who_waits_and_aborts_who_runs() -> None:
    world = World()
    world.deploy("f")
    world.device("a")
    world.call("runs", "f")
    world.call("waits", "f")

    world.tell(m.FunctionRemoved(FunctionId("f"), drain=False))

    assert world.rejected == [("waits", "removed")]
    assert world.out[-1] == m.Abort(CallId("runs"), DeviceId("a"))
    world.finish("runs", ok=False)
    assert world.models("a") == []


# --- the table of policies --------------------------------------------------------------------------------------------


def test_every_event_has_a_handler() -> None:
    world = World()

    assert set(world.engine._handlers) == set(world.engine._listen) == set(Event.__args__)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_made_by_name(name: str) -> None:
    assert make_policy(name).name == name


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(InvalidSpec, match="lb, lalb, lalb-o3"):
        make_policy("random")


def test_a_local_queue_goes_back_once_its_device_is_late_by_a_load() -> None:
    """Nothing else happens meanwhile: it is time alone that makes the wait longer than a load."""
    world = World("lalb-o3")
    world.deploy("f", load_s=3.0, service_s=1.0)
    world.device("a")
    world.warm("f", "a")
    world.device("b")
    world.call("long", "f")
    world.call("c1", "f")
    world.call("c2", "f")
    assert (world.on("a").local_queue, world.engine.wake_at) == (2, 4.0)

    world.now = 4.0
    world.tell(m.Woken())

    assert world.started == [("c1", "b")]
    assert (world.on("a").local_queue, world.on("b").local_queue) == (0, 0)
    assert world.engine.wake_at is None
    world.finish("c1")
    assert world.started == [("c2", "b")]


def test_a_holder_that_is_late_by_a_load_is_not_waited_for() -> None:
    world = World("lalb")
    world.deploy("f", load_s=3.0, service_s=1.0)
    world.device("a")
    world.warm("f", "a")
    world.call("long", "f")
    world.now = 4.0
    world.device("b")

    world.call("c", "f")

    assert world.started == [("c", "b")]


def test_a_policy_says_when_it_looks_again_and_is_asked_then() -> None:
    class Patient:
        """Starts nothing before it has looked three times."""

        name = "patient"
        pass_limit = 0
        looks = 0

        def plan(self, view: View) -> Plan:
            self.looks += 1
            call, device = view.queue.first(), next(iter(view.idle()))
            if self.looks < 3:
                return view.now + 2.0
            assert call is not None
            yield Start(call.id, device.id)
            return None

    policy = Patient()
    world = World(policy)
    world.deploy("f")
    world.device("a")
    world.call("c", "f")
    assert world.engine.wake_at == 2.0

    world.now = 1.0
    world.tell(m.Woken())
    assert policy.looks == 1, "it was too early"
    world.now = 2.0
    world.tell(m.Woken())
    assert (world.started, world.engine.wake_at) == ([], 4.0)
    world.now = 4.5
    world.tell(m.Woken())

    assert (world.started, world.engine.wake_at) == ([("c", "a")], None)
