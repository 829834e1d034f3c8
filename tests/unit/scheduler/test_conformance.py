"""
What every policy must keep, and every pair of what fills two roles: whatever is in the registry is tested.

No call is lost or answered twice, and nothing is exceeded: `conformance.Rig` checks that after each event.
"""

from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.scheduler.conformance import Rig, specs
from tests.unit.scheduler.planned_rig import Epoch, PlannedRig

from gpufaas_core import messages as m
from gpufaas_core.model import Device, DeviceId, Need, Offer, OrderId, Profile
from gpufaas_scheduler.contract import Evict, Limit, Load, Plan, Procure, Refusal
from gpufaas_scheduler.journal import Journal, replay
from gpufaas_scheduler.policies import POLICIES
from gpufaas_scheduler.policies.planned import Planned
from gpufaas_scheduler.view_contract import View
from gpufaas_scheduler.world.clearing import PAUSE_S, WAIT_S

SPECS = specs()
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 7))]
PLANNING = [
    each if each in POLICIES or "admission" in each else pytest.param(each, marks=pytest.mark.long) for each in SPECS
]
"""The specs that are tried with plans: of the pairs of roles, `make test` takes those with an admission."""
CALLS = 150


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spec", SPECS)
def test_work_on_a_cluster_that_breaks_is_answered_once_and_replays_equally(
    spec: str, seed: int, tmp_path: Path
) -> None:
    rig = Rig(spec, seed)
    rig.work(CALLS, per_s=3.0)
    rig.until_rest()

    all_is_answered_once(rig)
    replays_equally(Epoch(rig.header, rig.events, rig.commands), tmp_path / "journal")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spec", PLANNING)
def test_plans_that_come_and_go_meanwhile_and_leaders_that_die_lose_no_call_and_replay_equally(
    spec: str, seed: int, tmp_path: Path
) -> None:
    """No copy is evicted that the plan in force has, and nothing is exceeded: see `PlannedRig`."""
    rig = PlannedRig(spec, seed)
    rig.work(CALLS, per_s=3.0)
    rig.until_rest()

    all_is_answered_once(rig)
    for number, epoch in enumerate(rig.epochs):
        replays_equally(epoch, tmp_path / str(number))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spec", PLANNING)
def test_in_the_end_exactly_the_plan_is_resident_with_its_limits_though_its_leader_died_while_it_was_carried_out(
    spec: str, seed: int
) -> None:
    rig = planned_at_last(spec, seed)

    assert rig.planned
    assert rig.differences() == []
    rig.apply(())
    rig.until_rest()
    assert rig.differences() == [], "limits outlive their plan"


