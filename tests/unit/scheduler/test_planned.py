"""What a plan in force means in the engine: where copies may be, what they hold, and that nobody takes their place."""

from collections.abc import Mapping

import pytest
from tests.unit.scheduler.indexes import check_indexes
from tests.unit.scheduler.test_actions import Scripted
from tests.unit.scheduler.test_actions import Site as Plain
from tests.unit.scheduler.world import World

from gpufaas_core import messages as m
from gpufaas_core.model import (
    CallId,
    CopyId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    Need,
    Part,
    PlacementPlan,
    Profile,
    Replica,
)
from gpufaas_core.owners import CALLS, PLAN
from gpufaas_scheduler import policies as c
from gpufaas_scheduler.view_nouns import FunctionView

AUTO, TOO = FunctionId("auto"), FunctionId("auto too")
A, B = DeviceId("n1/a"), DeviceId("n1/b")


def on(device: DeviceId, share: int = 0) -> tuple[Part, ...]:
    return (Part(device, 0, share),)


class Site(Plain):
    """With the devices n1/a, n1/b and n2/c, and two functions of ``auto`` need beside the others."""

    def __init__(self, policy: Scripted | None = None) -> None:
        super().__init__(policy)
        self.deploy("auto too", need=Need(100, "auto", slots=2))
        self.version = 0

    def tell(self, event: m.Event) -> list[m.Command]:
        out = super().tell(event)
        check_indexes(self.engine)
        return out

    def plan(self, *replicas: Replica) -> list[m.Command]:
        self.version += 1
        return self.tell(m.Planned(PlacementPlan(self.version, replicas)))

    def view_of(self, function: str) -> FunctionView:
        return self.engine._world.functions[FunctionId(function)]

    def load(self, function: FunctionId, device: DeviceId, share: int = 0) -> str:
        """Let the policy load a copy, and return its id once it is loaded."""
        (command,) = self.do(c.Load(function, on(device, share)))
        assert isinstance(command, m.LoadCopy)
        self.tell(m.Loaded(function, device, 3.0, 10, command.copy))
        return self.engine._world.devices[device].copies[function]

    def start(self, call: str, function: str, copy: str) -> m.Grant:
        self.call(call, function)
        (command,) = self.do(c.Start((CallId(call),), copy))
        assert isinstance(command, m.StartCall)
        return command.grant

    def compute(self, device: DeviceId) -> tuple[int, int]:
        """Return what grants hold of the compute, and what copies do."""
        state = self.engine._world.devices[device]
        return state.reserved, state.residency.shares


# --- whom a plan owns, and where its copies may be ---


def test_a_plan_owns_the_functions_that_it_names_while_one_of_its_devices_is_there() -> None:
    site = Site()
    site.plan(Replica("auto", DeviceId("n9/z"), 30), Replica("nobody", A))
    assert (site.view_of("auto").owned_by, site.view_of("auto").plan) == (CALLS, {})

    site.plan(Replica("auto", DeviceId("n9/z"), 30), Replica("auto", B, 40))
    expected: Mapping[DeviceId, Replica] = {B: Replica("auto", B, 40)}
    assert (site.view_of("auto").owned_by, site.view_of("auto").plan) == (PLAN, expected)
    assert site.view_of("big").owned_by == CALLS

    site.tell(m.DeviceDrained(B))
    assert site.view_of("auto").owned_by == CALLS
    site.tell(m.DeviceDrained(B, drain=False))
    assert site.view_of("auto").owned_by == PLAN
    site.tell(m.DeviceLeft(B, "gone"))
    assert site.view_of("auto").owned_by == CALLS
    site.plan()
    assert site.engine._world.mixed == 2, "the functions with several slots, as before"


def test_a_function_that_is_deployed_later_and_its_next_revision_are_in_the_plan() -> None:
    site = Site()
    site.plan(Replica("late", A), Replica("cpu", A))
    site.deploy("late@1")
    site.deploy("late@2")
    site.deploy("cpu", need=Need(0, slots=2))

    assert site.view_of("late@1").owned_by == site.view_of("late@2").owned_by == PLAN
    assert site.view_of("cpu").owned_by == CALLS, "a plan names placed functions only"
    site.tell(m.FunctionRemoved(FunctionId("late@1")))
    assert site.view_of("late@2").owned_by == PLAN


