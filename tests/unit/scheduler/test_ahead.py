"""A full batch goes to a copy before the one that runs there has ended, if nothing else could start in its place."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler.test_batching import batches, deploy
from tests.unit.scheduler.world import World, state_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_scheduler.handle.ahead import AHEAD_S
from gpufaas_scheduler.policies import POLICIES

SHORT_S = AHEAD_S / 4


def warm(policy: str = "lalb-o3", *, learn: bool = False, service_s: float = SHORT_S, **need: object) -> World:
    """One idle device that holds f, whose batches are short, at time 10."""
    world = World(policy, learn=learn)
    deploy(world, service_s=service_s, **{"batch_max": 3, **need})
    world.device("a")
    world.warm("f", "a")
    world.now = 10.0
    return world


def busy(world: World, waiting: int = 3) -> list[tuple[str, ...]]:
    """Let r0, r1 and r2 run together, and so many calls come; return the batches that start then."""
    for name in ("first", "r0", "r1", "r2"):
        world.call(name, "f")
    assert batches(world.finish("first")) == [("r0", "r1", "r2")]
    started = []
    for number in range(waiting):
        started += batches(world.call(f"c{number}", "f"))
    return started


def end_first(world: World) -> list[m.Command]:
    return [each for name in ("r0", "r1", "r2") for each in world.finish(name, SHORT_S)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_batch_goes_ahead_and_begins_when_the_one_before_has_ended(policy: str) -> None:
    world = warm(policy)
    assert busy(world, waiting=7) == [("c0", "c1", "c2")], "the copy has one more batch than it runs"
    (on_a,) = world.status.devices
    assert (on_a.resident[0].running, on_a.busy) == (6, True)
    assert on_a.estimated_finish_s == pytest.approx(2 * SHORT_S)
    explained = world.engine.explain(CallId("c2"), world.now)
    assert explained is not None
    assert explained.rule.startswith("a full batch for the copy that runs now")

    world.now = 10.01
    assert batches(end_first(world)) == [("c3", "c4", "c5")]
    assert world.on("a").estimated_finish_s == pytest.approx(2 * SHORT_S), "from now on"
    assert [world.finish(each, 0.01) for each in ("c0", "c1", "c2")] == [[], [], []]
    assert [batches(world.finish(each, 0.01)) for each in ("c3", "c4", "c5")] == [[], [], [("c6",)]]
    world.finish("c6", 0.01)
    assert not world.on("a").busy


def test_nothing_goes_ahead_of_a_call_alone() -> None:
    """Its answer may stream for ever, and its worker has to be told when its caller leaves."""
    world = warm()
    for number in range(5):
        world.call(f"c{number}", "f")
    assert world.running.keys() == {"c0"}


@pytest.mark.parametrize(
    "need",
    [
        Need(batch_max=3, slots=2), Need(batch_max=4), Need(50, "spatial", batch_max=3),
        Need(batch_max=1),
    ],
    ids=str,
)  # fmt: skip
def test_batches_that_are_not_full_and_those_with_company_do_not_go_ahead(need: Need) -> None:
    world = World("lalb-o3")
    world.tell(m.FunctionDeployed(Function(FunctionId("f"), "f", need, {"*": Profile(3.0, SHORT_S, 10)})))
    world.device("a")
    world.warm("f", "a")
    for number in range(7):
        world.call(f"c{number}", "f")
    world.finish("c0")

    world.call("another", "f")

    assert not [grant for grant in state_of(world.engine).devices[DeviceId("a")].beside if grant.ahead]


def test_long_batches_do_not_go_ahead() -> None:
    assert busy(warm(service_s=2 * AHEAD_S)) == []


def test_a_call_of_another_function_comes_before_a_batch_that_could_go_ahead() -> None:
    world = warm()
    deploy(world, "g")
    assert busy(world, waiting=2) == []
    world.call("other", "g")
    assert [world.call(f"c{number}", "f") for number in (2, 3)] == [[], []]


def test_the_local_queue_of_a_device_goes_ahead_beside_an_idle_device() -> None:
    world = World("lalb")
    deploy(world, load_s=10.0, service_s=SHORT_S, batch_max=3)
    world.device("a")
    world.warm("f", "a")
    world.device("b")
    assert busy(world, waiting=2) == []
    assert world.on("a").local_queue == 2

    assert batches(world.call("c2", "f")) == [("c0", "c1", "c2")]
    assert world.on("a").local_queue == 0


def test_times_of_a_batch_that_went_ahead_are_those_of_a_batch_without_neighbours() -> None:
    world = warm(learn=True)
    busy(world)
    end_first(world)
    for call in ("c0", "c1", "c2"):
        world.finish(call, SHORT_S)

    costs = state_of(world.engine).functions[FunctionId("f")].costs["gpu"]
    assert costs is not None
    assert [(each.batch, each.neighbours, each.grants) for each in costs.conditions.docs()] == [(3, 0, 2)]


def test_calls_that_went_ahead_are_placed_again_if_the_node_refuses_them_or_their_worker_ends() -> None:
    world = warm()
    busy(world)
    for call in ("c0", "c1", "c2"):
        assert batches(world.refuse(call)) == []
    assert world.on("a").estimated_finish_s == pytest.approx(SHORT_S)
    assert batches(end_first(world)) == [("c0", "c1", "c2")]
    for number in range(3, 6):
        world.call(f"c{number}", "f")
    assert len(world.running) == 6

    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "gone", 0))
    assert (len(world.running), len(world.on("a").resident)) == (0, 0)
    world.call("next", "f")
    assert world.running.keys() == {"next"}


def test_a_caller_who_leaves_takes_only_its_own_call_along() -> None:
    world = warm()
    busy(world)
    (abort,) = world.tell(m.CallerLeft(CallId("c1")))
    assert isinstance(abort, m.Abort)
    end_first(world)
    world.finish("c1", ok=False)
    assert sorted(world.running) == ["c0", "c2"]
    world.finish("c0")
    world.finish("c2")
    assert not world.on("a").busy


@examples(60)
@given(seed=st.integers(0, 10_000), policy=st.sampled_from(["lb", "lalb-o3", "least-wait"]))
def test_no_call_is_lost_while_batches_go_ahead(seed: int, policy: str) -> None:
    """`World` checks after each event."""
    rng, world = Random(seed), World(policy)
    deploy(world, service_s=SHORT_S, batch_max=2)
    deploy(world, "g", service_s=SHORT_S, batch_max=3, batch_wait_s=0.01)
    deploy(world, "h", service_s=SHORT_S)
    world.device("a", 20)
    world.device("b", 10)
    number = 0
    for _ in range(120):
        world.now += rng.choice((0.0, 0.001, 0.03))
        do = rng.random()
        if do < 0.5:
            world.call(f"c{number}", rng.choice("ffffgh"))
            number += 1
        elif world.running:
            call = rng.choice(sorted(world.running))
            grant = world.running[call]
            if do < 0.9:
                world.finish(call, SHORT_S, ok=rng.random() < 0.9)
            elif do < 0.95 and not grant.cold:
                world.refuse(call)
            elif do < 0.97 and not grant.cold:
                world.tell(m.WorkerExited(grant.function, grant.device, "gone", grant.copy))
            else:
                world.tell(m.CallerLeft(CallId(call)))
        world.tell(m.Woken())
        devices = state_of(world.engine).devices.values()
        assert all(not device.beside or device.holding for device in devices), "what went ahead follows something"
    for _ in range(2 * number):
        world.now += 0.1
        world.tell(m.Woken())
        for call in sorted(world.running):
            if call in world.running:
                world.finish(call, SHORT_S)
    assert not world.running
    assert not world.waiting, "all that waits is served"
