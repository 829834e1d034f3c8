"""Failed loads are tried again with growing pauses; the status says so, and it never stops."""

from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, FunctionId
from gpufaas_core.snapshot import FunctionDoc
from gpufaas_scheduler.handle.waiting import MAX_REFUSALS
from gpufaas_scheduler.world.backoff import Backoff, restored

F, A = FunctionId("f"), DeviceId("a")
NO_FILE = m.CopyFailed(F, A, "no such file")
EXIT = m.WorkerExited(F, A, "killed by signal 9")


def failing(min_copies: int = 0) -> World:
    """Three loads have failed at 0 s."""
    world = world_of("f", min_copies=min_copies)
    for number in range(3):
        if not min_copies:
            world.call(f"c{number}", "f")
        world.tell(NO_FILE)
    return world


def retries(world: World) -> float:
    return world.status.failing[F].retry_in_s


def test_two_failures_are_tried_again_at_once_and_the_third_rejects_all_that_wait() -> None:
    world = world_of("f")
    world.calls(4, "f")

    world.tell(NO_FILE)
    assert world.started == [("c1", "a")]
    world.tell(NO_FILE)
    assert world.started == [("c2", "a")]
    world.tell(NO_FILE)

    assert world.rejected == [("c3", "load_failed")]
    [told] = world.out
    assert isinstance(told, m.RejectCall)
    assert told.retry_after_s == 1.0
    assert "3 times in a row" in told.message
    assert "no such file" in told.message
    assert "when it is deployed again" in told.message


def test_the_first_failure_is_shown_until_a_load_succeeds_and_refuses_no_call() -> None:
    world = world_of("f")
    world.call("c", "f")
    world.tell(NO_FILE)

    shown = world.status.failing[F]
    assert (shown.failures, shown.retry_in_s) == (1, 0)
    assert "no such file" in shown.reason
    world.call("next", "f")
    assert world.started == [("next", "a")]
    world.loaded("f", "a")
    assert world.status.failing == {}


def test_a_function_that_serves_elsewhere_is_not_shown_as_failing() -> None:
    world = world_of("f", "a b", slots=1)
    world.scale("f", 2)
    world.loaded("f", "a")
    world.tell(m.CopyFailed(F, DeviceId("b"), "no such file", copy=1))

    assert world.models("a") == ["f"]
    assert world.status.failing == {}


def test_a_call_that_comes_when_the_time_is_over_is_the_only_probe() -> None:
    world = failing()
    world.now = 0.9
    world.call("early", "f")
    assert world.rejected == [("early", "load_failed")]

    world.now = 1.0
    world.calls("probe other", "f")

    assert ("probe", "a") in [(grant.call, grant.device) for grant in world.running.values()]
    assert world.rejected == [("other", "load_failed")]
    assert "is being tried again now" in world.message


def test_the_time_doubles_up_to_five_minutes() -> None:
    world = failing()
    times = [retries(world)]
    for number in range(10):
        world.now += retries(world)
        world.call(f"probe-{number}", "f")
        world.tell(NO_FILE)
        times.append(retries(world))

    assert times == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert world.status.failing[F].failures == 13
    assert world.status.failing[F].for_s == world.now


def test_a_probe_that_loads_takes_the_function_back() -> None:
    world = failing()
    world.now = 1.0
    world.call("probe", "f")
    world.loaded("f", "a")

    assert world.status.failing == {}
    world.call("other", "f")
    world.finish("probe")
    assert world.started == [("other", "a")]
    world.tell(EXIT)
    world.call("next", "f")
    world.tell(NO_FILE)
    world.call("at-once", "f")  # it was well: two failures are tried again at once
    assert world.started == [("at-once", "a")]


def test_a_probe_that_its_caller_gives_up_lets_the_next_one_try() -> None:
    world = failing()
    world.deploy("g")
    world.call("busy", "g")
    world.now = 1.0
    world.call("probe", "f")
    world.tell(m.CallerLeft(world.waiting and next(iter(world.waiting))))  # type: ignore[arg-type]

    world.call("next", "f")

    assert "next" in world.waiting