def test_a_new_copy_is_on_the_devices_of_the_plan_only_and_an_old_one_elsewhere_still_takes_calls() -> None:
    site = Site()
    old = site.warm("auto", "n1/b")
    site.plan(Replica("auto", A))
    why = "plan 1 has auto on n1/a, not on n2/c"
    part = on(DeviceId("n2/c"))

    assert site.why_not(c.Load(AUTO, part)) == why
    site.call("x", "auto")
    assert site.why_not(c.Start((CallId("x"),), None, part)) == why
    view, call = site.policy.view, site.policy.view.queue.first()
    assert call is not None
    assert {each.id for each in view.idle()} == {A, B}, "not n2/c, where its calls cannot run"
    assert [each.id for each in view.least_used(site.view_of("auto"), 9)] == [A]
    assert [view.allows(each, call) for each in view.devices()] == [True, True, False]
    site.do(c.Start((CallId("x"),), old))
    assert isinstance(site.out[0], m.StartCall)


def test_scaling_has_no_effect_on_a_planned_function_and_what_was_asked_before_is_forgotten() -> None:
    site = Site()
    site.tell(m.Scaled(AUTO, 2))
    assert site.engine.status(0.0).desired == {"auto": 2, "other": 0} or site.engine.status(0.0).desired == {"auto": 2}
    site.plan(Replica("auto", A))
    assert "auto" not in site.engine.status(0.0).desired
    assert site.tell(m.Scaled(AUTO, 3)) == []
    assert site.engine.ignored["Scaled"] == 1


def test_a_plan_may_change_how_long_calls_wait_for_their_batch() -> None:
    site = Site()
    site.deploy("batched", need=Need(100, "auto", batch_max=4, batch_wait_s=0.1))
    site.plan(Replica("batched", A, wait_s=0.5))
    assert site.view_of("batched").batch_wait_s == 0.5
    site.deploy("batched", need=Need(100, "auto", batch_max=4, batch_wait_s=0.1))
    assert site.view_of("batched").batch_wait_s == 0.5
    site.plan()
    assert site.view_of("batched").batch_wait_s == 0.1


# --- shares ---


def test_a_load_with_a_share_needs_that_share_and_evicts_no_neighbour_that_leaves_it() -> None:
    site = Site()
    one = site.warm("auto", "n1/a")
    site.do(c.Limit(one, 40, 2, 4))
    running = site.start("x", "auto", one)

    (command,) = site.do(c.Load(TOO, on(A, 30)))
    assert isinstance(command, m.LoadCopy)
    assert (command.parts[0].share, command.victims) == (30, ())
    assert site.compute(A) == (0, 70)
    site.start("y", "auto", one)
    site.tell(m.Loaded(TOO, A, 3.0, 10, command.copy))
    too = site.engine._world.devices[A].copies[TOO]
    site.start("z", "auto too", too)
    assert site.compute(A) == (0, 70)
    assert running.parts[0].share == 40

    site.deploy("third", need=Need(100, "auto"))
    assert site.why_not(c.Load(FunctionId("third"), on(A, 31))) == (
        "third needs 31 % of the compute of n1/a, which has 30 % spare"
    )


def test_a_call_that_misses_with_a_share_holds_that_share() -> None:
    site = Site()
    site.call("x", "auto")
    (command,) = site.do(c.Start((CallId("x"),), None, on(A, 30)))

    assert isinstance(command, m.StartCall)
    assert command.grant.parts[0].share == 30
    assert site.compute(A) == (0, 30)


