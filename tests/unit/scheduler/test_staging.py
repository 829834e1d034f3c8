"""What is in the host tiers of nodes: loads are estimated by it, and learnt by where the weights came from."""

import pytest
from tests.unit.scheduler.test_actions import Site
from tests.unit.scheduler.world import explanation, state_of

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, NodeId, Profile
from gpufaas_core.snapshot import DeviceSnapshot, StagedWeights
from gpufaas_scheduler import contract as c
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.world.costs import Costs
from gpufaas_scheduler.world.hosts import DECLINED_S, MAX_STAGING

BIG, N1, N2 = FunctionId("big"), NodeId("n1"), NodeId("n2")


def loads(site: Site) -> dict[str, float]:
    """How long the engine expects a load of `big` to take, by device."""
    world = state_of(site.engine)
    return {name: world.functions[BIG].load_on(device) for name, device in world.devices.items()}


def on_c(function: str = BIG, tier: str = c.HOST) -> c.Load:
    return c.Load(FunctionId(function), (c.Part(DeviceId("n2/c"), 0),), tier)


def test_a_load_is_expected_to_be_shorter_where_the_weights_are_staged() -> None:
    site = Site()
    site.deploy_with(BIG, Profile(3.0, 1.0, 10, loads={"host": 0.5}))
    assert loads(site) == {"n1/a": 3.0, "n1/b": 3.0, "n2/c": 3.0}

    site.tell(m.Staged(N1, BIG, 7))
    assert loads(site) == {"n1/a": 0.5, "n1/b": 0.5, "n2/c": 3.0}
    assert state_of(site.engine).functions[BIG].load_s("gpu") == 0.5, "it is where it is shortest"

    site.tell(m.Unstaged(N1, BIG))
    assert loads(site) == {"n1/a": 3.0, "n1/b": 3.0, "n2/c": 3.0}
    assert state_of(site.engine).functions[BIG].load_s("gpu") == 3.0


def test_a_miss_on_a_node_with_the_weights_is_over_sooner() -> None:
    site = Site()
    site.deploy_with(BIG, Profile(3.0, 1.0, 10, loads={"host": 0.5}))
    site.tell(m.Staged(N2, BIG, 7))
    site.call("x", BIG)
    site.do(c.Start((CallId("x"),), None, (c.Part(DeviceId("n2/c"), 0),)))

    assert state_of(site.engine).devices[DeviceId("n2/c")].free_at == 1.5


def test_staged_weights_of_a_function_that_is_deployed_later_count() -> None:
    site = Site()
    site.tell(m.Staged(N1, FunctionId("late"), 7))
    site.tell(m.FunctionDeployed(Function(FunctionId("late"), "", profiles={"*": Profile(3.0, 1.0, 1, read_s=2.0)})))

    world = state_of(site.engine)
    assert world.functions[FunctionId("late")].load_on(world.devices[DeviceId("n1/a")]) == 1.0


def test_a_removed_function_is_not_staged_when_it_is_deployed_again() -> None:
    site = Site()
    site.tell(m.Staged(N1, BIG, 7))
    site.tell(m.FunctionRemoved(BIG))
    site.deploy_with(BIG, Profile(3.0, 1.0, 10, loads={"host": 0.5}))

    assert set(loads(site).values()) == {3.0}


def test_what_a_node_says_when_it_joins_again_replaces_what_it_said_before() -> None:
    site = Site()
    site.deploy_with(BIG, Profile(3.0, 1.0, 10, loads={"host": 0.5}))
    site.tell(m.Staged(N1, BIG, 7))
    device = Device(DeviceId("n1/a"), "gpu", 100)

    site.tell(m.DeviceJoined(device, DeviceSnapshot(device), (StagedWeights(FunctionId("other"), 1),)))
    assert set(loads(site).values()) == {3.0}
    site.tell(m.DeviceJoined(device, DeviceSnapshot(device), (StagedWeights(BIG, 1),)))
    assert loads(site)["n1/b"] == 0.5


def test_with_the_last_device_of_a_node_its_host_tier_leaves() -> None:
    site = Site()
    site.deploy_with(BIG, Profile(3.0, 1.0, 10, loads={"host": 0.5}))
    site.tell(m.Staged(N1, BIG, 7))
    site.tell(m.DeviceLeft(DeviceId("n1/a"), "gone"))
    assert loads(site)["n1/b"] == 0.5

    site.tell(m.DeviceLeft(DeviceId("n1/b"), "gone"))
    site.tell(m.DeviceJoined(Device(DeviceId("n1/b"), "gpu", 100)))
    assert set(loads(site).values()) == {3.0}
    site.tell(m.Staged(NodeId("nowhere"), BIG, 7))
    assert site.engine.ignored["Staged"] == 1


def test_weights_are_staged_where_a_policy_says() -> None:
    site = Site()

    assert site.do(on_c()) == [m.Stage(BIG, N2)]
    assert site.why_not(on_c()) == "node n2 has the weights of big already, or brings them"
    site.tell(m.Staged(N2, BIG, 7))
    assert site.why_not(on_c()) == "node n2 has the weights of big already, or brings them"
    assert site.do(c.Load(BIG, (c.Part(DeviceId("n2/c"), 0),)))[0] == m.LoadCopy(
        1, 1, BIG, "big", (c.Part(DeviceId("n2/c"), 10),)
    ), "the device was not busy meanwhile"


