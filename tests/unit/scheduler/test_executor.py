"""What carries out plans: it brings what is there to the plan in force, with each policy, under load, and no more."""

from heapq import heappop

import pytest
from tests.unit.scheduler.conformance import Rig
from tests.unit.scheduler.world import state_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, Function, FunctionId, Need, PlacementPlan, Profile, Replica
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import POLICIES, make_policy, planned
from gpufaas_scheduler.policies.composite import Composite

A, B = DeviceId("n0/d"), DeviceId("n1/d")
"""With 60 and 80 of memory."""
AUTO = Need(100, "auto", slots=2, batch_max=3)
EXCLUSIVE = Need()
EACH = pytest.mark.parametrize("policy", POLICIES)


class Site(Rig):
    """A rig where nothing breaks by itself. The compute of a device is checked in what the engine says of it."""

    def __init__(
        self, policy: str, functions: str = "", need: Need = AUTO, *, size: int = 20, devices: int = 2
    ) -> None:
        super().__init__(policy, 1, functions=0, devices=devices, breaks=False)
        self.version = 0
        for name in functions.split():
            self.put(name, need, size=size)

    def put(self, name: str, need: Need = AUTO, *, size: int = 20, least: int = 0, most: int = 0) -> None:
        function = Function(
            FunctionId(name), name, need, {"*": Profile(2.0, 0.5, size)}, min_copies=least, max_copies=most
        )
        self.functions[function.id] = function
        self.tell(m.FunctionDeployed(function))

    def plan(self, *replicas: Replica) -> None:
        self.version += 1
        self.tell(m.Planned(PlacementPlan(self.version, replicas)))

    def load(self, function: str, seconds: float, per_s: float = 20.0) -> None:
        """Let calls of *function* come, evenly, from now on."""
        for number in range(int(seconds * per_s)):
            self._at(self.now + number / per_s, lambda: self.call(function))  # type: ignore[arg-type, return-value]

    def go_on(self, seconds: float) -> None:
        """Let everything happen that happens within this time."""
        until = self.now + seconds
        while True:
            due = self._calendar[0][0] if self._calendar else until
            wake_at = self.engine.wake_at
            if wake_at is not None and wake_at <= min(due, until):
                self.now = max(self.now, wake_at)
                self.tell(m.Woken())
            elif self._calendar and due <= until:
                self.now, _, happens = heappop(self._calendar)
                happens()
            else:
                self.now = until
                return

    def _check(self) -> None:
        for device in state_of(self.engine).devices.values():
            assert sum(each.memory for each in device.residency) <= device.device.memory
            assert device.reserved + device.residency.shares <= device.compute
        for refusal in self.engine.refusals:
            assert not refusal.reason.startswith(("there is no", "no model function")), refusal

    @property
    def copies(self) -> set[tuple[str, DeviceId, int, int]]:
        """The copies that take calls: function, device, share and reserve."""
        active = [each for owner in state_of(self.engine).functions.values() for each in owner.active.items()]
        return {(copy.owner.id, device.id, copy.share, copy.reserve) for copy, device in active}

    def evicted(self, since: int = 0) -> list[str]:
        """The functions whose copies were evicted, after so many events."""
        said = [each for commands in self.commands[since:] for each in commands]
        loads = [each.grant if isinstance(each, m.StartCall) else each for each in said
                 if isinstance(each, m.StartCall | m.LoadCopy)]  # fmt: skip
        victims = [name.partition("#")[0] for each in loads for name in each.victims]
        return victims + [each.function for each in said if isinstance(each, m.EvictCopy)]

    @property
    def executes(self) -> Composite:
        policy = self.engine.policy
        assert isinstance(policy, Composite)
        return policy

    def rests(self) -> bool:
        """Whether nothing of a plan is left, so that runs cost what they did before there was one."""
        policy = self.executes
        return policy.watches == 0 == state_of(self.engine).watches and policy.plan is policy._decide


# --- plans come, change and go ---


