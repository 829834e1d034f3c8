"""What plans are made from, as the engine knows it."""

import pytest
from msgspec.structs import replace
from tests.unit.scheduler.world import World

from gpufaas_core import messages as m
from gpufaas_core.constraints import TORCH
from gpufaas_core.model import Device, DeviceId, FunctionId, Taken, TakenBatch
from gpufaas_core.snapshot import DeviceSnapshot


def test_a_snapshot_has_what_can_be_planned() -> None:
    """One revision of each function, devices that take copies, and rates over all revisions of a function."""
    world = World().set_up("f.fn@1 g.fn@1", "a b")
    world.call("c1", "f.fn@1")
    world.deploy("f.fn@2", succeeds="f.fn@1")
    world.call("c2", "f.fn@2")
    world.tell(m.DeviceDrained(DeviceId("b")))
    world.tell(m.FunctionRemoved(FunctionId("g.fn@1")))

    seen = world.engine.snapshot(0.0)

    assert [each.id for each in seen.functions] == ["f.fn@2"]
    assert seen.devices == (Device(DeviceId("a"), "gpu", 100),)
    assert seen.rates["f.fn"] == pytest.approx(2 / 3)  # of the least observed time, 3 s
    assert seen.plan is None


def test_a_snapshot_has_profiles_as_they_were_learnt() -> None:
    world = World(learn=True).set_up("f", "a")
    world.call("c", "f")
    world.loaded("f", "a", load_s=4.0)
    world.finish("c", 2.0)

    (learnt,), (declared,) = (world.engine.snapshot(0.0, profiled=each).functions for each in (True, False))

    assert (learnt.profiles["gpu"].load_s, learnt.profiles["gpu"].service_s) == (4.0, 2.0)
    assert learnt.profiles["*"] == declared.profiles["*"]
    assert list(declared.profiles) == ["*"]


def test_a_rate_fades_when_calls_end() -> None:
    world = World().set_up("f", "a")
    for number in range(600):
        world.now = number / 10
        world.call(f"c{number}", "f")

    now, later = (world.engine.snapshot(at).rates["f"] for at in (60.0, 660.0))

    assert now == pytest.approx(10, rel=0.02)
    assert later < 0.1


def test_a_profile_that_was_taken_is_in_the_snapshot_unless_it_is_stale() -> None:
    taken = Taken("1", 0.0, 3.0, 40, {1: TakenBatch(0.5, 0.5, 20, 60.0), 2: TakenBatch(0.75, 0.8, 20)}, torch="2.10")
    world = World(learn=True).set_up("f g", "b")
    world.tell(m.DeviceJoined(Device(DeviceId("a"), "gpu", 100, {TORCH: "2.10"}), DeviceSnapshot(DeviceId("a"))))
    for function, torch in (("f", "2.10"), ("g", "2.9")):
        world.tell(m.Profiled(FunctionId(function), "gpu", replace(taken, torch=torch)))
    world.tell(m.Profiled(FunctionId("nobody"), "gpu", taken))

    fresh, stale = (each.profiles["gpu"] for each in world.engine.snapshot(0.0).functions)

    assert (fresh.taken, stale.taken) == (taken, None)
    assert (fresh.load_s, fresh.service_s, fresh.occupation) == (3.0, 0.5, 40)
    assert [(each.batch, each.ratio) for each in fresh.ratios] == [(2, 1.5)]
    assert [each.profile.taken for each in world.engine.take_learnt()] == [taken, replace(taken, torch="2.9")]


def test_calls_overrule_what_was_taken() -> None:
    world = World(learn=True).set_up("f", "a")
    world.call("c", "f")
    world.loaded("f", "a", load_s=4.0)
    world.finish("c", 2.0)

    world.tell(m.Profiled(FunctionId("f"), "gpu", Taken("1", 0.0, 3.0, 40, {1: TakenBatch(0.5, 0.5, 20)})))

    (found,) = world.engine.snapshot(0.0).functions
    assert (found.profiles["gpu"].load_s, found.profiles["gpu"].service_s) == (4.0, 2.0)