@pytest.mark.parametrize("replica", [Replica("auto", A, 40, slots=2, batch=3), Replica("auto", A, reserve=60, slots=1)])
def test_a_copy_on_a_device_of_the_plan_has_what_it_says_whoever_loads_it(replica: Replica) -> None:
    loads = [
        lambda site: site.do(c.Load(AUTO, on(A))),
        lambda site: (site.call("x", "auto"), site.do(c.Start((CallId("x"),), None, on(A)))),
        lambda site: site.deploy("auto", need=Need(100, "auto", slots=2, batch_max=4), min_copies=1),
    ]
    for load in loads:
        site = Site()
        site.plan(replica)
        load(site)
        world = site.engine._world
        copy = world.copies[world.devices[A].copies[AUTO]][1]
        assert (copy.share, copy.reserve, copy.slots, copy.batch) == (
            replica.share, replica.reserve, replica.slots, replica.batch
        )  # fmt: skip
        assert world.devices[A].reserved == (replica.reserve if copy.running else 0)


def test_a_planned_load_does_not_keep_the_calls_of_its_device_waiting() -> None:
    site = Site()
    one = site.warm("auto", "n1/a")
    site.plan(Replica("auto", A, reserve=50), Replica("auto too", A, reserve=50), Replica("other", A))
    site.do(c.Limit(one, 0, 2, 4, 50))

    assert isinstance(site.do(c.Load(TOO, on(A)))[0], m.LoadCopy)
    site.start("x", "auto", one)
    assert site.why_not(c.Load(FunctionId("other"), on(A))) == "device n1/a is busy with a load"


def test_a_share_that_cannot_be_is_refused_with_the_reason() -> None:
    site = Site()
    site.plan(Replica("auto", A, 40), Replica("auto too", B))
    assert site.why_not(c.Load(AUTO, on(A, 30))) == "plan 1 gives auto 40 % of n1/a, not 30 %"
    assert site.why_not(c.Load(TOO, on(B, 30))) == "plan 1 gives auto too no share of n1/b, not 30 %"
    site.plan()
    assert site.why_not(c.Load(AUTO, on(A, 101))) == "device n1/a has 100 % of compute, a share there cannot be 101 %"


# --- reserves ---


@pytest.mark.parametrize(("reserve", "beside"), [(50, True), (60, False)])
def test_grants_that_reserve_no_more_than_the_device_has_run_side_by_side(reserve: int, beside: bool) -> None:
    site = Site()
    one, two = site.warm("auto", "n1/a"), site.warm("auto too", "n1/a")
    site.do(c.Limit(one, 0, 2, 4, reserve), c.Limit(two, 0, 2, 1, reserve))
    site.start("x", "auto", one)
    site.call("y", "auto too")

    if beside:
        site.do(c.Start((CallId("y"),), two))
        assert site.compute(A) == (2 * reserve, 0)
        site.tell(m.Finished(CallId("y"), A, 1.0))
    else:
        assert site.why_not(c.Start((CallId("y"),), two)) == (
            "auto too needs 60 % of the compute of n1/a, and x leave 40 %"
        )
    assert site.compute(A) == (reserve, 0)
    site.tell(m.Finished(CallId("x"), A, 1.0))
    assert site.compute(A) == (0, 0)


def test_a_reserve_that_cannot_be_is_refused_with_the_reason() -> None:
    site = Site()
    copy, fixed = site.warm("auto", "n1/a"), site.warm("big", "n1/b")

    for action, why in (
        (c.Limit(copy, 40, reserve=40), "a copy with a share holds no more than that: say 40 % as share, or a reserve, "
                                        "not both"),
        (c.Limit(copy, reserve=101), "device n1/a has 100 % of compute, a reserve there cannot be 101 %"),
        (c.Limit(copy, reserve=-1), "device n1/a has 100 % of compute, a reserve there cannot be -1 %"),
        (c.Limit(fixed, reserve=40), "grants of big have no reserve of their own: its sharing is exclusive"),
    ):  # fmt: skip
        assert site.why_not(action) == why


def test_what_runs_gives_back_what_a_limit_takes_and_holds_again_what_it_leaves() -> None:
    site = Site()
    copy = site.warm("auto", "n1/a")
    site.start("x", "auto", copy)
    assert site.compute(A) == (100, 0)
    for limit, held in (
        ((0, 2, 4, 50), (50, 0)),
        ((40, 2, 4), (0, 40)),
        ((0, 2, 4, 60), (60, 0)),
        ((0, 2, 4), (100, 0)),
    ):
        site.do(c.Limit(copy, *limit))
        assert site.policy.refusals == [None]
        assert site.compute(A) == held
    site.tell(m.Finished(CallId("x"), A, 1.0))
    assert site.compute(A) == (0, 0)


