"""Versions of plans: who was first, what is told, and what is kept."""

import asyncio

import pytest
from msgspec.structs import replace
from tests.unit.planner.fakes import MemoryPlans

from gpufaas_core.errors import BadPlan, PlanConflict, StorageFailed, UnknownPlan
from gpufaas_core.model import Device, DeviceId, Function, FunctionId, Need, PlacementPlan, Profile, Replica
from gpufaas_core.plans import KEPT, PlanVersion
from gpufaas_core.units import GiB
from gpufaas_planner.plans import Plans

A, B, C = (DeviceId(f"n1/{each}") for each in "abc")
ONE, TWO = "one.ns", "two.ns"


class Rig:
    def __init__(self, store: MemoryPlans | None = None) -> None:
        self.store = store or MemoryPlans()
        self.told: list[PlacementPlan] = []
        self.devices = [Device(each, "gpu", 8 * GiB) for each in (A, B, C)]
        profiles = {"*": Profile(1.0, 0.1, 2 * GiB)}
        need = Need(sharing="auto")
        self.functions = {each: Function(FunctionId(f"{each}@1"), "d", need, profiles) for each in (ONE, TWO)}
        self.plans = Plans(
            self.store, lambda: self.functions, lambda: self.devices, self.told.append, now=lambda: 100.0
        )


async def test_a_plan_that_is_applied_is_kept_told_and_in_force() -> None:
    rig = Rig()

    made = await rig.plans.apply([Replica(ONE, A, 40)], by="alice", why="try", expected={"calls_per_s": 20.0})

    assert made == PlanVersion(1, (Replica(ONE, A, 40),), "alice", 100.0, "try", {"calls_per_s": 20.0})
    assert rig.plans.in_force() == rig.store.kept[-1] == made
    assert rig.told == [PlacementPlan(1, (Replica(ONE, A, 40),))]


async def test_a_plan_that_cannot_be_changes_nothing() -> None:
    rig = Rig()

    with pytest.raises(BadPlan, match="no such device"):
        await rig.plans.apply([Replica(ONE, DeviceId("n9/a"))], by="alice")

    assert (rig.plans.in_force(), rig.store.kept, rig.told) == (None, [], [])


async def test_a_plan_that_cannot_be_kept_is_not_told() -> None:
    rig = Rig(MemoryPlans(broken=True))

    with pytest.raises(StorageFailed):
        await rig.plans.apply([Replica(ONE, A)], by="alice")

    assert (rig.plans.in_force(), rig.told) == (None, [])


async def test_who_wrote_against_an_older_plan_is_told_who_came_in_between() -> None:
    rig = Rig()
    await rig.plans.apply([Replica(ONE, A)], by="bob", why="for the demo", base=0)

    with pytest.raises(PlanConflict, match=r"^plan 1 by bob came in between \(for the demo\): look at it"):
        await rig.plans.apply([Replica(ONE, B)], by="alice", base=0)
    await rig.plans.apply([Replica(ONE, B)], by="alice", base=1)

    assert [each.by for each in rig.store.kept] == ["bob", "alice"]


async def test_of_two_who_apply_at_once_one_wins_and_the_other_is_told() -> None:
    rig = Rig()
    other = Plans(rig.store, dict, list)

    results = await asyncio.gather(
        rig.plans.apply([Replica(ONE, A)], by="alice"), other.apply([], by="bob"), return_exceptions=True
    )

    assert sorted(type(each).__name__ for each in results) == ["PlanConflict", "PlanVersion"]
    assert len(rig.store.kept) == 1


async def test_a_plan_that_another_process_applied_is_told_once_and_an_older_one_never() -> None:
    rig = Rig()
    newer, older = PlanVersion(5, (Replica(ONE, A),)), PlanVersion(4)

    for plan in (newer, newer, older):
        rig.plans.learn(plan)

    assert rig.plans.in_force() == newer
    assert rig.told == [newer.plan()]


async def test_a_rollback_puts_an_older_content_in_force_as_a_new_version() -> None:
    rig = Rig()
    await rig.plans.apply([Replica(ONE, A)], by="alice", expected={"calls_per_s": 20.0})
    await rig.plans.apply([Replica(ONE, B)], by="alice")

    made = await rig.plans.rollback(1, by="bob")

    assert made == PlanVersion(3, (Replica(ONE, A),), "bob", 100.0, "rollback to 1", {"calls_per_s": 20.0})
    assert rig.told[-1] == made.plan()


async def test_a_rollback_is_checked_against_what_is_there_now() -> None:
    rig = Rig()
    await rig.plans.apply([Replica(ONE, A)], by="alice")
    await rig.plans.apply([], by="alice")
    del rig.devices[0]

    with pytest.raises(BadPlan, match="n1/a: there is no such device: there are n1/b, n1/c"):
        await rig.plans.rollback(1, by="alice")

    assert rig.plans.in_force() == rig.store.kept[1]


