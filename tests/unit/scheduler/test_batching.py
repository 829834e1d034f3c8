"""Calls that start together: which ones, how long they wait for others, and how many fit the latency goal."""

from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler.world import World, state_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_scheduler.docs import costs_doc, restore_costs
from gpufaas_scheduler.policies import POLICIES
from gpufaas_scheduler.policies.batching import LATE_S, MOMENT_S, SPARE, UNDERWAY_S
from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.world.batch_size import DECREASE, FIRST_TRIES, GOAL_SHARE, Behind, Room, next_size
from gpufaas_scheduler.world.conditions import Condition
from gpufaas_scheduler.world.costs import Costs

NUMBERS = count(1_000)


def deploy(world: World, name: str = "f", *, load_s: float = 3.0, service_s: float = 1.0, **need: object) -> None:
    declared = Need(100, **need)  # type: ignore[arg-type]
    function = Function(FunctionId(name), name, declared, {"*": Profile(load_s, service_s, 10)})
    world.tell(m.FunctionDeployed(function))


def batches(commands: list[m.Command]) -> list[tuple[str, ...]]:
    return [each.grant.calls for each in commands if isinstance(each, m.StartCall)]


def running(world: World, device: str) -> dict[str, int]:
    return {each.function: each.running for each in world.on(device).resident if each.running}


def held(commands: list[m.Command]) -> list[float]:
    return [each.grant.held_s for each in commands if isinstance(each, m.StartCall)]


def warm(policy: str = "lalb-o3", *, learn: bool = False, **need: object) -> World:
    """One idle device that holds f, at time 10."""
    world = World(policy, learn=learn)
    deploy(world, **need)
    world.device("a")
    world.warm("f", "a")
    world.now = 10.0
    return world


@pytest.mark.parametrize("policy", POLICIES)
def test_what_waits_starts_together_by_every_policy(policy: str) -> None:
    world = warm(policy, batch_max=3)
    world.calls(5, "f")
    assert world.running.keys() == {"c0"}, "nothing is waited for unless the function says so"

    assert batches(world.finish("c0")) == [("c1", "c2", "c3")]
    assert [world.finish(each) for each in ("c1", "c3")] == [[], []]
    assert batches(world.finish("c2")) == [("c4",)], "the device is free with the last of them"


def test_all_calls_of_a_batch_count_for_the_place_of_their_device_among_those_with_spare_compute() -> None:
    """A successor counts them all: otherwise it would consider the devices in another order."""
    world = World("lb")
    need = Need(30, "spatial", batch_max=3, batch_wait_s=0.5)
    world.tell(m.FunctionDeployed(Function(FunctionId("f"), "f", need, {"*": Profile(3.0, 1.0, 10)})))
    world.device("a")
    world.warm("f", "a")
    world.calls(3, "f")
    assert world.running.keys() == {"c0", "c1", "c2"}

    (key,) = state_of(world.engine).idle_devices
    assert (key[0], key[2].starts) == (-4, 4)


def test_each_call_of_a_batch_is_a_hit_or_a_miss_of_its_device_unless_it_is_refused() -> None:
    world = warm(batch_max=3, batch_wait_s=0.5)
    hits, misses = world.on("a").hits, world.on("a").misses
    world.calls(3, "f")
    assert (world.on("a").hits, world.on("a").misses) == (hits + 3, misses)

    for call in ("c0", "c1", "c2"):
        world.refuse(call)
    assert world.running.keys() == {"c0", "c1", "c2"}, "they have other grants"
    assert (world.on("a").hits, world.on("a").misses) == (hits + 3, misses)


def test_the_calls_of_a_local_queue_start_together_with_those_that_wait_for_any_device() -> None:
    world = World("lalb")
    deploy(world, load_s=10.0, batch_max=4)
    deploy(world, "g")
    world.device("a")
    world.warm("f", "a")
    world.device("b")
    world.call("runs", "f")
    world.calls(5, "f")  # b is idle, and a is free sooner than a load ends
    assert world.on("a").local_queue == 5

    assert batches(world.finish("runs")) == [("c0", "c1", "c2", "c3")]
    assert world.on("a").local_queue == 1
    world.call("occupies", "g")
    world.now = 1.0
    world.call("c5", "f")
    assert running(world, "a") == {"f": 4}
    for call in ("c0", "c1", "c2"):
        world.finish(call)
    assert running(world, "a") == {"f": 1}, "each of a batch counts"

    assert batches(world.finish("c3")) == [("c4", "c5")], "c4 from the local queue, c5 from the global one"