@pytest.mark.parametrize("idle", ["loads", "limits", "strays"])
def test_an_executor_that_leaves_out_something_is_found(idle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = {"loads": Load, "limits": Limit, "strays": Evict}[idle]
    plan = Planned.plan

    def idling(self: Planned, view: View) -> Plan:
        actions, verdict = plan(self, view), None
        while True:
            try:
                action = actions.send(verdict)
            except StopIteration:
                return
            verdict = Refusal(action, "it idles") if isinstance(action, left_out) else (yield action)

    monkeypatch.setattr(Planned, "plan", idling)

    assert any(planned_at_last(spec, seed).differences() for spec in POLICIES for seed in (1, 2, 3))


def planned_at_last(spec: str, seed: int) -> PlannedRig:
    """Return a rig at rest. Its last plan came under load, and its leader died soon after."""
    rig = PlannedRig(spec, seed, breaks=False)
    rig.work(CALLS // 3, per_s=3.0)
    came = CALLS / 3 / 3.0
    rig._at(came, lambda: rig.apply(rig.feasible()))
    rig._at(came + 0.7, rig.take_over)
    rig.until_rest()
    return rig


def all_is_answered_once(rig: Rig) -> None:
    assert set(rig.ended) == set(rig.arrived)
    assert set(rig.ended.values()) == {1}
    assert not rig.running


def replays_equally(epoch: Epoch, path: Path) -> None:
    with closing(Journal(path, epoch.header)) as journal:
        for event, now in epoch.events:
            journal.append(event, now)
    assert [commands for _, commands in replay(path)] == epoch.commands


@pytest.mark.parametrize("spec", SPECS)
def test_everything_is_served_where_one_device_is_just_large_enough(spec: str) -> None:
    rig = Rig(spec, 5, functions=0, devices=1, breaks=False)
    for number, size in enumerate((60, 35, 60, 5)):
        rig.deploy(f"f{number}", Need(), Profile(2.0, 1.0, size))
    rig.deploy("cpu", Need(0, slots=2), Profile(1.0, 1.0, 60))
    rig.work(60, per_s=1.0)
    rig.until_rest()

    assert set(rig.started) == set(rig.arrived)


@pytest.mark.parametrize("spec", SPECS)
def test_idle_shares_give_way_to_a_call_that_takes_the_whole_device_though_memory_is_free(spec: str) -> None:
    rig = Rig(spec, 5, functions=0, devices=1, breaks=False)
    for name, need in (("share", Need(30, "share")), ("other", Need(30, "share")), ("whole", Need())):
        rig.deploy(name, need, Profile(2.0, 1.0, 5))
    for at, name in ((0.0, "share"), (0.0, "other"), (30.0, "whole"), (60.0, "share"), (90.0, "whole")):
        rig._at(at, lambda name=name: rig.call(name) and None)  # type: ignore[misc]
    rig.until_rest(120.0)

    assert set(rig.started) == set(rig.arrived)


@pytest.mark.parametrize("spec", SPECS)
def test_hits_that_keep_coming_do_not_starve_a_call_of_another_function(spec: str) -> None:
    """On one device, which is busy for nine tenths of the time and holds one model."""
    rig = Rig(spec, 7, functions=0, devices=1, breaks=False)
    rig.deploy("hot", Need(), Profile(2.0, 0.45, 60))
    rig.deploy("cold", Need(), Profile(2.0, 0.45, 60))
    waits: list[float] = []

    def cold() -> None:
        call = rig.call("cold")
        rig._at(rig.now + 120.0, lambda: waits.append(rig.started[call] - rig.arrived[call]))

    for at in range(600):
        rig._at(at / 2, lambda: rig.call("hot") and None)
    rig._at(60.1, cold)
    rig.until_rest()

    assert len(waits) == 1, "it had not started after two minutes"


MIX = {
    "whole": Need(), "timed": Need(100, "time"), "half": Need(50, "spatial"), "other": Need(50, "spatial"),
    "share": Need(30, "share", slots=2),
}  # fmt: skip


@pytest.mark.parametrize(("needs", "devices"), [("whole half other", 1), ("whole share", 1), (" ".join(MIX), 2)])
@pytest.mark.parametrize("spec", SPECS)
def test_calls_that_take_turns_on_a_part_of_a_device_do_not_starve_one_that_needs_it_all(
    spec: str, needs: str, devices: int
) -> None:
    """
    Three callers of each function call again as soon as they have their answers, and so keep all devices in use. A call
    for a whole device waits for `WAIT_S`, then one clearing for each older one: a pause, the rest of a call that runs,
    with its load, and the older call. Those that take turns wait for as many at most.
    """
    rig = Rig(spec, 7, functions=0, devices=devices, breaks=False)
    profile = Profile(2.0, 0.45, 20)
    longest_s = 1.3 * profile.load_s + 4 * profile.service_s
    for name in needs.split():
        rig.deploy(name, MIX[name], profile)
    large = [name for name in needs.split() if MIX[name].compute == 100]
    of: dict[str, str] = {}

    def call(name: str) -> None:
        of[rig.call(name)] = name

    rig.answered = lambda name: call(name) if name not in large and rig.now < 150.0 else None
    for name in needs.split():
        for caller in range(3 if name not in large else 0):
            rig._at(caller / 8, lambda name=name: call(name))  # type: ignore[misc]
    for at in range(10, 150, 30):
        for name in large:
            rig._at(at, lambda name=name: call(name))  # type: ignore[misc]
    rig.until_rest()

    bound_s = WAIT_S + len(large) * (PAUSE_S + 2 * longest_s)
    assert {name: wait for each, name in of.items() if (wait := rig.started[each] - rig.arrived[each]) > bound_s} == {}
    assert len(of) > 200


def test_the_registry_is_covered() -> None:
    assert set(POLICIES) <= set(SPECS)
    assert sum("batching=waiting" in each for each in SPECS) > 1


class OrderingRig(Rig):
    """Its policy orders a node while calls wait. Half of the orders fail, some of them long after; nodes join late."""

    def __init__(self, spec: str, seed: int) -> None:
        self.orders: dict[OrderId, str] = {}
        """What became of each."""
        super().__init__(spec, seed, devices=2)
        policy = self.engine.policy
        plan = policy.plan

        def ordering(view: View) -> Plan:
            yield from plan(view)
            if len(view.queue) and len(view.ordered) < 2 and (offer := view.offers.get("gpu")) and offer.limit:
                yield Procure("gpu")

        policy.plan = ordering  # type: ignore[method-assign]
        self.tell(m.Offered((Offer("gpu", 100, limit=8),)))

    def provide(self, kind: str, order: OrderId) -> None:
        assert kind == "gpu"
        assert order not in self.orders, "an order id is given twice"
        self.orders[order] = "open"
        fails, after_s = self.rng.random() < 0.5, self.rng.uniform(0.0, 9.0)
        self._at(self.now + after_s, lambda: self._fail(order) if fails else self._deliver(order))

    def _fail(self, order: OrderId) -> None:
        self.orders[order] = "failed"
        self.tell(m.OrderFailed(order, "sold out"))

    def _deliver(self, order: OrderId) -> None:
        self.orders[order] = "joined"
        device = Device(DeviceId(f"{order}/d"), "gpu", 100)
        self.devices[device.id] = device
        self.tell(m.DeviceJoined(device, order=order))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spec", POLICIES)
def test_beside_orders_that_fail_or_come_late_each_call_is_answered_once_and_no_order_stays_open(
    spec: str, seed: int
) -> None:
    rig, again = OrderingRig(spec, seed), OrderingRig(spec, seed)
    for each in (rig, again):
        each.work(CALLS, per_s=3.0)
        each.until_rest()

    all_is_answered_once(rig)
    assert set(rig.orders.values()) == {"failed", "joined"}
    assert rig.engine.status(rig.now).ordered == {}
    assert again.commands == rig.commands