async def test_what_is_planned_on_a_device_that_has_gone_stays_and_keeps_nobody_from_planning_others() -> None:
    rig = Rig()
    gone = Replica(ONE, A)
    await rig.plans.apply([gone, Replica(TWO, B)], by="alice")
    del rig.devices[0]

    assert (await rig.plans.pin(Replica(TWO, C), by="bob")).replicas == (gone, Replica(TWO, C, pinned=True))
    for mistake in (Replica(TWO, A), Replica(ONE, A, 40)):
        with pytest.raises(BadPlan, match=r"^replica 2, .*n1/a: there is no such device"):
            await rig.plans.apply([gone, mistake], by="alice")


async def test_an_edit_that_no_longer_fits_the_plan_keeps_nobody_from_planning_others() -> None:
    rig = Rig()
    shared = Replica(ONE, A, 40)
    await rig.plans.apply([shared], by="alice")
    rig.functions[ONE] = replace(rig.functions[ONE], need=Need(), min_copies=2)

    assert (await rig.plans.pin(Replica(TWO, B), by="bob")).replicas == (shared, Replica(TWO, B, pinned=True))
    with pytest.raises(BadPlan, match="shares on n1/a are 110 %"):
        await rig.plans.pin(Replica(TWO, A, 70), by="bob")
    with pytest.raises(BadPlan, match=r"^replica 1, one\.ns on n1/a: its function is exclusive"):
        await rig.plans.apply([replace(shared, share=50)], by="alice")
    with pytest.raises(BadPlan, match=r"min asks for 2"):
        await rig.plans.apply([Replica(ONE, A)], by="alice")


async def test_a_reason_longer_than_people_read_is_refused() -> None:
    with pytest.raises(BadPlan, match="why has 501 characters"):
        await Rig().plans.apply([Replica(ONE, A)], by="alice", why="x" * 501)


async def test_a_version_that_is_not_kept_is_refused_with_those_that_are() -> None:
    rig = Rig()
    with pytest.raises(UnknownPlan, match=r"^version 1 of the plan is not kept: no plan was ever applied$"):
        await rig.plans.rollback(1, by="alice")
    for _ in range(KEPT + 2):
        await rig.plans.apply([], by="alice")

    with pytest.raises(UnknownPlan, match=rf"^version 2 of the plan is not kept: 3 to {KEPT + 2} are$"):
        await rig.plans.rollback(2, by="alice")

    assert [each.version for each in await rig.plans.history()] == list(range(KEPT + 2, 2, -1))
    assert (await rig.plans.version(3)).version == 3


async def test_a_pin_replaces_what_is_not_pinned_of_its_function_and_nothing_of_others() -> None:
    rig = Rig()
    await rig.plans.apply([Replica(ONE, A), Replica(ONE, B), Replica(TWO, A)], by="alice")

    first = await rig.plans.pin(Replica(ONE, C, 40), by="bob")
    second = await rig.plans.pin(Replica(ONE, A), by="bob")
    changed = await rig.plans.pin(Replica(ONE, C, 50), by="bob")

    pinned = Replica(ONE, A, pinned=True)
    assert first.replicas == (Replica(TWO, A), Replica(ONE, C, 40, pinned=True))
    assert first.why == "pin one.ns on n1/c"
    assert second.replicas == (*first.replicas, pinned)
    assert changed.replicas == (Replica(TWO, A), pinned, Replica(ONE, C, 50, pinned=True))


async def test_a_pin_that_says_nothing_else_keeps_what_the_plan_has_there() -> None:
    rig = Rig()
    await rig.plans.apply([Replica(ONE, A, 40), Replica(TWO, A, 30)], by="alice")

    pinned = await rig.plans.pin(Replica(ONE, A), by="bob")

    assert pinned.replicas == (Replica(TWO, A, 30), Replica(ONE, A, 40, pinned=True))


async def test_a_pin_to_a_device_on_which_it_does_not_fit_changes_nothing() -> None:
    rig = Rig()
    await rig.plans.apply([Replica(TWO, A, 70)], by="alice")

    with pytest.raises(BadPlan, match=r"the shares on n1/a are 110 % together"):
        await rig.plans.pin(Replica(ONE, A, 40), by="bob")

    assert rig.store.kept[1:] == []


async def test_an_unpin_takes_out_what_is_pinned_on_one_device_or_on_all() -> None:
    rig = Rig()
    for device in (A, B, C):
        await rig.plans.pin(Replica(ONE, device), by="alice")

    one = await rig.plans.unpin(ONE, B, by="alice")
    assert [each.device for each in one.replicas] == [A, C]
    with pytest.raises(BadPlan, match=r"^one.ns is pinned on n1/a, n1/c only"):
        await rig.plans.unpin(ONE, B, by="alice")
    assert (await rig.plans.unpin(ONE, None, by="alice")).replicas == ()
    with pytest.raises(BadPlan, match=r"^one.ns is pinned nowhere"):
        await rig.plans.unpin(ONE, None, by="alice")