def test_a_call_waits_for_others_and_an_idle_device_with_it() -> None:
    world = warm(batch_max=3, batch_wait_s=0.5)
    assert world.call("c0", "f") == []
    assert world.engine.wake_at == 10.5
    world.now = 10.2
    assert world.call("c1", "f") == []
    explained = world.explain("c1")
    assert explained.rule == "an idle device waits up to 0.300 s for more calls of its batch"

    world.now = 10.5
    commands = world.tell(m.Woken())
    assert batches(commands) == [("c0", "c1")]
    assert held(commands) == [0.5]
    assert world.engine.wake_at is None
    explained = world.explain("c1")
    assert explained.batch == ("c0",)
    assert explained.rule.endswith("; its batch was held back 0.500 s for more calls")


def test_a_full_batch_does_not_wait() -> None:
    world = warm(batch_max=3, batch_wait_s=0.5)
    world.calls("c0 c1", "f")

    world.now = 10.2
    commands = world.call("c2", "f")
    assert batches(commands) == [("c0", "c1", "c2")]
    assert held(commands) == [pytest.approx(0.2)]
    assert world.engine.wake_at is None


def test_a_batch_after_one_that_was_held_back_does_not_say_so() -> None:
    world = warm(batch_max=2, batch_wait_s=0.5)
    world.call("c0", "f")
    world.tell(m.CallerLeft(CallId("c0")))
    world.now = 11.0
    world.call("c1", "f")
    world.now = 11.1
    assert held(world.call("c2", "f")) == [pytest.approx(0.1)]
    world.calls("c3 c4", "f")
    world.now = 12.0
    world.finish("c1")

    assert held(world.finish("c2")) == [0.0]


def test_the_time_in_the_queue_counts_as_waiting_for_others() -> None:
    world = warm(batch_max=3, batch_wait_s=0.5)
    world.calls(3, "f")
    world.call("late", "f")
    world.now = 12.0
    world.finish("c0")
    world.finish("c1")

    assert batches(world.finish("c2")) == [("late",)]


def test_others_use_the_device_meanwhile() -> None:
    world = World("lalb")
    deploy(world, batch_max=3, batch_wait_s=0.5)
    deploy(world, "g")
    world.device("a")
    world.warm("f", "a")
    world.warm("g", "a")
    world.now = 10.0
    world.call("c0", "f")

    assert batches(world.call("other", "g")) == [("other",)]
    world.now = 11.0
    assert batches(world.finish("other")) == [("c0",)]


def test_a_load_is_not_held_up() -> None:
    world = World("lalb")
    deploy(world, batch_max=3, batch_wait_s=0.5)
    world.device("a")

    assert batches(world.call("c0", "f")) == [("c0",)]


