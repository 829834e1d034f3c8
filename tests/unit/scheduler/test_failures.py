"""Failed loads, workers that exit, events that come too late or concern nothing."""

import pytest
from msgspec.structs import replace
from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.messages import Event
from gpufaas_core.model import CallId, DeviceId, FunctionId
from gpufaas_core.reservations import reservation
from gpufaas_core.units import MiB
from gpufaas_scheduler.handle.table import HANDLERS
from gpufaas_scheduler.handle.waiting import MAX_REFUSALS


def test_a_load_that_ran_out_of_memory_is_tried_again_with_more_in_the_same_call() -> None:
    world = world_of("f", learn=True, memory=100 * MiB, size=30 * MiB)
    world.call("c1", "f", deadline=60.0)
    assert world.running["c1"].memory == 30 * MiB

    for size in (60 * MiB, 100 * MiB):  # doubled, until it is the whole device
        out_of_memory(world, "c1")
        assert world.running["c1"].memory == size

    world.loaded("f", "a")
    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 35 * MiB))
    world.finish("c1")
    (learnt,) = world.engine.take_learnt()
    # What it is measured to have afterwards may be less than it needed: no load has less again than one that failed.
    assert learnt.profile.occupation == reservation(60 * MiB)
    assert world.on("a").misses == 3


def test_a_load_for_which_the_largest_device_is_too_small_says_so_with_numbers() -> None:
    world = world_of("f", learn=True, memory=100 * MiB, size=100 * MiB)
    world.call("c1", "f")

    out_of_memory(world, "c1")

    assert world.rejected == [("c1", "out_of_memory")]
    assert "it had 100 MiB, which is all that the largest gpu device for it has" in world.message


def test_a_call_that_its_node_refuses_is_placed_again_once_a_load_has_had_enough_memory() -> None:
    world = world_of("f", learn=True, memory=100 * MiB, size=100 * MiB)
    world.call("c1", "f")
    out_of_memory(world, "c1")
    world.call("c2", "f")
    world.loaded("f", "a")

    world.refuse("c2")

    assert world.rejected == []
    assert world.started == [("c2", "a")]


def test_a_minimum_of_copies_is_widened_without_a_call_too() -> None:
    world = world_of("f", learn=True, memory=100 * MiB, size=30 * MiB, min_copies=1)

    world.tell(m.CopyFailed(FunctionId("f"), DeviceId("a"), "out of memory", True))

    assert [each.memory for each in world.out if isinstance(each, m.LoadCopy)] == [60 * MiB]


def out_of_memory(world: World, call: str) -> None:
    """Its load hits the reservation: the node says so, and refuses the call."""
    grant = world.running[call]
    world.tell(m.CopyFailed(grant.function, grant.device, "out of memory", True, grant.copy))
    world.ended.discard(call)
    world.running[call] = grant
    world.tell(m.NodeRefused(grant.call, grant.device, "out of memory"))


def test_a_call_whose_grant_comes_to_the_node_after_its_worker_died_is_placed_again() -> None:
    """The node did not know of it when it answered the worker's calls: it refuses it, although the engine let it go."""
    world = world_of("f", warm="f")
    world.call("hit", "f")
    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "killed"))

    out = world.engine.handle(
        m.NodeRefused(CallId("hit"), DeviceId("a"), "its worker is not there any more"), world.now
    )
    again = world.engine.handle(m.NodeRefused(CallId("nobody"), DeviceId("a"), "late"), world.now)

    assert [(start.grant.call, start.grant.cold) for start in out if isinstance(start, m.StartCall)] == [("hit", True)]
    assert again == []


@pytest.mark.parametrize("blameless", [True, False])
def test_a_call_whose_workers_die_of_other_calls_is_not_refused_for_that(blameless: bool) -> None:
    world = world_of("f", slots=2)
    world.call("waits", "f")
    for number in range(1, 2 * MAX_REFUSALS):
        grant = world.running["waits"]
        world.call(f"crashes-{number}", "f")
        world.loaded("f", "a", grant.copy)
        world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "exit status 3", grant.copy))
        refused = m.NodeRefused.of(grant, "exit status 3", blameless=blameless)
        world.waiting["waits"] = FunctionId("f")
        (command,) = world.engine.handle(refused, world.now)
        if not blameless and number == MAX_REFUSALS:
            assert isinstance(command, m.RejectCall)
            assert command.code == "refused"
            return
        assert isinstance(command, m.StartCall)
        del world.waiting["waits"]
        world.running["waits"] = command.grant
    assert blameless