@pytest.mark.parametrize(("action", "why"), [
    (c.Load(BIG, (c.Part(DeviceId("n1/a"), 0),), c.HOST), "node n1 has no host tier"),
    (c.Load(BIG, (c.Part(DeviceId("n9/a"), 0),), c.HOST), "there is no device n9/a"),
    (c.Load(BIG, (), c.HOST), "a load says a device of its node"),
    (on_c("nobody"), "no model function nobody is deployed"),
    (on_c(tier="tape"), "there is no tier tape"),
])  # fmt: skip
def test_what_cannot_be_staged_is_refused(action: c.Load, why: str) -> None:
    assert Site().why_not(action) == why


def test_a_node_that_did_not_keep_weights_is_not_asked_again_at_once() -> None:
    site = Site()
    site.do(on_c())
    site.tell(m.Unstaged(N2, BIG, "the host tier is smaller than the weights"))

    assert site.why_not(on_c()) == "node n2 did not keep the weights of big a moment ago"
    site.now = DECLINED_S
    assert site.do(on_c()) == [m.Stage(BIG, N2)]


def test_a_node_brings_few_weights_at_a_time() -> None:
    site = Site()
    for number in range(MAX_STAGING):
        site.deploy(f"f{number}")
        assert site.do(on_c(f"f{number}"))

    assert site.why_not(on_c()) == f"node n2 brings {MAX_STAGING} weights already"
    site.tell(m.Staged(N2, FunctionId("f0"), 1))
    assert site.do(on_c()) == [m.Stage(BIG, N2)]


# --- what is learnt ---------------------------------------------------------------------------------------------------


def test_each_tier_has_a_time_of_its_own() -> None:
    costs = Costs(Profile(8.0, 1.0, 10))
    costs.learn_load(4.0, 0.25)
    costs.learn_load(1.0, 0.25, "host")
    costs.learn_load(2.0, 0.25, "host")
    costs.learn_load(9.0, 0.25, "peer")

    assert (costs.disk_s, costs.host_s, costs.loads) == (4.0, 1.25, {"host": 1.25, "peer": 9.0})
    again = Costs(costs.profile())
    assert (again.disk_s, again.host_s, again.loads, again.loaded) == (4.0, 1.25, costs.loads, True)


def test_a_load_from_the_host_tier_that_was_never_seen_is_one_from_disk_without_reading() -> None:
    costs = Costs(Profile(8.0, 1.0, 10))
    assert costs.host_s == 8.0, "nothing is known of it: nothing is gained by guessing"

    costs.learn_load(4.0, 0.25, read_s=3.0)
    assert costs.host_s == 1.0
    costs.learn_load(4.0, 0.25, read_s=1.0)
    assert costs.host_s == 1.5
    costs.learn_load(0.25, 0.25, "host")
    assert costs.host_s == 0.25


def test_a_fetch_from_afar_stands_in_for_a_load_from_disk_until_there_is_one() -> None:
    costs = Costs(Profile(8.0, 1.0, 10))
    costs.learn_load(6.0, 0.25, "store")
    assert (costs.disk_s, costs.profile().estimated) == (6.0, ("load", "call", "memory"))

    costs.learn_load(2.0, 0.25)
    costs.learn_load(6.0, 0.25, "store")
    assert (costs.disk_s, "load" in costs.profile().estimated) == (2.0, False)


def test_the_engine_learns_by_the_tier_that_the_node_says() -> None:
    engine = Engine(policy=make_policy("lb"), replacement=Lru())
    engine.handle(m.FunctionDeployed(Function(BIG, "", profiles={"*": Profile(8.0, 1.0, 10)})), 0.0)
    engine.handle(m.DeviceJoined(Device(DeviceId("n1/a"), "gpu", 100)), 0.0)
    engine.handle(m.Arrived(CallId("x"), BIG), 0.0)
    engine.handle(m.Loaded(BIG, DeviceId("n1/a"), 0.5, 10, 0, "host", float("nan")), 1.0)

    (learnt,) = engine.take_learnt()
    assert (learnt.profile.load_s, learnt.profile.loads) == (8.0, {"host": 0.5})


def test_a_miss_says_where_its_weights_came_from_once_they_are_there() -> None:
    site = Site()
    site.call("x", BIG)
    (start,) = (each for each in site.do(c.Start((CallId("x"),), None, (c.Part(DeviceId("n2/c"), 0),)))
                if isinstance(each, m.StartCall))  # fmt: skip
    before = site.engine.explain(CallId("x"), site.now)
    site.tell(m.Loaded(BIG, DeviceId("n2/c"), 0.5, 10, start.grant.copy, "host"))
    after = explanation(site.engine, "x", site.now)
    assert (before.tier, after.tier, after.hit) == ("", "host", False)
    (resident,) = next(each for each in site.engine.status(site.now).devices if each.device.id == "n2/c").resident
    assert resident.tier == "host"
