"""What `least-wait` promises: no call waits beyond the bound while later ones pass, and no device idles beside work."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, FunctionId
from gpufaas_scheduler.policies import make_policy


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


def least_wait(bound: float = 30.0):  # type: ignore[no-untyped-def]
    return World(make_policy("least-wait", wait_bound_s=bound))


def leases(world) -> list[m.Lease]:  # type: ignore[no-untyped-def]
    return [each.lease for each in world.out if isinstance(each, m.Start)]


# --- where ---


def test_calls_one_at_a_time_fill_the_empty_device_before_anything_is_evicted() -> None:
    world = least_wait()
    world.device("d0", 25)
    world.device("d1", 25)
    for function in ("f0", "f1", "f2", "f3"):
        world.deploy(function, size=10)

    for number in range(12):
        world.now += 10
        world.call(f"c{number}", f"f{number % 4}")
        world.now += 4
        world.finish(f"c{number}")

    assert sum(each.misses for each in world.status.devices) == 4
    assert sum(each.evictions for each in world.status.devices) == 0


def test_a_duplicate_is_evicted_before_the_last_copy_of_a_function_that_is_called() -> None:
    world = least_wait()
    world.device("d0", 20)
    world.device("d1", 20)
    for function in ("twice", "once", "new"):
        world.deploy(function, size=10)
    world.call("a", "twice")
    world.call("b", "once")
    world.now += 4
    assert {world.running["a"].device, world.running["b"].device} == {"d0", "d1"}
    world.finish("a")
    world.finish("b")
    both = world.running
    assert not both
    world.scale("twice", 2)
    for device in world.status.devices:
        for each in device.resident:
            if each.loading:
                world.loaded(each.function, device.device.id)
    world.now += 10
    world.call("c", "new")
    world.now += 4
    (lease,) = [each.lease for each in world.log if isinstance(each, m.Start) and each.lease.call == "c"]

    assert "once" not in lease.victims


def test_a_call_waits_for_its_holder_when_that_is_sooner_than_a_load() -> None:
    world = least_wait()
    world.device("d0", 10)
    world.device("d1", 10)
    world.deploy("f", size=10, load_s=30.0, service_s=1.0)
    world.deploy("other", size=10, load_s=30.0, service_s=1.0)
    world.call("a", "f")
    world.call("b", "other")
    world.now += 30
    world.finish("a")
    world.finish("b")
    world.now += 1
    world.call("c", "f")

    world.call("d", "f")

    assert not leases(world)
    assert [each.function for each in world.out if isinstance(each, m.Load)] == []
    world.now += 1
    world.finish("c")
    assert [(each.call, each.cold) for each in leases(world)] == [("d", False)]


def test_a_replica_is_loaded_beside_a_call_that_waits_and_keeps_its_device_busy() -> None:
    """Two holders' worth of demand, and an empty device."""
    world = least_wait()
    world.device("d0", 10)
    world.device("d1", 10)
    world.deploy("f", size=10, load_s=2.0, service_s=1.0)
    world.call("c0", "f")
    world.now += 3
    world.finish("c0")
    loads: list[m.Load] = []
    number = 0
    while not loads and number < 40:
        number += 1
        world.now += 0.5
        world.call(f"c{number}", "f")
        loads += [each for each in world.out if isinstance(each, m.Load)]
        world.now += 0.5
        for call in sorted(world.running):
            world.finish(call)
            loads += [each for each in world.out if isinstance(each, m.Load)]
        world.call(f"again{number}", "f")
        world.call(f"more{number}", "f")
        loads += [each for each in world.out if isinstance(each, m.Load)]

    copies = [each for device in world.status.devices for each in device.resident]
    assert len(copies) == 2, "demand for more than one device has more than one"
    if loads:
        (device,) = [each for each in world.status.devices if each.device.id == loads[0].device]
        assert device.busy
        world.loaded("f", loads[0].device)
        assert leases(world), "what waited starts where the replica is"


def test_explanations_say_what_was_weighed_and_who_was_passed_over() -> None:
    world = least_wait()
    world.device("d0", 10)
    world.deploy("held", size=10)
    world.deploy("new", size=10)
    world.call("a", "held")
    world.now += 4
    world.call("b", "new")
    world.call("c", "held")

    waiting = world.engine.explain(CallId("b"), world.now)
    world.finish("a")
    started = world.engine.explain(CallId("c"), world.now)

    assert (waiting.state, waiting.rule) == ("waiting", "all devices are busy")
    assert (started.state, started.device, started.hit) == ("running", "d0", True)
    assert started.passed_over == ("b",)
    assert world.engine.explain(CallId("b"), world.now).overtaken_by == ("c",)
    assert world.engine.explain(CallId("nobody"), world.now) is None