def refusal(world: World, start: m.StartCall, *, epoch: int = 1) -> list[m.Command]:
    return world.engine.handle(m.NodeRefused.of(replace(start.grant, epoch=epoch), "closing"), world.now)


def test_a_second_refusal_of_a_grant_leaves_the_next_grant_of_its_call_alone() -> None:
    """A node may refuse a miss when the command comes, and once more when the call does."""
    world = world_of("f")
    (first,) = world.call("c", "f")
    assert isinstance(first, m.StartCall)

    (second,) = refusal(world, first)
    assert isinstance(second, m.StartCall)
    assert second.grant.number > first.grant.number
    assert not world.engine.heeds(m.NodeRefused.of(first.grant, "closing"))
    assert refusal(world, first) == []

    assert world.on("a").busy, "it runs by the second grant"
    (third,) = refusal(world, second)
    assert isinstance(third, m.StartCall)


def test_the_refusal_of_a_grant_of_an_older_scheduler_leaves_a_grant_of_this_one_alone() -> None:
    """Numbers of grants may begin again, if the older scheduler's state was not written at once."""
    world = world_of("f")
    (start,) = world.call("c", "f")
    assert isinstance(start, m.StartCall)

    older = replace(start, grant=replace(start.grant, number=start.grant.number + 10))
    assert refusal(world, older, epoch=0) == []

    assert world.on("a").busy


def test_the_refusal_of_a_grant_that_was_said_again_counts_whatever_its_number() -> None:
    """The node has opened it by the number that came first, the gateway calls by the second one."""
    world = world_of("f")
    (first,) = world.call("c", "f")
    (again,) = world.engine.handle(m.Arrived(CallId("c"), FunctionId("f"), age_s=1.0), world.now)
    assert isinstance(first, m.StartCall)
    assert isinstance(again, m.StartCall)
    assert again.grant.number > first.grant.number

    (next_one,) = refusal(world, first)

    assert isinstance(next_one, m.StartCall)


def test_a_call_that_its_worker_took_with_it_is_not_placed_again() -> None:
    world = world_of("f")
    world.call("runs", "f")
    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "killed"))

    world.engine.handle(m.CallerLeft(CallId("runs")), world.now)  # its gateway has had the error, and says so

    assert world.engine.handle(m.NodeRefused(CallId("runs"), DeviceId("a"), "late"), world.now) == []


def test_facts_that_do_not_fit_are_counted_and_change_nothing() -> None:
    world = world_of("f")
    world.call("c", "f")
    before = world.status

    facts: list[Event] = [
        m.Finished(CallId("nobody"), DeviceId("a"), 1.0),
        m.Finished(CallId("c"), DeviceId("b"), 1.0),
        m.Loaded(FunctionId("g"), DeviceId("a"), 1.0, 1),
        m.CopyFailed(FunctionId("f"), DeviceId("b"), "late"),
        m.Measured(FunctionId("g"), DeviceId("a"), 1),
        m.WorkerExited(FunctionId("g"), DeviceId("a"), "late"),
        m.NodeRefused(CallId("nobody"), DeviceId("a"), "late"),
        m.CallerLeft(CallId("nobody")),
        m.DeviceLeft(DeviceId("b"), "late"),
        m.FunctionRemoved(FunctionId("g")),
        m.Scaled(FunctionId("g"), 2),
        m.Woken(),
    ]
    for fact in facts:
        assert world.engine.handle(fact, 0.0) == []
    assert world.engine.handle(m.Arrived(CallId("c"), FunctionId("f")), 0.0) == []

    assert world.status == before
    assert world.engine.ignored.total() == len(facts)  # all but Woken, and the second arrival of c


def test_every_event_has_a_handler() -> None:
    assert set(HANDLERS) == set(Event.__args__)
