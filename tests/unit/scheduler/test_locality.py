"""Which device a call goes to: GPU-FaaS's algorithm by example."""

from tests.unit.scheduler.world import World, two_devices, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId


def test_a_call_goes_to_the_idle_device_that_holds_its_model() -> None:
    world = two_devices()

    world.call("c", "g")

    assert world.started == [("c", "b")]
    assert not world.running["c"].cold
    assert world.running["c"].victims == ()


def test_a_model_that_nobody_holds_is_loaded_on_the_device_with_most_starts() -> None:
    world = two_devices()

    world.call("c", "h")

    grant = world.running["c"]
    assert (grant.device, grant.cold, grant.victims, grant.memory) == ("a", True, ("f#0",), 60)


def test_devices_with_equally_many_starts_are_taken_in_the_order_in_which_they_joined() -> None:
    world = world_of("f", "z b a")

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
    world = world_of("f", policy="lalb-o3", memory=20, load_s=3.0, service_s=1.0)
    world.deploy("g", load_s=10.0)
    world.call("loads", "f")
    world.device("b", 20)
    world.now = 2.5

    world.call("c", "f")  # 0.5 + 1 s against 3 s

    assert world.started == []
    assert world.on("a").local_queue == 1


def test_the_time_left_of_a_load_counts_when_waiting_is_weighed() -> None:
    world = world_of("f", load_s=3.0, service_s=1.0)
    world.call("loads", "f")
    world.device("b")

    world.call("c", "f")  # 4 s on a, 3 s on b

    assert world.started == [("c", "b")]
    assert world.running["c"].cold


def test_a_pinned_model_is_no_victim_and_its_device_no_candidate() -> None:
    world = world_of("cpu", size=60, slots=4)
    world.deploy("f", size=60)
    world.call("pins", "cpu")

    world.call("c", "f")

    assert world.started == []
    world.finish("pins")
    assert world.started == [("c", "a")]
    assert world.running["c"].victims == ("cpu#0",)


def test_a_model_larger_than_a_device_goes_to_the_larger_one_and_blocks_nobody() -> None:
    world = world_of("large", memory=50, size=90)
    world.deploy("small", size=20)
    world.device("b", 100)
    world.call("occupies", "large")
    world.call("waits", "large", deadline=50.0)
    assert world.running["occupies"].device == "b"
    world.tell(m.CallerLeft(CallId("waits")))

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

    assert world.running["c"].victims == ("y#0", "z#0")
    assert world.models("a") == ["x", "new"]
    assert world.on("a").evictions == 2


def test_a_hit_overtakes_up_to_the_limit_and_not_further() -> None:
    """Two calls of f arrive for each that ends, so that f could go on forever; g waits its turn twice."""
    world = World("lalb-o3", limit=2).set_up("f g", "a", warm="f", size=60)
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
    world = world_of("f g", policy="lalb", warm="f", size=60)
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


def test_a_local_queue_goes_back_once_its_device_is_late_by_a_load() -> None:
    """Nothing else happens meanwhile: it is time alone that makes the wait longer than a load."""
    world = world_of("f", "a b", policy="lalb-o3", warm="f", load_s=3.0, service_s=1.0)
    world.calls("long c1 c2", "f")
    assert (world.on("a").local_queue, world.engine.wake_at) == (2, 4.0)

    world.now = 4.0
    world.tell(m.Woken())

    assert world.started == [("c1", "b")]
    assert (world.on("a").local_queue, world.on("b").local_queue) == (0, 0)
    assert world.engine.wake_at is None
    world.finish("c1")
    assert world.started == [("c2", "b")]


def test_a_holder_that_is_late_by_a_load_is_not_waited_for() -> None:
    world = world_of("f", policy="lalb", warm="f", load_s=3.0, service_s=1.0)
    world.call("long", "f")
    world.now = 4.0
    world.device("b")

    world.call("c", "f")

    assert world.started == [("c", "b")]