@pytest.mark.parametrize(
    ("goal_s", "deadline", "starts_at"),
    [
        (1.7, None, 11.7 - SPARE - UNDERWAY_S),
        (None, 11.6, 11.6 - SPARE - UNDERWAY_S),
        (3.0, 13.0, 10.5),
        (1.1, None, 10.0 + MOMENT_S),
        (0.9, None, 10.0 + MOMENT_S),
        (0.9, 10.5, 10.0),
    ],
)
def test_a_call_waits_for_others_only_as_long_as_its_goal_and_its_deadline_allow(
    goal_s: float | None, deadline: float | None, starts_at: float
) -> None:
    world = warm(batch_max=3, batch_wait_s=0.5)
    arrived = m.Arrived(CallId("c"), FunctionId("f"), deadline, goal_s=goal_s)

    commands = world.tell(arrived)

    if starts_at > 10.0:
        assert commands == []
        assert world.engine.wake_at == pytest.approx(starts_at), "it keeps them although it takes longer than the mean"
        world.now = starts_at
        commands = world.tell(m.Woken())
    assert batches(commands) == [("c",)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("late_s", [0.0, 0.2])
@pytest.mark.parametrize("target", [0, 1])
def test_calls_that_come_while_their_copy_loads_start_together_when_it_is_loaded(
    policy: str, late_s: float, target: int
) -> None:
    """Its slots are free for them before, but a worker that still loads would run each of them alone."""
    world = World(policy)
    deploy(world, batch_max=8, batch_wait_s=0.5, slots=3)
    world.device("a")
    world.tell(m.Scaled(FunctionId("f"), target))
    world.calls(6, "f")
    assert world.running.keys() == (set() if target else {"c0"})

    world.now = 3.0
    world.tell(m.Woken())
    world.now = 3.0 + late_s
    started = batches(world.loaded("f", "a"))

    assert started == [tuple(f"c{at}" for at in range(0 if target else 1, 6))]


def test_a_load_that_takes_longer_than_expected_is_waited_for_a_while() -> None:
    world = World("lb")
    deploy(world, batch_max=4, batch_wait_s=0.5, slots=3)
    world.device("a")
    world.call("c0", "f")
    assert world.call("c1", "f") == []
    assert world.engine.wake_at == 3.0

    world.now = 3.0
    assert world.tell(m.Woken()) == []
    assert world.engine.wake_at == 3.0 + LATE_S


@pytest.mark.parametrize("goal_s", [10.0, 0.01])
def test_calls_of_one_moment_start_as_batches_whatever_their_goal(goal_s: float) -> None:
    world = warm("lb", batch_max=128, batch_wait_s=0.5, slots=10)
    started = []
    for number in range(300):
        started += batches(world.tell(m.Arrived(CallId(f"c{number}"), FunctionId("f"), goal_s=goal_s)))
    world.now = 10.5
    started += batches(world.tell(m.Woken()))

    assert [len(each) for each in started] == [128, 128, 44]


def test_a_copy_may_be_limited_to_smaller_batches() -> None:
    world = warm("lb", batch_max=4)
    (copy,) = state_of(world.engine).devices[DeviceId("a")].residency.copies.values()
    copy.batch = 2  # as `Limit` sets it
    world.calls(4, "f")

    assert batches(world.finish("c0")) == [("c1", "c2")]


# --- estimates --------------------------------------------------------------------------------------------------------


def learnt(world: World, size: int, took_s: float) -> None:
    """A batch of *size* takes *took_s*; one call takes 1 s."""
    costs = world.costs("f")
    costs.learn_beside(took_s, 0.0, Condition(size), 1.0)


def test_a_local_queue_takes_the_time_of_its_batches() -> None:
    world = World("lalb")
    deploy(world, load_s=50.0, batch_max=4)
    deploy(world, "g")
    world.device("a")
    world.warm("f", "a")
    learnt(world, 2, 1.2)
    learnt(world, 4, 1.6)
    world.device("b")
    world.call("runs", "f")
    queue_s = []
    for number in range(10):
        world.call(f"c{number}", "f")
        queue_s.append(world.on("a").estimated_finish_s - 1.0)
    assert world.on("a").local_queue == 10

    assert queue_s == pytest.approx([1.0, 1.2, 1.2, 1.6, 2.6, 2.8, 2.8, 3.2, 4.2, 4.4])
    world.finish("runs")
    assert world.on("a").estimated_finish_s == pytest.approx(4.4)
    for number in range(8):
        world.finish(f"c{number}")
    assert (world.on("a").local_queue, len(world.running)) == (0, 2)
    assert state_of(world.engine).devices[DeviceId("a")].local_s == 0.0


@pytest.mark.parametrize(("waiting", "wait_s"), [(1, 1.0), (4, 1.0), (8, 2.6), (12, 4.2)])
def test_least_wait_expects_batches_before_a_call_and_not_its_own(waiting: int, wait_s: float) -> None:
    world = World("least-wait")
    deploy(world, batch_max=4)
    world.device("a")
    world.warm("f", "a")
    learnt(world, 4, 1.6)
    world.call("runs", "f")
    world.calls(waiting, "f")
    view = state_of(world.engine).view

    found_s = Estimates(view).wait_s(view.queue.first())

    assert found_s == pytest.approx(wait_s)


# --- adaptive sizes ---------------------------------------------------------------------------------------------------


def sizes_of(fixed_s: float, each_s: float, goal_s: float, waiting: list[int]) -> list[int]:
    """
    Return the sizes of batches of which one of n takes fixed_s + each_s x n.

    :param waiting: so many calls wait at the end of each of them
    """
    world = warm("lb", batch_max=32, latency_goal_s=goal_s, batch_adaptive=True, service_s=fixed_s + each_s)
    world.call("first", "f")
    number, sizes = 0, []
    for most in waiting:
        names = list(world.running)
        sizes.append(len(names))
        took_s = fixed_s + each_s * len(names)
        world.now += took_s
        while len(world.waiting) < most:
            world.call(f"c{number}", "f")
            number += 1
        for name in names:
            world.finish(name, took_s)
    return sizes


def test_batches_adapt_to_the_latency_goal() -> None:
    """Half of the goal is enough for eight."""
    sizes = sizes_of(0.1, 0.05, 1.02, [9] * 60)

    assert sizes[:4] == [1, 2, 3, 4]
    assert max(sizes) == 9
    assert set(sizes[20:]) == {8, 9}


def test_batches_grow_beyond_half_of_the_goal_while_the_queue_breaks_it() -> None:
    """One call alone takes more than half of the goal, and a batch of six takes all of it."""
    quiet, busy = sizes_of(0.5, 0.05, 0.81, [1] * 20), sizes_of(0.5, 0.05, 0.81, [40] * 30 + [1] * 30)

    assert set(quiet) == {1}
    assert busy[:6] == [1, 1, 2, 3, 4, 5], "at the end of the first batch no call has waited yet"
    assert max(busy) == 7
    assert set(busy[10:30]) == {6}, "larger ones are not tried again and again"
    assert set(busy[-5:]) == {1}, "the queue is short again"


def test_batches_do_not_grow_where_a_call_costs_the_same_in_a_larger_one() -> None:
    short, long = sizes_of(0.0, 0.3, 1.0, [40] * 60), sizes_of(0.0, 0.6, 1.0, [40] * 60)

    assert max(short) == 2, "two take little more than half of the goal"
    assert (max(long), long.count(2)) == (2, 1), "one try"


def test_a_goal_that_one_call_breaks_alone_does_not_keep_batches_small() -> None:
    """They grow as long as that pays: a call in a batch of eight takes a sixth of the time."""
    sizes = sizes_of(1.0, 0.05, 0.5, [40] * 60)

    assert set(sizes_of(1.0, 0.05, 0.5, [1] * 20)) == {1}
    assert min(sizes[30:]) >= 12


BEHIND = st.none() | st.builds(Behind, st.floats(0.0, 2.0), st.floats(0.0, 2.0))


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 64), BEHIND), max_size=50),
)
@examples(100)
def test_a_size_stays_within_its_bounds_and_moves_towards_its_goal(
    most: int, seen: list[tuple[float, int, Behind | None]]
) -> None:
    size = 1.0
    for took_s, calls, behind in seen:
        before, ran = size, min(calls, int(size))
        size = next_size(before, ran, took_s, 1.0, most, behind)
        assert 1.0 <= size <= most
        if took_s <= GOAL_SHARE or (behind is not None and size > before):
            larger = min(most, before + 1.0)
            assert size == (larger if ran == int(before) else before), "one that was not full says nothing"
        elif behind is None or took_s > 1.0 >= behind.alone_s or (ran > 1 and took_s > behind.alone_s * ran):
            assert size == max(1.0, min(before, ran) * DECREASE)
        else:
            assert size in (before, max(1.0, min(before, ran) * DECREASE))