@EACH
def test_two_functions_with_shares_come_to_one_device_one_after_the_other_under_load_and_none_is_evicted(
    policy: str,
) -> None:
    site = Site(policy, "f g")
    site.load("f", 20)
    site.go_on(3)
    site.plan(Replica("f", A, 40))
    site.go_on(6)
    before = len(site.commands)
    site.plan(Replica("f", A, 40), Replica("g", A, 30))
    site.load("g", 4, per_s=2)
    site.go_on(4)

    assert site.copies == {("f", A, 40, 0), ("g", A, 30, 0)}
    assert not site.evicted(before)
    site.until_rest()
    assert set(site.ended.values()) == {1}
    assert not any(isinstance(each, m.RejectCall) for commands in site.commands for each in commands)


@EACH
def test_a_plan_changes_is_rolled_back_and_ends_and_nothing_of_it_stays(policy: str) -> None:
    site = Site(policy, "f g")
    site.load("f", 40)
    site.load("g", 40, per_s=3)
    first = Replica("f", A, 40, slots=1, batch=2), Replica("g", A, 60)
    for replicas, expected in (
        (first, {("f", A, 40, 0), ("g", A, 60, 0)}),
        ((Replica("f", B, reserve=50), Replica("g", B, reserve=50)), {("f", B, 0, 50), ("g", B, 0, 50)}),
        (first, {("f", A, 40, 0), ("g", A, 60, 0)}),
    ):
        site.plan(*replicas)
        site.go_on(8)
        assert site.copies == expected
    (limited,) = state_of(site.engine).functions[FunctionId("f")].active
    assert (limited.slots, limited.batch) == (1, 2)
    assert not site.rests()

    site.plan()
    site.go_on(8)

    assert {(share, reserve) for _, _, share, reserve in site.copies} == {(0, 0)}
    assert limited.slots in (0, AUTO.slots)
    assert limited.batch in (0, AUTO.batch_max)
    site.until_rest()
    assert site.rests()


@EACH
def test_of_a_plan_that_names_one_of_two_functions_the_other_is_placed_as_before(policy: str) -> None:
    site = Site(policy, "f g", EXCLUSIVE)
    site.plan(Replica("f", B))
    site.load("f", 5, per_s=1)
    site.load("g", 5, per_s=1)
    site.until_rest()

    assert {device for name, device, _, _ in site.copies if name == "f"} == {B}
    assert {device for name, device, _, _ in site.copies if name == "g"}
    started = {each.grant.device for commands in site.commands for each in commands
               if isinstance(each, m.StartCall) and each.grant.function == "f"}  # fmt: skip
    assert started == {B}


@EACH
def test_calls_run_elsewhere_while_the_device_of_the_plan_is_gone_and_there_again_once_it_is_back(policy: str) -> None:
    site = Site(policy, "f")
    site.plan(Replica("f", B, 30))
    site.load("f", 30, per_s=1)
    site.go_on(5)
    assert site.copies == {("f", B, 30, 0)}

    device = site.devices.pop(B)
    for worker in [each for each in site.workers.values() if each.device == B]:
        site._gone(worker)
    site.tell(m.DeviceLeft(B, "it is gone"))
    site.go_on(5)
    assert site.copies == {("f", A, 0, 0)}
    site.devices[B] = device
    site.tell(m.DeviceJoined(device))
    site.go_on(10)

    assert site.copies == {("f", B, 30, 0)}
    site.until_rest()


@EACH
def test_what_is_as_the_plan_says_leads_to_no_action_whatever_happens(policy: str) -> None:
    site = Site(policy, "f g")
    replicas = Replica("f", A, 40), Replica("g", A, reserve=20)
    site.plan(*replicas)
    site.go_on(8)
    before = len(site.commands)

    site.plan(*replicas)
    site.tell(m.DeviceDrained(B))
    site.tell(m.DeviceDrained(B, drain=False))

    assert [each for commands in site.commands[before:] for each in commands] == []
    assert not list(site.executes.planned.plan(state_of(site.engine).view))


# --- against the load of others ---


@EACH
@pytest.mark.parametrize("devices", [1, 2])
def test_constant_load_of_others_does_not_keep_a_planned_copy_out(policy: str, devices: int) -> None:
    site = Site(policy, "f g", EXCLUSIVE, devices=devices)
    site.load("f", 30, per_s=4 * devices)
    site.go_on(8)
    assert state_of(site.engine).devices[A].busy
    assert state_of(site.engine).queue.count + len(state_of(site.engine).devices[A].local) > 0

    site.plan(Replica("g", A))
    site.go_on(6)

    assert ("g", A, 0, 0) in site.copies
    site.until_rest()