def test_what_runs_without_its_share_waits_for_compute_that_others_have() -> None:
    site = Site()
    one, two = site.warm("auto", "n1/a"), site.warm("auto too", "n1/a")
    site.do(c.Limit(one, 40, 2, 4), c.Limit(two, 0, 2, 1, 60))
    site.start("x", "auto", one)
    site.start("y", "auto too", two)
    site.do(c.Limit(one, 0, 2, 4))
    assert site.compute(A) == (60, 0)
    site.tell(m.Finished(CallId("y"), A, 1.0))
    assert site.compute(A) == (100, 0)
    site.tell(m.Finished(CallId("x"), A, 1.0))
    assert site.compute(A) == (0, 0)


# --- nobody takes their place ---


def test_a_planned_copy_is_no_victim_and_who_names_it_is_refused_with_the_plan() -> None:
    site = Site()
    site.deploy_with("wide", Profile(3.0, 1.0, 95))
    copy = site.warm("big", "n1/a")
    site.plan(Replica("big", A))
    keeps = f"{copy} cannot be evicted: plan 1 keeps it on n1/a"

    assert site.why_not(c.Evict(copy)) == f"plan 1 keeps copy {copy} on device n1/a"
    assert site.why_not(c.Evict(copy, drain=True)) == f"plan 1 keeps copy {copy} on device n1/a"
    assert site.why_not(c.Load(FunctionId("wide"), on(A), victims=(CopyId(copy),))) == keeps
    assert "what could be evicted is too little" in site.why_not(c.Load(FunctionId("wide"), on(A)))
    assert site.policy.view.evictable(site.engine._world.devices[A]) == []
    site.plan()
    assert len(site.do(c.Load(FunctionId("wide"), on(A)))) == 1
    assert copy not in site.engine._world.copies


def test_a_call_that_finds_no_room_beside_planned_copies_is_refused_with_the_plan() -> None:
    site = Site()
    site.deploy_with("wide", Profile(3.0, 1.0, 95))
    site.plan(Replica("big", A), Replica("big", B), Replica("big", DeviceId("n2/c")))
    for device in (A, B, DeviceId("n2/c")):
        site.load(FunctionId("big"), device)

    (refused,) = site.call("x", "wide")
    assert isinstance(refused, m.RejectCall)
    assert refused.code == "no_room"
    assert refused.message.endswith("those of big. Change plan 1, remove one of them, or add a device")


def test_calls_in_a_local_queue_are_refused_too_once_a_plan_takes_their_compute_for_good() -> None:
    site = Site()
    for device in (B, DeviceId("n2/c")):
        site.tell(m.DeviceLeft(device, "gone"))
    for name, compute in (("half", 50), ("more", 60)):
        site.deploy(name, need=Need(compute, "spatial"))
    half, more = site.load(FunctionId("half"), A), site.load(FunctionId("more"), A)
    site.start("x", "half", half)
    site.call("in the global queue", "more")
    site.call("in the local one", "more")
    site.do(c.Assign(CallId("in the local one"), CopyId(more)))
    site.plan(Replica("auto", A, 45))

    load, *refused = site.do(c.Load(AUTO, on(A, 45)))

    assert isinstance(load, m.LoadCopy)
    assert {each.call for each in refused if isinstance(each, m.RejectCall)} == {
        "in the global queue", "in the local one"
    }  # fmt: skip
    assert set(site.engine._world.calls.by_id) == {"x"}


def test_a_plan_that_names_what_is_resident_refuses_the_calls_that_wait_for_its_room() -> None:
    site = Site()
    for device in (B, DeviceId("n2/c")):
        site.tell(m.DeviceLeft(device, "gone"))
    site.deploy_with("wide", Profile(3.0, 1.0, 95))
    site.start("x", "other", site.warm("other", A))
    site.call("y", "wide")

    (refused,) = site.plan(Replica("other", A))

    assert isinstance(refused, m.RejectCall)
    assert refused.call == "y"