# --- what fits into memory --------------------------------------------------------------------------------------------


def ran_out(world: World, device: str = "a") -> None:
    world.tell(m.Measured(FunctionId("f"), DeviceId(device), 0, 0, out_of_memory=True))


def run_batches(world: World, ends: int) -> list[int]:
    """End so many batches, while calls keep waiting; return the sizes of those that follow."""
    sizes = []
    for _ in range(ends):
        while len(world.waiting) < 20:
            world.call(f"c{next(NUMBERS)}", "f")
        names = list(world.running)
        world.now += 1.0
        for name in names:
            world.finish(name, 1.0)
        sizes.append(len(world.running))
    return sizes


def test_after_a_batch_that_ran_out_of_memory_the_next_ones_are_half_as_large_for_a_while() -> None:
    world = warm("lb", learn=True, batch_max=8)
    world.call("first", "f")
    assert run_batches(world, 2) == [8, 8]

    ran_out(world)

    sizes = run_batches(world, 4 * FIRST_TRIES + 8)
    assert sizes[:FIRST_TRIES] == [4] * FIRST_TRIES
    assert sizes == sorted(sizes)
    assert sizes[-1] == 8


def test_each_further_batch_that_runs_out_is_tried_again_later() -> None:
    world = warm("lb", learn=True, batch_max=8)
    world.call("first", "f")
    run_batches(world, 1)
    ran_out(world)
    assert run_batches(world, FIRST_TRIES + 1)[-1] == 5

    ran_out(world)

    assert run_batches(world, 2 * FIRST_TRIES + 1) == [2] * 2 * FIRST_TRIES + [3]


