"""The effects of measured memory and times."""

from msgspec.structs import replace
from tests.unit.scheduler.world import world_of

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, FunctionId, Profile
from gpufaas_core.units import MiB


def test_a_measured_peak_becomes_the_reservation_with_headroom() -> None:
    world = world_of("f", learn=True, memory=1500 * MiB, warm="f", size=1000 * MiB)

    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 500 * MiB))

    expected = 566 * MiB  # 500 * 1.1 + 16
    assert world.out == []  # the rest stays lent to it: no other worker needs it
    assert world.on("a").used == expected
    assert world.model("f", "a").limit == 1000 * MiB
    (learnt,) = world.engine.take_learnt()
    assert (learnt.function, learnt.kind, learnt.profile.occupation) == ("f", "gpu", expected)
    assert learnt.profile.measured
    assert world.engine.take_learnt() == []


def test_what_a_copy_needed_is_learnt_though_it_was_evicted_while_it_measured() -> None:
    world = world_of("f g", learn=True, memory=1500 * MiB, warm="f", size=1000 * MiB)
    world.call("c", "g")
    assert world.models("a") == ["g"]
    world.engine.take_learnt()

    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 500 * MiB, 0))

    (learnt,) = world.engine.take_learnt()
    assert (learnt.function, learnt.profile.occupation) == ("f", 566 * MiB)
    assert "Measured" not in world.engine.ignored
    for unknown in ("x", "f"):
        world.tell(m.Measured(FunctionId(unknown), DeviceId("a" if unknown == "x" else "z"), 900 * MiB, 0))
    assert world.engine.take_learnt() == []
    assert world.engine.ignored["Measured"] == 2


def test_a_reservation_grows_only_into_free_memory_but_the_profile_knows_the_need() -> None:
    world = world_of("f g", learn=True, memory=210 * MiB, warm="f g", size=100 * MiB)
    world.engine.take_learnt()

    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 140 * MiB))

    assert world.out == [m.Resize(FunctionId("f"), DeviceId("a"), 110 * MiB)]
    (learnt,) = world.engine.take_learnt()
    assert learnt.profile.occupation == 170 * MiB


def test_memory_that_a_measurement_frees_is_given_to_who_waits() -> None:
    world = world_of("f", learn=True, memory=100 * MiB, size=90 * MiB)
    world.deploy("echo", slots=1, size=40 * MiB)
    world.call("runs", "f")
    world.call("c", "echo")
    assert world.started == []

    world.loaded("f", "a")
    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 30 * MiB))
    assert world.started == []  # it runs, and may be using all that it has: it is asked for what it does not
    assert world.out == [m.Resize(FunctionId("f"), DeviceId("a"), 49 * MiB)]
    world.tell(m.Resized(FunctionId("f"), DeviceId("a"), 55 * MiB))

    assert world.started == [("c", "a")]
    assert world.model("f", "a").limit == 55 * MiB


def test_times_are_learnt_from_calls_that_went_well() -> None:
    world = world_of("f", learn=True, load_s=4.0, service_s=1.0)
    world.call("c", "f")
    world.loaded("f", "a", load_s=2.0)
    world.finish("c", service_s=2.0)
    world.call("bad", "f")
    world.finish("bad", service_s=100.0, ok=False)
    world.call("d", "f")
    world.finish("d", service_s=4.0)

    (learnt,) = world.engine.take_learnt()

    # The first measurement takes the place of what was declared; the next ones move it by a quarter.
    assert replace(learnt.profile, times=None) == Profile(2.0, 2.5, 10, measured=True, estimated=("memory",))
    assert learnt.profile.times is not None
    assert learnt.profile.times.calls == 1, "that the second took twice as long as the first"


def test_an_occupation_is_corrected_once_and_then_only_grows() -> None:
    """A worker that was started after small calls must have room for the large one that was seen before."""
    world = world_of("f", learn=True, memory=1000 * MiB, warm="f", size=500 * MiB)

    reserved = []
    for peak in (30 * MiB, 200 * MiB, 40 * MiB):
        world.tell(m.Measured(FunctionId("f"), DeviceId("a"), peak))
        reserved.append(world.on("a").used // MiB)

    assert reserved == [49, 236, 236]  # 30 and 200, times 1.1, plus 16


def test_without_learning_profiles_stay() -> None:
    world = world_of("f")
    world.call("c", "f")
    world.loaded("f", "a", load_s=9.0)
    world.finish("c", service_s=9.0)

    assert world.engine.take_learnt() == []


def test_a_device_counts_how_long_it_was_busy_with_model_functions() -> None:
    world = world_of("f")
    world.deploy("echo", slots=1)
    world.now = 10.0
    world.call("c", "f")
    world.call("i", "echo")
    world.now = 12.0
    world.finish("c")
    world.now = 20.0
    world.call("d", "f")
    world.now = 21.0

    assert world.on("a").busy_s == 3.0
