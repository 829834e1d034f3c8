"""A full batch, or a call, goes to a copy before the one that runs there has ended, if nothing else could start."""

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler.test_batching import batches, deploy
from tests.unit.scheduler.world import World, state_of, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_core.snapshot import DeviceSnapshot, ResidentSnapshot, RunningCall
from gpufaas_scheduler.handle.ahead import AHEAD_S, LATE_S, SOON_S
from gpufaas_scheduler.handle.calls import APART_S
from gpufaas_scheduler.handle.waiting import MAX_REFUSALS
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
    explained = world.explain("c2")
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
    world.calls(5, "f")
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
    world.calls(7, "f")
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

    costs = world.costs("f")
    assert [(each.batch, each.neighbours, each.grants) for each in costs.conditions.docs()] == [(3, 0, 2)]


def test_calls_that_went_ahead_are_placed_again_if_the_node_refuses_them_or_their_worker_ends() -> None:
    world = warm()
    busy(world)
    for call in ("c0", "c1", "c2"):
        assert batches(world.refuse(call)) == []
    assert world.on("a").estimated_finish_s == pytest.approx(SHORT_S)
    assert batches(end_first(world)) == [("c0", "c1", "c2")]
    world.calls(range(3, 6), "f")
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


# --- calls of a function without batches ---


def one_by_one(policy: str = "lalb-o3", devices: str = "a", service_s: float = SHORT_S) -> World:
    """Devices whose nodes take calls ahead, and which hold f; all idle, at time 10."""
    world = World(policy)
    world.deploy("f", service_s=service_s, min_copies=len(devices))
    for name in devices:
        world.device(name, ahead=True)
        world.loaded("f", name)
    world.now = 10.0
    return world


def ahead_of(world: World) -> dict[str, float]:
    """Return how long their nodes keep the calls that went ahead with the last event."""
    grants = [each.grant for each in world.out if isinstance(each, m.StartCall)]
    return {grant.call: grant.ahead_s for grant in grants if grant.ahead_s}


def taken_back(world: World) -> list[str]:
    return [each.call for each in world.out if isinstance(each, m.Abort) and each.unbegun]


@pytest.mark.parametrize("policy", ["lalb", "lalb-o3", "least-wait"])
def test_a_call_goes_ahead_and_begins_when_the_one_before_has_ended(policy: str) -> None:
    world = one_by_one(policy)
    world.calls(4, "f")
    assert world.running.keys() == {"c0", "c1"}, "the copy has one more call than it runs"
    assert world.on("a").estimated_finish_s == pytest.approx(2 * SHORT_S)

    world.now += SHORT_S
    world.finish("c0", SHORT_S)
    assert world.started == [("c2", "a")]
    assert ahead_of(world) == {"c2": pytest.approx(SHORT_S + LATE_S)}, "c1 has begun"
    world.now += SHORT_S
    world.finish("c1", SHORT_S)
    assert world.started == [("c3", "a")]
    for call in ("c2", "c3"):
        world.now += SHORT_S
        assert world.finish(call, SHORT_S) == []
    on_a = world.on("a")
    assert (on_a.busy, on_a.busy_s) == (False, pytest.approx(4 * SHORT_S))


def test_times_of_calls_that_went_ahead_are_learnt_as_of_any_other() -> None:
    world = world_of("f", learn=True, ahead=True, warm="f", service_s=SHORT_S)
    world.calls(40, "f")
    for number in range(40):
        world.now += SHORT_S
        world.finish(f"c{number}", SHORT_S / 2)

    costs = world.costs("f")
    assert costs.service_s == pytest.approx(SHORT_S / 2, rel=0.03)
    assert not costs.conditions.docs()


def test_a_node_that_cannot_give_calls_back_gets_none_ahead() -> None:
    world = world_of("f", warm="f", service_s=SHORT_S)
    world.calls(5, "f")
    assert world.running.keys() == {"c0"}


@pytest.mark.parametrize("service_s", [1.1 * AHEAD_S, 10 * AHEAD_S])
def test_long_calls_do_not_go_ahead(service_s: float) -> None:
    world = one_by_one(service_s=service_s)
    world.calls(3, "f")
    assert world.running.keys() == {"c0"}


def test_nothing_goes_ahead_of_a_call_that_is_late_or_has_no_end_or_that_nobody_waits_for() -> None:
    late, endless, left = one_by_one(), one_by_one(), one_by_one()
    for world in (late, left):
        world.call("c0", "f")
    endless.tell(m.Arrived(CallId("c0"), FunctionId("f"), None, endless=True))
    left.tell(m.CallerLeft(CallId("c0")))
    late.now += SHORT_S + LATE_S

    for world in (late, endless, left):
        world.call("c1", "f")
        assert world.running.keys() == {"c0"}