def test_a_successor_knows_how_many_fit() -> None:
    world = warm("lb", learn=True, batch_max=8)
    world.call("first", "f")
    run_batches(world, 1)
    ran_out(world)
    run_batches(world, 3)
    costs = world.costs("f")

    successor = Costs(Profile(3.0, 1.0, 10))
    restore_costs(successor, costs_doc(costs))

    assert (successor.room, costs.room) == (Room(4, 2, FIRST_TRIES),) * 2


def test_a_new_copy_starts_with_no_more_calls_than_fit_and_one_call_that_ran_out_says_nothing_of_batches() -> None:
    world = warm("lb", learn=True, batch_max=8)
    world.call("first", "f")
    ran_out(world)
    assert run_batches(world, 1) == [8]
    ran_out(world)

    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "killed", 0))

    assert len(world.running) == 4
    (grant,) = state_of(world.engine).devices[DeviceId("a")].grants()
    assert grant.copy.loading


# --- whatever happens -------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 5),
    st.sampled_from((0.0, 0.25, 1.0)),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=40),
)
@examples(60)
def test_calls_start_in_order_in_batches_that_are_small_enough_and_never_wait_too_long_beside_their_copy(
    policy: str, most: int, wait_s: float, devices: int, arrivals: list[tuple[int, bool]]
) -> None:
    world = World(policy)
    deploy(world, "f", batch_max=most, batch_wait_s=wait_s)
    deploy(world, "g", batch_max=1)
    for number in range(devices):
        world.device(f"d{number}")
    calendar: list[tuple[float, int, str, str]] = []
    """Time, a number, and a call with its function; a call that ends; or a function with the device that loads it."""
    at = 0.0
    for number, (pause, of_f) in enumerate(arrivals):
        at += pause / 8
        heappush(calendar, (at, number, f"c{number}", "f" if of_f else "g"))
    order: list[str] = []
    seen = 0
    while calendar or world.engine.wake_at is not None:
        wake_at = world.engine.wake_at
        if wake_at is not None and (not calendar or wake_at <= calendar[0][0]):
            world.now = max(world.now, wake_at)
            world.tell(m.Woken())
        else:
            world.now, _, call, function = heappop(calendar)
            if not call:
                world.loaded(*function.split(" "))
            elif function:
                world.call(call, function)
            elif call in world.running:
                world.finish(call)
        for command in world.log[seen:]:
            if isinstance(command, m.LoadCopy):
                heappush(calendar, (world.now + 3.0, 1_000, "", f"{command.function} {command.device}"))
            elif isinstance(command, m.StartCall):
                grant = command.grant
                assert len(grant.calls) <= (most if grant.function == "f" else 1)
                order += [each for each in grant.calls if grant.function == "f"]
                for each in grant.calls:
                    heappush(calendar, (world.now + 1.0 + 3.0 * grant.cold, 1_000, each, ""))
        seen = len(world.log)
        idle = [each for each in world.status.devices if not each.busy and "f" in world.models(each.device.id)]
        waiting = [each for each in state_of(world.engine).queue.firsts() if each.function == "f"]
        if idle and waiting:
            since = min(each.arrived_at for each in waiting)
            assert world.now < since + wait_s, f"{waiting[0].id} waits beside {idle[0].device.id}"

    assert not world.waiting
    if devices == 1:
        assert order == sorted(order, key=lambda each: int(each[1:]))