def test_calls_that_wait_for_a_device_of_a_plan_go_elsewhere_as_soon_as_it_ends() -> None:
    site = World("lb").set_up("f", "a b")
    site.tell(m.Planned(PlacementPlan(1, (Replica("f", DeviceId("a")),))))
    site.call("runs", "f")
    site.call("waits", "f")
    assert set(site.running) == {"runs"}

    site.tell(m.Planned(PlacementPlan(2, ())))

    assert set(site.running) == {"runs", "waits"}


def test_calls_are_refused_too_that_wait_when_a_limit_takes_their_compute_for_good() -> None:
    site = Site()
    for device in (B, DeviceId("n2/c")):
        site.tell(m.DeviceLeft(device, "gone"))
    site.deploy("more", need=Need(60, "spatial"))
    site.plan(Replica("auto", A, 20))
    planned, more = site.load(AUTO, A, 20), site.load(FunctionId("more"), A)
    site.start("x", "more", more)
    site.call("y", "more")
    site.plan(Replica("auto", A, 45))
    site.tell(m.Finished(CallId("x"), A, 1.0))

    _, refused = site.do(c.Limit(CopyId(planned), 45))

    assert isinstance(refused, m.RejectCall)
    assert refused.call == "y"


def test_a_call_that_loads_a_planned_copy_beside_what_runs_needs_the_share_of_the_plan_only() -> None:
    site = Site()
    site.deploy("half", need=Need(50, "spatial"))
    site.start("x", "half", site.load(FunctionId("half"), A))
    site.plan(Replica("auto", A, 40), Replica("auto too", A, reserve=50))

    site.call("y", AUTO)
    site.call("z", TOO)
    (started,) = site.do(c.Start((CallId("y"),), None, on(A)))
    assert isinstance(started, m.StartCall)
    assert "needs 50 % of the compute of n1/a, which has 10 % spare" in site.why_not(
        c.Start((CallId("z"),), None, on(A))
    )


def test_a_removed_function_protects_nothing() -> None:
    site = Site()
    copy = site.warm("big", "n1/a")
    site.plan(Replica("big", A))
    site.start("x", "big", copy)
    site.tell(m.FunctionRemoved(FunctionId("big")))

    assert site.engine._world.copies[CopyId(copy)][1].kept is None
    site.tell(m.Finished(CallId("x"), A, 1.0))
    assert copy not in site.engine._world.copies


def test_a_drained_device_sends_its_planned_copies_off() -> None:
    site = Site()
    copy = site.warm("big", "n1/a")
    site.plan(Replica("big", A))
    assert site.tell(m.DeviceDrained(A)) == [m.EvictCopy(FunctionId("big"), A, 0)]
    assert copy not in site.engine._world.copies


# --- copies that drain ---


def test_a_copy_in_use_drains_and_goes_when_its_calls_have_ended() -> None:
    site = Site()
    copy = site.warm("big", "n1/b")
    site.start("x", "big", copy)

    assert site.why_not(c.Evict(copy)) == f"copy {copy} is in use"
    assert site.do(c.Evict(copy, drain=True)) == []
    assert site.policy.refusals == [None]
    assert site.why_not(c.Evict(copy, drain=True)) == f"copy {copy} takes no more calls already"
    site.call("y", "big")
    assert site.why_not(c.Start((CallId("y"),), copy)) == f"all 1 slots of copy {copy} are taken"
    assert m.EvictCopy(FunctionId("big"), B, 0) in site.tell(m.Finished(CallId("x"), B, 1.0))


def test_a_copy_within_the_minimum_does_not_drain() -> None:
    site = Site()
    copy = site.warm("big", "n1/b")
    site.deploy("big", min_copies=1)
    site.start("x", "big", copy)
    why = f"copy {copy} is within the minimum of 1 of big"
    assert site.why_not(c.Evict(copy, drain=True)) == why