@pytest.mark.parametrize("policy", ["lb", "lalb", "lalb-o3", "least-wait"])
def test_every_policy_says_why(policy: str) -> None:
    world = World(policy)
    world.device("d0", 10)
    world.deploy("f", size=10)
    world.call("cold", "f")
    world.finish("cold")
    world.call("warm#1", "f")

    cold, warm = (world.engine.explain(CallId(each), world.now) for each in ("cold", "warm"))

    assert cold.rule
    assert (cold.state, cold.hit) == ("ended", False)
    assert warm.rule
    assert (warm.state, warm.hit, warm.call) == ("running", True, "warm#1")


# --- the bound ---

BOUND = 5.0


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 9), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_nothing_passes_a_call_at_the_bound_on_a_device_that_could_take_it(
    seed: int, devices: int, functions: int, gap: float
) -> None:
    """Random overload; after each event, whoever was started is compared with all who waited before it was."""
    rng = random.Random(seed)
    world = World(make_policy("least-wait", wait_bound_s=BOUND), max_queue=10_000)
    memory = {}
    for number in range(devices):
        memory[f"d{number}"] = rng.choice([8, 12, 20])
        world.device(f"d{number}", memory[f"d{number}"])
    size = {}
    load_s = {}
    for number in range(functions):
        size[f"f{number}"] = rng.randint(2, 10)
        load_s[f"f{number}"] = rng.choice([0.5, 2.0, 4.0])
        world.deploy(f"f{number}", size[f"f{number}"], load_s[f"f{number}"], max_queue=10_000)
    arrived: dict[str, float] = {}
    function_of: dict[str, str] = {}
    ends: dict[str, float] = {}
    overdue = 0
    calls = 80
    number = 0
    next_arrival = 0.0
    while number < calls or world.running or world.status.queued:
        loading = [
            (each.function, device.device.id)
            for device in world.status.devices
            for each in device.resident
            if each.loading and not each.running
        ]
        coming = min(ends.values(), default=float("inf"))
        if number < calls and next_arrival <= coming and not loading:
            world.now = max(world.now, next_arrival)
            name, function = f"c{number}", f"f{rng.randrange(functions)}"
            number += 1
            next_arrival = world.now + gap * rng.random() * 2
            waiting_before = set(world.waiting)
            arrived[name], function_of[name] = world.now, function
            world.call(name, function)
        elif loading:
            waiting_before = set(world.waiting)
            world.now += 0.25
            world.loaded(*rng.choice(loading))
        elif ends:
            call = min(ends, key=lambda each: ends[each])
            world.now = max(world.now, ends.pop(call))
            waiting_before = set(world.waiting)
            world.finish(call)
        else:
            break
        started = leases(world)
        for lease in started:
            took = 1.0 + (load_s[lease.function] if lease.cold else 0.0)
            ends[lease.call] = world.now + took
        order = [each.call for each in started]
        for at, lease in enumerate(started):
            for other in waiting_before - set(order[: at + 1]):
                late = world.now - arrived[other] > BOUND
                if late and int(other[1:]) < int(lease.call[1:]) and size[function_of[other]] <= memory[lease.device]:
                    pytest.fail(f"{lease.call} passed {other} on {lease.device}")
                overdue += late
    assert not world.waiting or all(size[function_of[each]] > max(memory.values()) for each in world.waiting), (
        "a call was left behind"
    )


def test_the_bound_is_checked() -> None:
    from gpufaas_core.errors import InvalidSpec

    for bound in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidSpec, match="wait bound"):
            make_policy("least-wait", wait_bound_s=bound)


# --- loads that policies ask for ---


class Prefetching:
    """Loads `function` on the first idle device as soon as anything waits."""

    name = "prefetching"
    pass_limit = 0

    def __init__(self, function: str, victims: tuple[FunctionId, ...] | None = None) -> None:
        self.function = FunctionId(function)
        self.victims = victims
        self.refusal = None

    def plan(self, view):  # type: ignore[no-untyped-def]
        from gpufaas_scheduler.policies import Load

        for device in list(view.idle()):
            self.refusal = yield Load(self.function, device.id, self.victims)


def test_a_load_that_failed_is_not_asked_for_again_by_the_policy() -> None:
    policy = Prefetching("f")
    world = World(policy)
    world.device("d0", 10)
    world.deploy("f", size=10)
    world.call("a", "f")
    assert [each.function for each in world.out if isinstance(each, m.Load)] == ["f"]

    world.tell(m.LoadFailed(FunctionId("f"), world.status.devices[0].device.id, "no", False))

    assert "failed" in policy.refusal.reason
    assert not world.status.devices[0].busy


def test_victims_of_a_policy_are_checked() -> None:
    policy = Prefetching("f", (FunctionId("nobody"),))
    world = World(policy)
    world.device("d0", 10)
    world.deploy("f", size=10)
    world.call("a", "f")

    assert policy.refusal.reason == "nobody cannot be evicted: d0 does not hold it"
