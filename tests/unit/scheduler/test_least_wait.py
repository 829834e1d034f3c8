"""
The promises of `least-wait`: no call waits beyond the bound while later ones pass, and no device idles beside work.
"""

import random
from collections.abc import Collection
from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, FunctionId
from gpufaas_scheduler.policies import Plan, PolicySpec, Start, View, make_policy
from gpufaas_scheduler.view import ClusterView
from gpufaas_scheduler.world.call import Call


def least_wait(bound: float = 30.0):  # type: ignore[no-untyped-def]
    return World(make_policy(PolicySpec("least-wait", {"wait_bound_s": bound})))


def grants(world) -> list[m.Grant]:  # type: ignore[no-untyped-def]
    return [each.grant for each in world.out if isinstance(each, m.StartCall)]


# --- where ---


def test_calls_one_at_a_time_fill_the_empty_device_before_anything_is_evicted() -> None:
    world = least_wait().set_up("f0 f1 f2 f3", "d0 d1", memory=25, size=10)

    for number in range(12):
        world.now += 10
        world.call(f"c{number}", f"f{number % 4}")
        world.now += 4
        world.finish(f"c{number}")

    assert sum(each.misses for each in world.status.devices) == 4
    assert sum(each.evictions for each in world.status.devices) == 0


def test_a_duplicate_is_evicted_before_the_last_copy_of_a_function_that_is_called() -> None:
    world = least_wait().set_up("twice once new", "d0 d1", memory=20, size=10)
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
    (grant,) = [each.grant for each in world.log if isinstance(each, m.StartCall) and each.grant.call == "c"]

    assert "once#0" not in grant.victims


def test_a_call_waits_for_its_holder_when_that_is_sooner_than_a_load() -> None:
    world = least_wait().set_up("f", "d0 d1", memory=10, size=10, load_s=30.0, service_s=1.0)
    world.deploy("other", size=10, load_s=30.0, service_s=1.0)
    world.call("a", "f")
    world.call("b", "other")
    world.now += 30
    world.finish("a")
    world.finish("b")
    world.now += 1
    world.call("c", "f")

    world.call("d", "f")

    assert not grants(world)
    assert [each.function for each in world.out if isinstance(each, m.LoadCopy)] == []
    world.now += 1
    world.finish("c")
    assert [(each.call, each.cold) for each in grants(world)] == [("d", False)]


def test_a_call_behind_a_long_one_is_loaded_on_the_idle_device_once_that_is_late() -> None:
    """A call of 40 s of a function whose calls take one: it waited 39 s, since nothing else happened."""
    world = least_wait().set_up("f", "d0 d1", memory=10, size=10, load_s=2.0, service_s=1.0)
    world.call("first", "f")
    for number in range(30):  # all of them take a second: that is known well
        world.now += 20.0
        for call in list(world.running):
            world.finish(call)
        world.call(f"one{number}", "f")
    (grant,) = world.running.values()
    began = world.now
    world.now += 0.25

    world.call("waits", "f")
    while "waits" not in world.running:
        assert world.engine.wake_at is not None, "nothing would ever make it look again"
        world.now = world.engine.wake_at
        world.tell(m.Woken())

    assert world.running["waits"].device != grant.device
    assert world.now - began <= 1.0 + 2.0 + 0.25, "what was estimated, and a load"