def test_a_call_goes_ahead_only_if_there_is_one_for_each_device() -> None:
    """Else it would wait behind one call while another device becomes free."""
    world = one_by_one(devices="ab")
    world.calls(3, "f")
    assert world.running.keys() == {"c0", "c1"}

    world.call("c3", "f")

    assert world.running.keys() == {"c0", "c1", "c2", "c3"}
    assert {grant.device for grant in world.running.values()} == {"a", "b"}
    world.call("c4", "f")
    assert len(world.running) == 4


def test_a_call_of_another_function_comes_before_one_that_could_go_ahead() -> None:
    world = one_by_one()
    world.deploy("g", service_s=SHORT_S)
    world.call("c0", "f")
    world.call("other", "g")
    world.call("c1", "f")
    assert world.running.keys() == {"c0"}


@pytest.mark.parametrize("policy", ["lalb", "lalb-o3"])
def test_the_first_call_of_a_local_queue_goes_ahead_though_another_device_is_idle(policy: str) -> None:
    world = world_of("f", "a b", policy=policy, ahead=True, warm="f", load_s=10.0, service_s=SHORT_S)
    world.calls(3, "f")

    assert {call: grant.local for call, grant in world.running.items()} == {"c0": False, "c1": True}
    assert world.on("a").local_queue == 1
    world.now += SHORT_S
    world.finish("c0", SHORT_S)
    assert world.running.keys() == {"c1", "c2"}


def test_a_call_that_its_node_gives_back_is_placed_again_and_none_goes_ahead_for_a_while() -> None:
    world = one_by_one()
    world.calls(3, "f")
    for _ in range(5):
        world.now += SHORT_S + LATE_S
        world.refuse("c1")  # c0 is late: no refusal counts
        assert world.running.keys() == {"c0"}
        world.finish("c0", SHORT_S)
        assert world.running.keys() == {"c1"}, "what came back is first"
        world.now += APART_S
        world.finish("c1", SHORT_S)
        assert world.running.keys() == {"c2"}
        world.calls("c0 c1", "f")
        world.finish("c2", SHORT_S)
        world.finish("c0", SHORT_S)
        world.finish("c1", SHORT_S)
        world.calls(3, "f")
        assert world.running.keys() == {"c0", "c1"}, "again"
    (hits, misses) = world.on("a").hits, world.on("a").misses
    assert (hits, misses) == (25 + 2, 0), "each call is counted once, where it ran"


def test_a_call_that_went_ahead_is_taken_back_when_another_device_with_a_copy_is_free() -> None:
    world = one_by_one(devices="ab", service_s=4 * SOON_S)
    world.calls(4, "f")
    by_device = {grant.device: call for call, grant in sorted(world.running.items(), reverse=True)}
    first, other = (by_device[DeviceId(each)] for each in "ab")
    behind = {grant.device: call for call, grant in world.running.items() if call not in (first, other)}

    world.now += 2 * SOON_S
    world.finish(other, SOON_S)
    assert taken_back(world) == []
    world.finish(behind[DeviceId("b")], SOON_S)

    assert taken_back(world) == [behind[DeviceId("a")]]
    world.tell(m.Woken())
    assert taken_back(world) == [], "once"
    world.refuse(behind[DeviceId("a")])
    assert world.started == [(behind[DeviceId("a")], "b")]
    for call in ("n0", "n1", "n2"):
        world.call(call, "f")
    assert len(world.running) == 4, "no call took too long"


def test_a_call_that_began_before_it_could_be_taken_back_goes_on() -> None:
    world = one_by_one(devices="ab", service_s=4 * SOON_S)
    world.calls(4, "f")
    on_b = sorted(call for call, grant in world.running.items() if grant.device == "b")
    on_a = sorted(call for call, grant in world.running.items() if grant.device == "a")
    for call in on_b:
        world.finish(call, SOON_S)
    assert taken_back(world) == [on_a[1]]
    world.finish(on_a[0], SOON_S)
    assert world.finish(on_a[1], SOON_S) == []
    assert not world.running


def test_what_ends_soon_keeps_the_call_behind_it() -> None:
    world = one_by_one(devices="ab", service_s=0.9 * SOON_S)
    world.calls(4, "f")
    for call in sorted(call for call, grant in world.running.items() if grant.device == "b"):
        world.finish(call, SOON_S)
        assert taken_back(world) == []


def test_a_call_that_went_ahead_is_placed_again_when_its_worker_ends_before_it_began() -> None:
    world = one_by_one(devices="ab")
    world.calls(4, "f")
    _, behind = sorted(call for call, grant in world.running.items() if grant.device == "a")

    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "gone", world.running[behind].copy))
    assert {grant.device for grant in world.running.values()} == {"b"}
    world.waiting[behind] = FunctionId("f")  # its node refuses it
    world.out = world.engine.handle(m.NodeRefused(CallId(behind), DeviceId("a"), "not begun"), world.now)
    assert not world.rejected