def test_a_minimum_of_copies_is_loaded_again_when_the_time_is_over_and_not_before() -> None:
    world = failing(min_copies=1)
    assert world.engine.wake_at == 1.0
    world.now = 0.5
    world.tell(m.Woken())
    assert world.out == []
    world.now = 1.0
    [load] = world.tell(m.Woken())

    assert isinstance(load, m.LoadCopy)
    assert world.engine.wake_at is None
    world.tell(NO_FILE)
    assert world.engine.wake_at == 3.0


def test_a_minimum_whose_worker_ends_right_after_each_start_backs_off_likewise() -> None:
    world = world_of("f", min_copies=1)
    for _ in range(3):
        world.loaded("f", "a")
        world.now += 1.0
        world.tell(EXIT)

    assert retries(world) == 1.0
    assert "ended right after it had started: killed by signal 9" in world.status.failing[F].reason
    world.now += 1.0
    world.tell(m.Woken())
    world.loaded("f", "a")
    assert world.status.failing == {}
    world.tell(EXIT)
    assert retries(world) == 2.0


def test_a_worker_that_ends_after_a_while_or_in_a_call_is_no_failed_start() -> None:
    world = world_of("f", min_copies=1)
    for number in range(5):
        world.loaded("f", "a")
        world.now += 11.0
        world.tell(EXIT)
        world.loaded("f", "a")
        world.call(f"poison-{number}", "f")
        world.tell(EXIT)

    assert world.status.failing == {}
    assert world.models("a") == ["f"]


def test_a_copy_more_that_does_not_load_leaves_the_others_serving_and_is_tried_again() -> None:
    world = world_of("f", memory=10, slots=1, min_copies=2)
    world.loaded("f", "a")
    world.device("b", 10)
    for _ in range(3):
        world.tell(m.CopyFailed(F, DeviceId("b"), "no such file"))
    assert world.status.failing == {}

    world.call("c", "f")
    assert world.started == [("c", "a")]
    assert world.finish("c") == [], "nor is it tried before its time"
    assert world.engine.wake_at == 1.0

    world.now = 1.0
    [load] = world.tell(m.Woken())
    assert isinstance(load, m.LoadCopy)


def test_a_node_that_can_start_no_worker_says_nothing_of_the_function() -> None:
    """Its calls are placed again, and refused when no node takes them."""
    world = world_of("f")
    world.call("c", "f")
    for _ in range(MAX_REFUSALS):
        world.engine.handle(m.CopyFailed(F, A, "no descriptors", blameless=True), world.now)
        world.refuse("c")

    assert world.rejected == [("c", "refused")]
    assert world.status.failing == {}
    world.call("next", "f")
    assert world.started == [("next", "a")]


def test_a_minimum_that_no_worker_can_be_started_for_is_tried_again_later() -> None:
    world = world_of("f", min_copies=1)
    for _ in range(3):
        world.tell(m.CopyFailed(F, A, "no descriptors", blameless=True))

    assert world.out == []
    assert world.engine.wake_at == 1.0
    assert world.status.failing == {}


def test_a_new_revision_is_loaded_at_once() -> None:
    world = failing()
    world.deploy("f")
    world.call("again", "f")
    assert world.started == [("again", "a")]


def test_a_function_that_is_removed_meanwhile_is_not_tried_again() -> None:
    world = failing(min_copies=1)
    world.tell(m.FunctionRemoved(F))
    assert world.engine.wake_at is None


def test_a_scheduler_that_takes_over_waits_for_as_long_as_its_predecessor_would_have() -> None:
    left = Backoff()
    left.reason = "no such file"
    for _ in range(3):
        left.failed(0.0)

    taken_over = restored(left.doc(0.25), 100.0)  # on a clock of its own

    assert taken_over.left_s(100.0) == left.left_s(0.25) == 0.75
    assert (taken_over.failures, taken_over.reason) == (3, "no such file")
    assert 100.0 - taken_over.since == 0.25


def test_a_load_that_ends_while_its_copy_drains_is_told_to_the_next_scheduler() -> None:
    world = world_of("f")
    world.call("c", "f")
    world.tell(NO_FILE)
    world.call("next", "f")
    world.tell(m.DeviceDrained(A))
    world.engine.take_changed()

    world.loaded("f", "a")

    assert "functions/f" in world.engine.take_changed()
    doc = world.engine.doc("functions/f", world.now)
    assert isinstance(doc, FunctionDoc)
    assert doc.backoff is not None
    assert doc.backoff.reason is None