@EACH
def test_a_planned_copy_takes_the_room_of_a_busy_one_as_soon_as_that_is_idle(policy: str) -> None:
    site = Site(policy, "f g", EXCLUSIVE, size=50)
    site.load("f", 20, per_s=8)
    site.go_on(8)
    site.plan(Replica("g", A))
    site.go_on(6)

    assert ("g", A, 0, 0) in site.copies
    assert ("f", A, 0, 0) not in site.copies, "it has no plan, and no room beside that of g"
    site.until_rest()


@EACH
def test_two_functions_change_places_where_each_device_has_room_for_one(policy: str) -> None:
    site = Site(policy, "f g", size=50)
    site.plan(Replica("f", A, 50), Replica("g", B, 50))
    site.load("f", 30, per_s=1)
    site.load("g", 30, per_s=1)
    site.go_on(6)
    assert site.copies == {("f", A, 50, 0), ("g", B, 50, 0)}

    site.plan(Replica("f", B, 50), Replica("g", A, 50))
    site.go_on(15)

    assert site.copies == {("f", B, 50, 0), ("g", A, 50, 0)}
    site.until_rest()


@pytest.mark.parametrize("policy", ["lalb", "lalb-o3"])
def test_a_local_queue_that_never_ends_does_not_keep_a_planned_copy_out(policy: str) -> None:
    site = Site(policy, "g", EXCLUSIVE, size=50)
    slow = Function(FunctionId("f"), "f", EXCLUSIVE, {"*": Profile(500.0, 0.5, 50)})  # its calls do not load elsewhere
    site.functions[slow.id] = slow
    site.tell(m.FunctionDeployed(slow))
    site.call("f")
    site.go_on(800)
    (device,) = [device for _, device, _, _ in site.copies]
    site.load("f", 60, per_s=2)
    site.go_on(8)
    assert len(state_of(site.engine).devices[device].local) > 1

    site.plan(Replica("g", device))
    site.go_on(40)

    assert ("g", device, 0, 0) in site.copies
    site.until_rest()


def test_no_device_is_kept_free_for_a_load_that_was_refused_though_it_was_idle() -> None:
    site = Site("lalb-o3", "f", EXCLUSIVE)
    site.put("stays", EXCLUSIVE, size=30, least=2)
    site.put("large", EXCLUSIVE, size=50)
    site.go_on(3)
    site.plan(Replica("large", A))
    site.load("f", 20, per_s=10)
    site.go_on(10)

    assert ("large", A, 0, 0) not in site.copies
    assert not site.executes.planned.held
    assert "large needs" in site.executes.planned.reasons[FunctionId("large"), A]
    site.until_rest()


def test_a_plan_of_which_little_fits_does_not_keep_waiting_calls_from_their_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planned, "MOST", 30)  # of a hundred refusals that are remembered
    site = Site("least-wait", "f", EXCLUSIVE)
    for number in range(90):
        site.put(f"large{number}", EXCLUSIVE, size=200)
    site.plan(*[Replica(f"large{number}", A) for number in range(90)])
    assert len(site.engine.refusals) == 30

    site.call("f")
    site.go_on(4)  # its load ends, then the call

    assert not site.open
    tried = [each.action.function for each in site.engine.refusals]  # type: ignore[union-attr]
    assert sorted(tried) == sorted(f"large{number}" for number in range(90)), "each in its turn"
    assert len(site.executes.planned.reasons) == 90


@EACH
def test_loads_of_others_do_not_keep_a_planned_copy_out_of_a_device_that_is_never_idle(policy: str) -> None:
    """There is always one that begins while another one ends. The second load is refused first because of the first."""
    site = Site(policy, devices=1)
    site.put("first", size=5)
    site.put("g", EXCLUSIVE, size=55)
    for number in range(6):
        site.put(f"half{number}", Need(50, "spatial"), size=25)
        site.load(f"half{number}", 30, per_s=1)
    site.go_on(8)

    site.plan(Replica("first", A), Replica("g", A))
    site.go_on(15)

    assert site.copies == {("first", A, 0, 0), ("g", A, 0, 0)}