@examples(100)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 7), st.sampled_from([0.2, 0.5, 2.0]))
def test_no_call_waits_beside_an_idle_device_for_longer_than_was_estimated_and_a_load(
    seed: int, devices: int, functions: int, gap: float
) -> None:
    """The first call of each function, that is; calls take 0.1 to 40 times as long as their function says."""
    rng = random.Random(seed)
    world = least_wait()
    for number in range(devices):
        world.device(f"d{number}", 10)
    load_s = {f"f{number}": rng.choice([0.5, 2.0, 4.0]) for number in range(functions)}
    for function in load_s:
        world.deploy(function, 10, load_s[function], 1.0)
    coming: list[tuple[float, int, int, str, m.Event | None]] = []
    now = 0.0
    for number in range(40):
        now += rng.expovariate(1.0) * gap
        coming.append((now, 1, number, f"f{rng.randrange(functions)}", None))
    heapify(coming)
    serial = 0
    while coming:
        wake_at = world.engine.wake_at
        if wake_at is not None and wake_at < coming[0][0]:
            world.now = wake_at
            world.tell(m.Woken())
        else:
            world.now, _, number, function, event = heappop(coming)
            world.tell(event or m.Arrived(CallId(f"c{number}"), FunctionId(function)))
        for command in world.out:
            if isinstance(command, m.StartCall | m.LoadCopy):
                serial += 1
                grant = command.grant if isinstance(command, m.StartCall) else command
                at = world.now
                if isinstance(command, m.LoadCopy) or grant.cold:
                    at += load_s[grant.function]
                    loaded = m.Loaded(grant.function, grant.device, load_s[grant.function], 0, grant.copy)
                    heappush(coming, (at, -1, serial, grant.function, loaded))
                if isinstance(command, m.StartCall):
                    service_s = rng.choice([0.1, 0.5, 1.0, 1.0, 5.0, 40.0])
                    finished = m.Finished(grant.call, grant.device, service_s)
                    heappush(coming, (at + service_s, 0, serial, grant.function, finished))
        if all(each.busy for each in world.status.devices):
            continue
        for function in set(world.waiting.values()):
            first = min((each for each in world.waiting if world.waiting[each] == function), key=lambda e: int(e[1:]))
            explained = world.engine.explain(first, world.now)
            promised = {each.option: each.estimate_s for each in explained.options}["promised"]
            assert explained.waited_s < promised + load_s[function] + 1e-6, f"{first} waits beside an idle device"


def oldest_by_looking_at_all(view: ClusterView, without: Collection[FunctionId]) -> Call | None:
    hits = [call for call in view.queue.firsts() if call.function not in without and view.idle_holder(call)]
    return min(hits, key=lambda call: call.number, default=None)


