"""Service times by the way in which a grant runs: in batches, within shares, beside others."""

import pytest

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile, RatioDoc
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.world.conditions import ALONE, Condition, Conditions
from gpufaas_scheduler.world.costs import Costs

A = DeviceId("a")


def test_a_condition_that_was_not_seen_counts_as_the_nearest_one_that_was() -> None:
    known = Conditions()
    known.add(Condition(batch=8), 3.0, 0.25)
    known.add(Condition(neighbours=1), 1.5, 0.25)

    assert known.ratio(ALONE) == 1.0
    assert known.ratio(Condition(batch=8)) == 3.0
    assert known.ratio(Condition(batch=7)) == 3.0
    assert known.ratio(Condition(batch=2)) == 1.0, "one call alone is nearer than eight together"
    assert known.ratio(Condition(neighbours=2)) == 1.5


def test_ratios_follow_what_is_seen_and_survive_as_docs() -> None:
    known = Conditions()
    known.add(Condition(4), 2.0, 0.25)
    for _ in range(40):
        known.add(Condition(4), 3.0, 0.25)

    assert known.ratio(Condition(4)) == pytest.approx(3.0, rel=0.01)
    assert Conditions(known.docs()).docs() == known.docs()


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_impossible_ratios_are_ignored(ratio: float) -> None:
    known = Conditions([RatioDoc(2, 0, 0, ratio, 3)])
    known.add(Condition(2), ratio, 0.25)

    assert known.docs() == ()


def test_a_time_alone_that_drifts_takes_the_times_of_batches_with_it() -> None:
    costs = Costs(Profile(1.0, 1.0, 10))
    costs.learn_beside(2.0, 0.0, Condition(8), 0.25)
    costs.service_s = 2.0

    assert costs.grant_s(0.0, Condition(8)) == 4.0
    assert costs.profile().ratios == (RatioDoc(8, 0, 0, 2.0, 1),)


def test_the_engine_learns_times_beside_others_apart_from_times_alone() -> None:
    engine = Engine(policy=make_policy("lalb-o3"), replacement=Lru(), learn=True)
    for name in "fg":
        known = {"*": Profile(3.0, 1.0, 10, measured=True)}
        engine.handle(m.FunctionDeployed(Function(FunctionId(name), "d", Need(50, "spatial"), known)), 0.0)
    engine.handle(m.DeviceJoined(Device(A, "gpu", 100)), 0.0)
    engine.handle(m.Arrived(CallId("1"), FunctionId("f")), 0.0)
    engine.handle(m.Loaded(FunctionId("f"), A, 3.0, 10, 1), 3.0)
    engine.handle(m.Arrived(CallId("2"), FunctionId("g")), 3.5)
    engine.handle(m.Finished(CallId("1"), A, 2.0), 5.0)

    learnt = {each.function: each.profile for each in engine.take_learnt()}["f"]

    assert learnt.service_s == 1.0, "a time beside another call says nothing of the time alone"
    assert learnt.ratios == (RatioDoc(1, 0, 1, 2.0, 1),)