@EACH
def test_batches_that_go_ahead_do_not_keep_a_planned_copy_out(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(policy, "g", EXCLUSIVE, size=50, devices=1)
    quick = Function(FunctionId("f"), "f", Need(batch_max=2), {"*": Profile(1.0, 0.02, 50)})
    site.functions[quick.id] = quick
    site.tell(m.FunctionDeployed(quick))
    takes = m.Finished
    monkeypatch.setattr(m, "Finished", lambda call, device, _service_s, ok: takes(call, device, 0.02, ok))
    site.load("f", 12, per_s=300)
    site.go_on(5)
    assert any(each.ahead for each in state_of(site.engine).devices[A].beside)

    site.plan(Replica("g", A))
    site.go_on(1)

    assert ("g", A, 0, 0) in site.copies


@pytest.mark.parametrize("policy", ["lalb", "lalb-o3"])
@pytest.mark.parametrize("replica", [Replica("f", A, 40, slots=1), Replica("f", A, reserve=40, slots=1)])
def test_a_planned_copy_takes_its_calls_though_others_wait_for_its_device_in_a_local_queue_that_never_ends(
    policy: str, replica: Replica
) -> None:
    site = Site(policy, "f")
    slow = Function(FunctionId("g"), "g", Need(60, "spatial"), {"*": Profile(500.0, 0.5, 20)})  # nor does it load again
    site.functions[slow.id] = slow
    site.tell(m.FunctionDeployed(slow))
    site.call("g")
    site.go_on(800)
    assert ("g", A, 0, 0) in site.copies
    site.plan(replica)
    site.go_on(5)
    site.load("g", 30, per_s=3)
    site.go_on(6)
    assert len(state_of(site.engine).devices[A].local) > 1

    first, second = site.call("f"), site.call("f")

    assert first in site.running, "at once"
    site.go_on(4)
    assert second in site.started, "once the slot is free"


def stream(site: Site, function: str) -> CallId:
    """Let a call of *function* come that goes on for ever once it runs."""
    call, serve = CallId("stream"), site._serve
    site._serve = lambda calls, worker: serve(tuple(each for each in calls if each != call), worker)  # type: ignore[method-assign]
    site.arrived[call], site.called[call] = site.now, FunctionId(function)
    site.tell(m.Arrived(call, FunctionId(function), site.now + 60.0, endless=True))
    site.go_on(5)
    assert call in site.running
    return call


@EACH
def test_a_call_that_goes_on_for_ever_keeps_a_load_of_the_plan_waiting_but_not_the_calls_of_others(policy: str) -> None:
    site = Site(policy, "f s", Need(50, "spatial"), devices=1)
    site.put("g", EXCLUSIVE, size=50)
    forever = stream(site, "s")
    site.plan(Replica("g", A))
    site.load("f", 10, per_s=1)
    site.go_on(15)

    assert site.open == [forever]
    assert "g needs" in site.executes.planned.reasons[FunctionId("g"), A]


@EACH
def test_a_copy_that_has_to_stay_is_not_loaded_again_with_each_call_that_finds_its_compute_taken(policy: str) -> None:
    site = Site(policy, "g", devices=1)
    site.put("f", EXCLUSIVE, least=1)
    site.go_on(3)
    site.plan(Replica("g", A, 40))
    site.go_on(3)
    before = len(site.commands)
    site.load("f", 3, per_s=2)
    site.go_on(5)

    said = [each for commands in site.commands[before:] for each in commands]
    assert {type(each) for each in said} == {m.RejectCall}
    assert "hold it: those of g. Change plan 1, remove" in said[0].message  # type: ignore[union-attr]


@EACH
def test_a_copy_that_scaling_asks_for_is_not_loaded_where_a_plan_leaves_too_little_compute_for_it(policy: str) -> None:
    site = Site(policy, "g", devices=2)
    site.put("f", EXCLUSIVE)
    site.tell(m.Scaled(FunctionId("f"), 2))
    site.go_on(8)
    site.plan(Replica("g", B, 40))
    site.go_on(3)
    before = len(site.commands)
    site.load("f", 4, per_s=4)
    site.go_on(4)

    assert site.evicted(before) == ["f"], "a call waited, and this copy could not take it"
    assert not [each for commands in site.commands[before:] for each in commands if isinstance(each, m.LoadCopy)]
    assert site.copies == {("f", A, 0, 0), ("g", B, 40, 0)}


# --- bounds and failures ---


def test_a_function_with_its_maximum_of_copies_moves_and_one_within_its_minimum_keeps_it() -> None:
    site = Site("lb")
    site.put("one", most=1)
    site.put("kept", least=1)
    site.plan(Replica("one", A), Replica("kept", A))
    site.go_on(8)

    site.plan(Replica("one", B))
    site.go_on(8)
    assert {each for each in site.copies if each[0] == "one"} == {("one", B, 0, 0)}
    site.plan(Replica("kept", B))
    site.go_on(8)
    assert {each for each in site.copies if each[0] == "kept"} == {("kept", B, 0, 0)}, (
        "one, as before, at no moment none"
    )


@EACH
def test_a_load_that_failed_is_tried_again_beside_the_shares_of_others_and_after_a_third_failure_later_each_time(
    policy: str,
) -> None:
    """It waits for no call: all of them may be hits elsewhere."""
    site = Site(policy, "f g")
    site.plan(Replica("g", A, 60))
    site.go_on(4)
    site.plan(Replica("g", A, 60), Replica("f", A, 30))
    for _ in range(3):
        (loading,) = [each for each in site.workers.values() if each.function == "f"]
        site._gone(loading)
        site.tell(m.CopyFailed(FunctionId("f"), A, "it broke", copy=loading.number))
    assert site.copies == {("g", A, 60, 0)}
    assert "failed: the next is in 1 s" in site.executes.planned.reasons[FunctionId("f"), A]

    site.until_rest()

    assert site.copies == {("g", A, 60, 0), ("f", A, 30, 0)}
    assert not site.executes.planned.reasons


def test_people_see_why_a_copy_is_not_there_yet() -> None:
    site = Site("least-wait", "f g")
    site.plan(Replica("f", A, 60), Replica("g", A, 30))

    status = site.engine.status(site.now).plan

    assert status is not None
    assert [(each.function, each.state, each.reason) for each in status.copies] == [
        ("f", "loading", ""), ("g", "absent", f"device {A} is busy with a load")
    ]  # fmt: skip


@EACH
def test_a_revision_takes_the_places_of_the_one_before_one_by_one(policy: str) -> None:
    site = Site(policy)
    site.put("f.ns@1", Need(100, "auto"), size=50)
    site.plan(Replica("f.ns", A, 60), Replica("f.ns", B, 60))
    site.go_on(8)
    assert site.copies == {("f.ns@1", A, 60, 0), ("f.ns@1", B, 60, 0)}

    after = Function(FunctionId("f.ns@2"), "2", Need(100, "auto"), {"*": Profile(2.0, 0.5, 50)})
    site.functions[after.id] = after
    site.tell(m.FunctionDeployed(after, FunctionId("f.ns@1")))
    assert {name for name, *_ in site.copies} == {"f.ns@1", "f.ns@2"}, "there is no room for both on a device"
    site.go_on(8)
    assert {name for name, *_ in site.copies} == {"f.ns@1", "f.ns@2"}
    site.tell(m.FunctionRemoved(FunctionId("f.ns@1"), True))  # as a gateway does it
    site.go_on(8)

    assert site.copies == {("f.ns@2", A, 60, 0), ("f.ns@2", B, 60, 0)}


# --- what a successor knows ---


def test_a_successor_takes_the_limits_of_a_plan_back_that_had_ended() -> None:
    site = Site("lalb", "f")
    site.plan(Replica("f", A, 30))
    site.go_on(5)
    policy = make_policy("lalb")
    assert policy.save() == make_policy("lalb").save(), "nothing of plans, while there was none"
    policy.load(site.executes.save())
    engine = Engine(policy=policy, replacement=policy.replacement)

    assert policy.watches
    assert state_of(engine).watches == policy.watches
    assert policy.plan is not policy._decide
