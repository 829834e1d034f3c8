"""A call that would be answered after its goal is refused when it comes, if its function says so."""

import pytest
from tests.unit.scheduler.world import World

from gpufaas_core import messages as m
from gpufaas_core.model import Asked, CallId, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_scheduler.policies import POLICIES
from gpufaas_scheduler.policies.in_time import LONGEST_S

LOAD_S, SERVICE_S = 3.0, 1.0
PLACED, DIRECT = Need(), Need(0)


def world_with(
    need: Need = PLACED, *, goal_s: float | None = None, sheds: bool = True, policy: str = "lalb-o3", warm: bool = True
) -> World:
    """Return one with a device a that holds f, unless it is not *warm*."""
    world = World(policy, learn=False)
    need = Need(need.compute, need.sharing, need.slots, need.batch_max, latency_goal_s=goal_s)
    profile = Profile(LOAD_S, SERVICE_S, 10)
    world.tell(m.FunctionDeployed(Function(FunctionId("f"), "", need, {"*": profile}, sheds=sheds)))
    world.device("a")
    if warm:
        call(world, "warm", 100.0)
        world.finish("warm")
    return world


def call(world: World, name: str, goal_s: float | None = None) -> m.RejectCall | None:
    """A call of f comes, perhaps with a goal of its own. Return its refusal."""
    out = world.tell(m.Arrived(CallId(name), FunctionId("f"), asked=None if goal_s is None else Asked(goal_s)))
    return next((each for each in out if isinstance(each, m.RejectCall)), None)


def goes(world: World, name: str, goal_s: float | None = None) -> bool:
    return call(world, name, goal_s) is None


@pytest.mark.parametrize("need", [PLACED, DIRECT, Need(100, "auto")])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_is_refused_that_takes_longer_than_its_goal_even_alone(policy: str, need: Need) -> None:
    world = world_with(need, policy=policy)

    refused = call(world, "c", 0.5)

    assert refused == m.RejectCall(
        CallId("c"), "policy", "f has a goal of 0.5 s: a call would start in 0 s and take 1 s", 60.0, 503,
        {"goal_s": 0.5, "starts_in_s": 0.0, "takes_s": 1.0},
    )  # fmt: skip
    assert goes(world, "d", 1.0)
    assert goes(world, "e"), "it has no goal"


def test_calls_that_are_refused_count_for_the_rate_by_which_copies_are_planned() -> None:
    few, many = world_with(goal_s=0.5), world_with(goal_s=0.5)
    for number in range(20):
        assert not goes(many, f"c{number}")

    assert many.engine.snapshot(many.now).rates["f"] > few.engine.snapshot(few.now).rates["f"]


@pytest.mark.parametrize("need", [PLACED, Need(100, "auto")])
def test_a_busy_copy_is_counted_with_what_is_left_of_its_call_and_the_calls_that_wait_before(need: Need) -> None:
    world = world_with(need, goal_s=10.0)
    world.call("runs", "f")
    world.now += 0.4

    refused = call(world, "c", 1.5)

    assert refused is not None
    assert refused.details is not None
    left_s = refused.details["starts_in_s"]
    assert 0.6 <= left_s < 0.8, "after one call, others may take longer"
    assert refused.retry_after_s == pytest.approx(left_s - 0.5, abs=0.01)
    assert goes(world, "waits", 1.8)
    assert not goes(world, "d", 2.5), "one call is running, one waits, and it takes a second itself"
    assert goes(world, "e", 2.8)


def test_retry_after_says_when_the_same_call_would_be_in_time() -> None:
    world = world_with(goal_s=2.0)
    assert goes(world, "runs")
    assert goes(world, "waits", 3.0)
    refused = call(world, "late")
    assert refused is not None
    assert not goes(world, "late too")

    world.now += refused.retry_after_s
    world.finish("runs")

    assert [*world.running] == ["waits"]
    assert goes(world, "in time")