def test_a_copy_that_would_be_wanted_again_at_once_does_not_drain() -> None:
    site = Site()
    copy = site.warm("big", "n1/b")
    site.tell(m.Scaled(FunctionId("big"), 1))
    site.start("x", "big", copy)
    why = "big should have 1 copies, so a copy that drains would take calls again at once"
    assert site.why_not(c.Evict(copy, drain=True)) == why


# --- what people see ---


def test_the_status_says_what_became_of_each_replica_and_why_one_is_absent() -> None:
    site = Site()
    assert site.engine.status(0.0).plan is None
    site.deploy_with("wide", Profile(3.0, 1.0, 95))
    site.warm("big", "n1/a")
    replicas = (
        Replica("big", A), Replica("wide", A), Replica("auto", B, 40), Replica("late", B),
        Replica("big", DeviceId("z")), Replica("other", DeviceId("n2/c")),
    )  # fmt: skip
    site.plan(*replicas)
    site.do(c.Load(AUTO, on(B, 40)))

    status = site.engine.status(0.0).plan
    assert status is not None
    assert status.version == 1
    assert [(each.function, each.device) for each in status.copies] == [
        (each.function, each.device) for each in replicas
    ]
    assert [(each.state, each.reason) for each in status.copies] == [
        ("resident", ""),
        ("absent", "wide needs 95 B, device n1/a has 90 B free, and what could be evicted is too little"),
        ("loading", ""),
        ("absent", "it is not deployed"),
        ("away", "device z is not there"),
        ("absent", "it is not loaded yet"),
    ]
    site.plan()
    assert site.engine.status(0.0).plan is None


# --- another revision of a planned function ---


def revisions(site: Site, *devices: DeviceId) -> None:
    """Let f@1 be resident with 60 % on each device, and f@2 be deployed to take its place."""
    need, profiles = Need(100, "auto"), {"*": Profile(3.0, 1.0, 10)}
    site.plan(*[Replica("f", each, 60) for each in devices])
    site.tell(m.FunctionDeployed(Function(FunctionId("f@1"), "one", need, profiles)))
    for each in devices:
        site.load(FunctionId("f@1"), each)
    site.tell(m.FunctionDeployed(Function(FunctionId("f@2"), "two", need, profiles), FunctionId("f@1")))


def test_a_new_revision_takes_the_place_of_one_planned_copy_after_the_other() -> None:
    site = Site()
    revisions(site, A, B)

    evicted = [each for each in site.out if isinstance(each, m.EvictCopy)]
    (load,) = [each for each in site.out if isinstance(each, m.LoadCopy)]
    assert [each.device for each in evicted] == [load.parts[0].device]
    assert (load.function, load.parts[0].share) == ("f@2", 60)


def test_a_new_revision_of_the_only_planned_copy_is_loaded_once_the_old_one_is_removed() -> None:
    site = Site()
    revisions(site, A)
    assert site.out == []
    assert site.engine.status(0.0).lacking == {"f@2": "f@2 needs 60 % of the compute of n1/a, which has 40 % spare"}, (
        "of other devices the plan does not speak, so neither does the reason"
    )

    site.tell(m.FunctionRemoved(FunctionId("f@1"), drain=True))
    (evicted, load) = site.out
    assert isinstance(evicted, m.EvictCopy)
    assert isinstance(load, m.LoadCopy)
    assert (load.function, load.parts[0].share) == ("f@2", 60)


def test_a_parked_copy_is_not_woken_for_a_share_which_its_process_does_not_have() -> None:
    site = Site()
    parks = DeviceId("n3/p")
    site.tell(m.DeviceJoined(Device(parks, "gpu", 100, host_memory=100, parks=True)))
    site.do(c.Evict(site.warm("auto", "n3/p"), c.HOST))
    assert list(site.engine._world.functions[AUTO].parked) == [parks]

    ended, load = site.do(c.Load(AUTO, on(parks, 40)))
    assert ended == m.EvictCopy(AUTO, parks, 0)
    assert isinstance(load, m.LoadCopy)
    assert load.copy == 1