def test_what_waits_on_its_node_since_no_scheduler_led_comes_before_what_could_go_ahead() -> None:
    world = World()
    for name in "fg":
        world.deploy(name, service_s=SHORT_S)
    device = Device(DeviceId("a"), "gpu", 100, ahead=True)
    held = tuple(ResidentSnapshot(FunctionId(each), f"digest of {each}", 10) for each in "fg")
    runs = tuple(RunningCall(CallId(call), FunctionId(call[0]), begun=call == "f0") for call in ("f0", "g0"))

    def handle(event: m.Event) -> list[str]:
        started = world.engine.handle(event, 10.0)
        return [each.grant.call for each in started if isinstance(each, m.StartCall)]

    handle(m.DeviceJoined(device, DeviceSnapshot(device, held, runs)))
    assert [handle(m.Arrived(CallId(call), FunctionId("f"))) for call in ("f1", "f2")] == [[], []]
    assert handle(m.Finished(CallId("f0"), device.id, SHORT_S)) == [], "g0 runs now"
    assert handle(m.Finished(CallId("g0"), device.id, SHORT_S)) == ["f1"]


@examples(80)
@given(seed=st.integers(0, 10_000), policy=st.sampled_from(["lb", "lalb", "lalb-o3", "least-wait"]))
@example(717, "least-wait")
def test_no_call_is_lost_or_begins_twice_while_calls_go_ahead_and_come_back(seed: int, policy: str) -> None:
    """`World` checks after each event. Here is the node: calls of a copy begin in the order of their grants."""
    rng, world = Random(seed), World(policy)
    world.deploy("f", 10, 0.05, SHORT_S)
    world.deploy("g", 10, 0.05, SHORT_S)
    deploy(world, "h", service_s=SHORT_S, batch_max=2)
    world.device("a", 20, ahead=True)
    world.device("b", 10, ahead=True)
    world.device("c", 30)
    begun: set[str] = set()
    number = 0

    def begin() -> None:
        for device in "abc":
            of_copy = sorted(
                (grant.number, call) for call, grant in world.running.items() if grant.device == device
            )  # fmt: skip
            if of_copy:
                begun.update(call for of, call in of_copy if of == of_copy[0][0])

    def do(event: float) -> None:
        nonlocal number
        begin()
        if event < 0.45:
            world.call(f"c{number}", rng.choice("ffffgh"))
            number += 1
            return
        waits = sorted(world.running.keys() - begun)
        if event < 0.6 and waits:
            world.refuse(rng.choice(waits))
        elif world.running and event < 0.96:
            world.finish(rng.choice(sorted(begun & world.running.keys())), SHORT_S, ok=rng.random() < 0.9)
        elif world.running:
            world.tell(m.CallerLeft(CallId(rng.choice(sorted(world.running)))))

    for _ in range(150):
        world.now += rng.choice((0.0, 0.001, 0.01, 0.04))
        world.tell(m.Woken())
        before = begun & world.waiting.keys()
        do(rng.random())
        assert not before, "a call that had begun waits again"
        state = state_of(world.engine)
        for device in state.devices.values():
            assert all(not each.ahead or device.holding for each in device.beside), "it follows something"
        assert all(grant.ahead and grant.early for grant in state.ahead), "what runs is not listed"
    for _ in range(3 * number):
        world.now += 0.1
        world.tell(m.Woken())
        for call in sorted(world.running):
            if call in world.running:
                world.finish(call, SHORT_S)
        for device in world.status.devices:  # loads without a call end, too
            for each in device.resident:
                if each.loading and not each.running:
                    world.loaded(each.function, device.device.id, each.copy)
    assert not world.running
    assert not world.waiting, "all that waits is served"
    assert not state_of(world.engine).ahead


def comes_back(world: World, *running: str) -> list[m.Command]:
    """The node of device a was away, and has the worker of f yet, with calls of it."""
    device, f = Device(DeviceId("a"), "gpu", 100, ahead=True), FunctionId("f")
    calls = tuple(RunningCall(CallId(each), f, begun=True) for each in running)
    held = (ResidentSnapshot(f, "digest of f", 10),)
    return world.engine.handle(m.DeviceJoined(device, DeviceSnapshot(device, held, calls)), world.now)


def test_a_call_ahead_counts_for_the_time_of_its_device_also_once_its_node_has_come_back() -> None:
    world = one_by_one()
    world.calls(2, "f")
    assert world.engine.status(world.now).devices[0].estimated_finish_s == pytest.approx(2 * SHORT_S)

    assert comes_back(world, "c0", "c1") == []

    assert world.engine.status(world.now).devices[0].estimated_finish_s == pytest.approx(2 * SHORT_S)
    assert world.engine.handle(m.Finished(CallId("c0"), DeviceId("a"), SHORT_S), world.now) == []
    assert world.engine.status(world.now).devices[0].estimated_finish_s == pytest.approx(SHORT_S)


def test_a_call_that_an_older_engine_granted_is_given_back_without_a_refusal() -> None:
    world = one_by_one()
    world.call("c", "f")
    for _ in range(2 * MAX_REFUSALS):
        comes_back(world, "c")
        given_back = m.NodeRefused(CallId("c"), DeviceId("a"), "another device is free", blameless=True)
        (again,) = world.engine.handle(given_back, world.now)
        assert isinstance(again, m.StartCall)