@pytest.mark.parametrize(
    ("running", "waiting", "goal_s", "passes"),
    [
        (0, 0, 1.0, True),
        (1, 0, 1.0, True),  # in the second slot
        (2, 0, 1.2, False),  # one of two slots is free after a third of a call
        (2, 0, 1.4, True),
        (2, 2, 1.4, False),  # two calls wait, for two slots: one more call
        (2, 2, 2.4, True),
    ],
)
def test_a_call_of_a_direct_function_is_behind_those_that_wait_for_its_slots(
    running: int, waiting: int, goal_s: float, passes: bool
) -> None:
    world = world_with(Need(0, slots=2))
    world.calls(running + waiting, "f")
    assert len(world.running) == running
    assert goes(world, "c", goal_s) == passes


def test_the_copy_counts_that_is_free_first() -> None:
    world = world_with(policy="lb")
    world.device("b")
    world.calls(2, "f")  # one of them loads it on b
    for name in sorted(world.running):
        world.finish(name)
    world.call("runs", "f")
    world.now += 0.8
    world.call("runs too", "f")
    assert len(world.running) == 2

    assert not goes(world, "c", 1.4), "of the first, more than 0.4 s may be left, as times vary; of the other 1 s"
    assert goes(world, "d", 1.5)
    assert not goes(world, "e", 1.9), "a call waits for one of two copies"
    assert goes(world, "g", 2.0)


def test_calls_in_the_local_queue_of_a_copy_are_counted_once() -> None:
    world = world_with(policy="lalb")
    world.call("runs", "f")
    world.device("b")
    world.call("waits", "f")
    assert world.engine._world.devices[DeviceId("a")].local

    assert not goes(world, "c", 2.9)
    assert goes(world, "d", 3.1), "after the one that runs and the one that waits"


@pytest.mark.parametrize("need", [PLACED, DIRECT])
def test_the_first_call_loads_its_function_though_that_takes_too_long_and_others_wait_for_no_load(need: Need) -> None:
    world = world_with(need, warm=False)
    assert not goes(world, "slow", 0.9)

    assert goes(world, "first", 1.5)
    world.now += 2.0

    assert not goes(world, "c", 2.4), "one second of the load, one of the call before, and its own"
    assert goes(world, "d", 3.1)


def test_another_device_with_room_may_load_it_in_time() -> None:
    world = world_with()
    world.calls(6, "f")
    assert not goes(world, "c", 4.5)
    world.device("b")
    world.call("on b", "f")
    assert not goes(world, "c", 4.5)


def test_nobody_is_refused_who_has_no_goal_or_whose_function_queues() -> None:
    queues, no_goal = world_with(goal_s=0.1, sheds=False), world_with()
    for number in range(5):
        assert goes(queues, f"c{number}")
        assert goes(no_goal, f"c{number}")


def test_nothing_is_refused_by_times_that_are_guesses() -> None:
    world = World("least-wait", learn=True)
    need = Need(latency_goal_s=0.001)
    world.tell(m.FunctionDeployed(Function(FunctionId("f"), "", need, {"*": Profile(3.0, 1.0, 10)}, sheds=True)))
    world.device("a")

    assert goes(world, "first")
    world.finish("first", 0.2)
    assert not goes(world, "second"), "now it is known how long it takes"


def test_a_function_that_takes_longer_than_its_goal_is_tried_again_after_a_while() -> None:
    world = world_with(goal_s=0.5)
    assert not goes(world, "c0")
    world.now += LONGEST_S / 2
    assert not goes(world, "c1")
    world.now += LONGEST_S / 2
    assert goes(world, "c2")
    assert not goes(world, "c3")


def test_a_call_that_waited_elsewhere_before_is_not_refused() -> None:
    world = world_with(goal_s=0.5)
    out = world.tell(m.Arrived(CallId("c"), FunctionId("f"), age_s=0.1))
    assert not [each for each in out if isinstance(each, m.RejectCall)]


def test_a_refusal_is_not_counted_as_a_call_of_the_function() -> None:
    world = world_with(goal_s=0.5)
    before = world.engine.queue_length, list(world.engine.calls())
    assert not goes(world, "c")
    assert (world.engine.queue_length, list(world.engine.calls())) == before
