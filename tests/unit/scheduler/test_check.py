"""Differences between a node and the scheduler, apart from messages that are still on their way."""

import pytest

from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_core.snapshot import DeviceSnapshot, ParkedSnapshot, ResidentSnapshot, RunningCall
from gpufaas_scheduler.check import Holding, NodeCheck, compare
from gpufaas_scheduler.world.changes import Changes
from gpufaas_scheduler.world.function import Copy, FunctionState

DEVICE = Device(DeviceId("n/cpu:0"), "cpu", 100)


def model(name: str) -> Copy:
    return Copy(
        FunctionState(Function(FunctionId(name), "d", profiles={"*": Profile(1.0, 1.0, 10)}), Changes()),
        10,
        0.0,
        0.0,
        0,
    )


def told(*residents: str, running: dict[str, str] | None = None, parked: tuple[str, ...] = ()) -> DeviceSnapshot:
    return DeviceSnapshot(
        DEVICE,
        tuple(ResidentSnapshot(FunctionId(each), "d", 10) for each in residents),
        tuple(RunningCall(CallId(call), FunctionId(function)) for call, function in (running or {}).items()),
        tuple(ParkedSnapshot(FunctionId(each), "d", 0) for each in parked),
    )


def holding(*models: Copy, calls: set[str] | None = None, parked: tuple[Copy, ...] = ()) -> Holding:
    ids = {each.id for each in parked}
    return Holding({each.id: each for each in models}, {CallId(each) for each in calls or ()}, ids)


def test_one_mind_is_no_difference() -> None:
    f = model("f")
    asked = now = holding(f, calls={"c"})

    assert compare(asked, told("f", running={"c": "f"}), now) == ([], [], set())


def test_a_resident_that_the_node_lacks_is_lost() -> None:
    f = model("f")

    assert compare(holding(f), told(), holding(f)).lost == [f]


def test_one_that_was_placed_there_after_the_question_is_not_lost() -> None:
    assert compare(holding(), told(), holding(model("f"))).lost == []


def test_one_that_left_and_was_loaded_anew_meanwhile_is_not_lost() -> None:
    assert compare(holding(model("f")), told(), holding(model("f"))).lost == []


def test_one_whose_exit_was_told_before_the_answer_is_not_lost() -> None:
    assert compare(holding(model("f")), told(), holding()).lost == []


def test_a_worker_that_nobody_knows_of_is_extra_once_it_serves_nobody() -> None:
    assert [each.function for each in compare(holding(), told("g"), holding()).extra] == ["g"]
    assert compare(holding(), told("g", running={"c": "g"}), holding()).extra == []


def test_one_that_was_placed_there_meanwhile_is_not_extra() -> None:
    assert compare(holding(), told("g"), holding(model("g"))).extra == []


LOADED, PARKED, NOWHERE = holding(model("f")), holding(parked=(model("f"),)), holding()


@pytest.mark.parametrize("answer", [told("f"), told(parked=("f",))])
@pytest.mark.parametrize(
    ("before", "now"),
    [(LOADED, NOWHERE), (LOADED, PARKED), (PARKED, NOWHERE), (PARKED, LOADED), (NOWHERE, LOADED), (NOWHERE, PARKED)],
)
def test_one_that_was_evicted_parked_woken_or_placed_there_since_the_question_is_not_extra(
    before: Holding, answer: DeviceSnapshot, now: Holding
) -> None:
    """The command for it is on its way to the node: to evict it once more would end what was parked, or has woken."""
    assert compare(before, answer, now).extra == []


def test_a_call_is_absent_if_it_ran_before_the_question_and_still_does() -> None:
    before, now = holding(calls={"lost", "ended", "there"}), holding(calls={"lost", "there", "new"})

    assert compare(before, told(running={"there": "f"}), now).absent == {"lost"}


def test_a_call_is_doubted_when_two_answers_in_a_row_lack_it() -> None:
    check, running = NodeCheck(), {DEVICE.id: holding(calls={"1", "2"})}

    check.ask(running)
    check.answer([told(running={"2": "f"})], running)
    assert check.doubted == []

    check.ask(running)
    check.answer([told()], running)
    assert check.doubted == [("1", DEVICE.id)]
