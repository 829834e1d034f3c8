"""Waiting that ends without a start: deadlines, cancellations, full queues, functions that fit nowhere."""

import pytest
from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId
from gpufaas_core.units import MiB


def test_a_call_whose_deadline_comes_while_it_waits_is_rejected_with_the_time_it_waited() -> None:
    world = world_of("f")
    world.call("runs", "f")
    world.now = 1.0
    world.call("local", "f", deadline=5.0)
    world.call("other", "f", deadline=4.0)
    assert world.engine.wake_at == 4.0

    world.now = 5.5
    world.tell(m.Woken())

    assert world.rejected == [("other", "deadline"), ("local", "deadline")]
    assert "4.500 s" in world.message
    assert world.engine.wake_at is None


def test_a_deadline_no_longer_matters_once_the_call_runs() -> None:
    world = world_of("f")

    world.call("c", "f", deadline=1.0)

    assert world.engine.wake_at is None


def test_a_waiting_call_that_is_cancelled_gives_its_place_up() -> None:
    world = world_of("f")
    world.calls("runs c", "f")

    world.tell(m.CallerLeft(CallId("c")))
    world.finish("runs")

    assert world.started == []
    assert world.status.queued == {}


def test_a_running_call_that_is_cancelled_is_aborted_and_still_finishes() -> None:
    world = world_of("f")
    world.call("c", "f")

    world.tell(m.CallerLeft(CallId("c")))

    assert world.out == [m.Abort(CallId("c"), DeviceId("a"))]
    assert world.on("a").busy
    world.finish("c", ok=False)
    assert not world.on("a").busy


def test_a_full_queue_turns_calls_away_and_says_when_to_come_back() -> None:
    world = world_of("f", service_s=2.0, max_queue=2)
    world.calls(3, "f")

    world.call("late", "f")

    assert world.rejected == [("late", "overloaded")]
    assert isinstance(world.out[0], m.RejectCall)
    # Three calls of 2 s each, and as much more as is enough in three of four cases: their variation is not known yet.
    assert world.out[0].retry_after_s == pytest.approx(6.0 * 1.243, rel=1e-3)
    assert "2 calls waiting" in world.message


def test_the_queue_of_all_functions_together_is_bounded_too() -> None:
    world = World(max_queue=1).set_up("f g", "a")
    world.call("runs", "f")
    world.call("waits", "g")

    world.call("late", "f")

    assert world.rejected == [("late", "overloaded")]


def test_a_call_for_no_known_function_is_rejected() -> None:
    world = World()

    world.call("c", "nothing")

    assert world.rejected == [("c", "unknown_function")]


def test_a_function_that_fits_no_device_is_rejected_with_the_sizes() -> None:
    world = world_of("f", memory=100 * MiB, size=200 * MiB)

    world.call("c", "f")

    assert world.rejected == [("c", "no_device")]
    assert "200 MiB" in world.message
    assert "100 MiB" in world.message


def test_a_function_without_a_profile_for_any_kind_of_device_is_rejected() -> None:
    world = world_of("f", kind="tpu")

    world.call("c", "f")

    assert world.rejected == [("c", "no_device")]


@pytest.mark.parametrize("slots", [None, 2], ids=["model", "cpu"])
def test_a_call_whose_room_others_always_keep_is_refused_with_their_names(slots: int | None) -> None:
    world = world_of("kept", "a b", memory=100 * MiB, size=60 * MiB, min_copies=2, slots=slots)
    world.loaded("kept", "a")
    world.loaded("kept", "b")
    world.deploy("f", size=50 * MiB, slots=slots)

    world.call("c", "f")

    assert world.rejected == [("c", "no_room")]
    assert "50 MiB on a (60 MiB of 100 MiB are held) or 50 MiB on b" in world.message
    assert "those of kept." in world.message
    world.call("again", "f")
    assert world.rejected == [("again", "no_room")], "nothing is left behind of the first"


def test_a_call_waits_for_room_that_a_copy_beyond_the_minimum_has() -> None:
    world = World()
    world.device("a", 100 * MiB)
    world.deploy("kept", size=60 * MiB, min_copies=1)  # is loading, and pinned for so long
    world.device("b", 100 * MiB)
    world.deploy("busy", size=60 * MiB)
    world.call("c1", "busy")
    world.deploy("f", size=50 * MiB)

    world.call("c2", "f")

    assert world.rejected == []


def test_without_devices_calls_wait_for_the_first_one() -> None:
    world = World()
    world.deploy("f")
    world.call("c", "f")
    assert world.out == []

    world.device("a")

    assert world.started == [("c", "a")]