@pytest.mark.parametrize("seed", range(2))
def test_the_oldest_hit_is_the_same_as_if_all_that_waits_and_all_that_is_idle_were_looked_at(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest_hit, compared = ClusterView.oldest_hit, []

    def both(self: ClusterView, without):  # type: ignore[no-untyped-def]
        expected = oldest_by_looking_at_all(self, without)
        assert oldest_hit(self, without) is expected
        for call in self.queue.firsts():
            idle = [each for each in call.owner.holders.values() if each.idle_key is not None]
            assert sorted(each.order for each in self.idle_holders(call, 32)) == sorted(each.order for each in idle)
        compared.append(expected)
        return expected

    monkeypatch.setattr(ClusterView, "oldest_hit", both)
    rng = random.Random(seed)
    world = least_wait()
    for number in range(4):
        world.device(f"d{number}", 30)
    for number in range(12):
        world.deploy(f"f{number}", 10, slots=2 if number % 6 == 5 else None)
    for number in range(120):
        world.now += rng.random()
        world.call(f"c{number}", f"f{rng.randrange(12)}")
        if number > 8:
            world.finish(rng.choice(sorted(world.running)))
    assert sum(each is not None for each in compared) > 30


def test_a_replica_is_loaded_beside_a_call_that_waits_and_keeps_its_device_busy() -> None:
    """Two holders' worth of demand, and an empty device."""
    world = least_wait().set_up("f", "d0 d1", memory=10, size=10, load_s=2.0, service_s=1.0)
    world.call("c0", "f")
    world.now += 3
    world.finish("c0")
    loads: list[m.LoadCopy] = []
    number = 0
    while not loads and number < 40:
        number += 1
        world.now += 0.5
        world.call(f"c{number}", "f")
        loads += [each for each in world.out if isinstance(each, m.LoadCopy)]
        world.now += 0.5
        for call in sorted(world.running):
            world.finish(call)
            loads += [each for each in world.out if isinstance(each, m.LoadCopy)]
        world.call(f"again{number}", "f")
        world.call(f"more{number}", "f")
        loads += [each for each in world.out if isinstance(each, m.LoadCopy)]

    copies = [each for device in world.status.devices for each in device.resident]
    assert len(copies) == 2, "demand for more than one device has more than one"
    if loads:
        (device,) = [each for each in world.status.devices if each.device.id == loads[0].device]
        assert device.busy
        world.loaded("f", loads[0].device)
        assert grants(world), "what waited starts where the replica is"


def test_explanations_say_what_was_weighed_and_who_was_passed_over() -> None:
    world = least_wait().set_up("held new", "d0", memory=10, size=10)
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
    world = world_of("f", "d0", policy=policy, memory=10, size=10)
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


class Watched:
    """Checks that one device at a time is reserved, and keeps whether one was when it planned last."""

    name = "least-wait"
    reserved = False

    def __init__(self) -> None:
        self.policy = make_policy(f"least-wait:wait_bound_s={BOUND}")

    def plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        verdict = None
        while True:
            self.reserved = view.reserved
            try:
                action = plan.send(verdict)
            except StopIteration as end:
                return end.value
            assert not (self.reserved and isinstance(action, Start) and action.reserved_s), "one at a time"
            verdict = yield action


@examples(300)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 9), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_past_the_bound_one_device_at_a_time_is_for_the_oldest_call(
    seed: int, devices: int, functions: int, gap: float
) -> None:
    """Random overload. Later calls pass the oldest only while a device is held or loaded for it, or for another."""
    rng = random.Random(seed)
    policy = Watched()
    world = World(policy, max_queue=10_000)
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
    calls = 80
    number = 0
    next_arrival = 0.0
    while number < calls or world.running or world.waiting:
        serving = {(each.function, each.device) for each in world.running.values()}
        loading = [each[:2] for each in world.loading() if each[:2] not in serving]
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
        started = grants(world)
        for grant in started:
            took = 1.0 + (load_s[grant.function] if grant.cold else 0.0)
            ends[grant.call] = world.now + took
        fitting = [each for each in world.waiting if size[function_of[each]] <= max(memory.values())]
        oldest = min(fitting, key=lambda each: int(each[1:]), default=None)
        if oldest not in waiting_before or world.now - arrived[oldest] <= BOUND:
            continue
        held = any(function_of[oldest] in world.models(device) for device in memory)
        for grant in started:
            passed = int(grant.call[1:]) > int(oldest[1:]) and size[function_of[oldest]] <= memory[grant.device]
            assert not passed or held or policy.reserved, f"{grant.call} passed {oldest} on {grant.device}"
    assert not world.waiting or all(size[function_of[each]] > max(memory.values()) for each in world.waiting), (
        "a call was left behind"
    )


def test_the_bound_is_checked() -> None:
    from gpufaas_core.errors import InvalidSpec

    for bound in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidSpec, match="wait_bound_s is a number, 0 or more"):
            make_policy(PolicySpec("least-wait", {"wait_bound_s": bound}))


# --- loads that policies ask for ---


class Prefetching:
    """Loads `function` on the first idle device as soon as anything waits."""

    name = "prefetching"

    def __init__(self, function: str, victims: tuple[FunctionId, ...] | None = None) -> None:
        self.function = FunctionId(function)
        self.victims = victims
        self.refusal = None

    def plan(self, view):  # type: ignore[no-untyped-def]
        from gpufaas_scheduler.policies import Load

        for device in list(view.idle()):
            self.refusal = yield Load(self.function, device.part, victims=self.victims)


def test_a_load_that_failed_is_not_asked_for_again_by_the_policy() -> None:
    policy = Prefetching("f")
    world = world_of("f", "d0", policy=policy, memory=10, size=10)
    world.call("a", "f")
    assert [each.function for each in world.out if isinstance(each, m.LoadCopy)] == ["f"]

    world.tell(m.CopyFailed(FunctionId("f"), world.status.devices[0].device.id, "no", False))

    assert "failed" in policy.refusal.reason
    assert not world.status.devices[0].busy


def test_victims_of_a_policy_are_checked() -> None:
    policy = Prefetching("f", (FunctionId("nobody"),))
    world = world_of("f", "d0", policy=policy, memory=10, size=10)
    world.call("a", "f")

    assert policy.refusal.reason == "nobody cannot be evicted: d0 does not hold it"
