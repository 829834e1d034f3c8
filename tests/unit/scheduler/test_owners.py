"""Each function has one owner of its copies: no other role loads, limits or evicts them, and its calls are served."""

from itertools import permutations

import pytest
from tests.unit.scheduler.world import World, state_of

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import (
    CopyId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    Need,
    NodeId,
    Offer,
    Part,
    PlacementPlan,
    Profile,
    Replica,
)
from gpufaas_core.owners import CALLS, OWNERS, PLAN
from gpufaas_scheduler.contract import HOST, Action, Evict, Limit, Load, Plan, Refusal, Release
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.policies.composite import Composite
from gpufaas_scheduler.policies.load_balance import Anywhere, Arrival
from gpufaas_scheduler.policies.locality import O3, Locality, O3Options
from gpufaas_scheduler.policy_contract import FINISH, FLEET
from gpufaas_scheduler.view_contract import View

A, B = DeviceId("n1/a"), DeviceId("n2/b")
MINE, OTHERS = FunctionId("mine"), FunctionId("others")
PAIRS = list(permutations(OWNERS, 2))


class Role:
    """A scaling for *owner*: when something of the fleet changes, it proposes its script."""

    def __init__(self, owner: str, watches: int = FLEET) -> None:
        self.owners = () if owner == CALLS else (owner,)
        self.watches = watches
        self.script: list[Action] = []
        self.answers: list[str | None] = []

    def plan(self, view: View) -> Plan:  # noqa: ARG002
        script, self.script = self.script, []
        for action in script:
            refusal: Refusal | None = yield action
            self.answers.append(None if refusal is None else refusal.reason)


class Site:
    """Two devices: n1/a has a copy of the function "mine", and n2/b one of "others", both idle."""

    def __init__(self, mine: str, other: str) -> None:
        self.role = Role(mine)
        self.world = World(Composite("mixed", Arrival(), Anywhere(), Lru(), scaling=self.role))
        for name, owner in ((MINE, mine), (OTHERS, other)):
            need, declared = Need(100, "auto", latency_goal_s=5.0), CALLS if owner == PLAN else owner
            self.world.tell(m.FunctionDeployed(
                Function(name, "", need, {"*": Profile(3.0, 1.0, 40)}, owner=declared, idempotent=True)
            ))  # fmt: skip
        self.world.tell(m.Offered((Offer("gpu", 100, limit=2),)))
        self.world.tell(m.DeviceJoined(Device(A, "gpu", 100)))
        self.world.call("first", MINE)
        self.world.tell(m.DeviceJoined(Device(B, "gpu", 100)))
        self.world.warm(OTHERS, B)
        self.world.finish("first")
        self.planned = MINE if mine == PLAN else OTHERS if other == PLAN else None
        if self.planned is not None:
            self.plan(Replica(self.planned, A if self.planned == MINE else B))

    def plan(self, *replicas: Replica) -> list[m.Command]:
        before = state_of(self.world.engine).agenda.plan
        return self.world.tell(m.Planned(PlacementPlan(1 if before is None else before.version + 1, replicas)))

    def copy(self, function: FunctionId) -> CopyId:
        return next(iter(state_of(self.world.engine).functions[function].active)).id

    def ask(self, action: Action) -> str | None:
        """Let the role propose *action*, and return why it is refused."""
        self.role.script = [action]
        self.world.tell(m.Offered((Offer("gpu", 100, limit=2),)))
        return self.role.answers.pop()


def on(device: DeviceId) -> tuple[Part, ...]:
    return (Part(device, 0),)


@pytest.mark.parametrize(("mine", "other"), [each for each in PAIRS if each[0] != PLAN])
def test_a_role_acts_on_functions_that_it_owns_and_on_those_that_follow_their_calls_only(mine: str, other: str) -> None:
    site = Site(mine, other)
    theirs = {"load": Load(OTHERS, on(A)), "victim": Load(MINE, on(B), victims=(site.copy(OTHERS),)),
              "limit": Limit(site.copy(OTHERS), 40), "evict": Evict(site.copy(OTHERS))}  # fmt: skip

    if other == CALLS:
        assert site.ask(theirs["limit"]) == "others has a latency goal of 5 s, for which it needs 100 %"
        assert site.ask(theirs["evict"]) is None
    else:
        said = {name: site.ask(action) for name, action in theirs.items()}
        expected = f"the owner of the copies of others is {'plan 1' if other == PLAN else other}"
        assert set(said.values()) == {expected}
        assert site.ask(Load(OTHERS, on(A), HOST)) != said["load"], "weights in host memory are no copy"
    if other == PLAN:
        assert site.ask(Release(NodeId("n2"))) == "the owner of the copies of others is plan 1"
    if mine != CALLS:
        assert site.ask(Limit(site.copy(MINE), 40)) is None, "its owner knows what its goal needs"
        assert site.ask(Evict(site.copy(MINE))) is None


@pytest.mark.parametrize("other", [each for each in OWNERS if each != PLAN])
def test_a_plan_acts_on_what_it_names_only(other: str) -> None:
    site = Site(PLAN, other)
    said = site.plan(Replica(MINE, B, 30))
    said += site.world.loaded(MINE, B)
    said += site.plan()

    assert {each.function for each in said if isinstance(each, m.LoadCopy | m.EvictCopy | m.SetLimit)} == {MINE}
    assert site.world.copies == {MINE: 1, OTHERS: 1}


@pytest.mark.parametrize(("mine", "other"), PAIRS)
def test_calls_of_all_functions_are_served_whoever_owns_their_copies(mine: str, other: str) -> None:
    site = Site(mine, other)
    for name, device in ((MINE, A), (OTHERS, B)):
        site.world.tell(m.WorkerExited(name, device, "it crashed", 0))
    for name in (MINE, OTHERS):
        site.world.call(f"call of {name}", name)
        assert f"call of {name}" in site.world.running


def test_the_order_follows_whatever_scaling_there_is() -> None:
    role = Role("kinds", FINISH)
    composite = Composite("mixed", O3(O3Options()), Locality(), Lru(), scaling=role)
    world = World(composite).set_up("f", "a")
    runs = []
    plan = composite.plan
    composite.plan = lambda view: (runs.append(len(view.queue)), plan(view))[1]  # type: ignore[method-assign]
    world.calls("c1 c2 c3", "f")
    runs.clear()

    world.finish("c1")

    assert world.started == [("c2", "a")]
    assert runs == [1], "it ran for what scaling watches, after the call had started"
    role.watches = 0
    world.finish("c2")  # what a policy watches is read after a run
    runs.clear()
    world.call("c4", "f")
    world.finish("c3")
    assert world.started == [("c4", "a")]
    assert not runs


@pytest.mark.parametrize("spec", ["lb", "lalb-o3", "least-wait", "least-wait+scaling=none", "lb+scaling=planned"])
def test_each_policy_carries_out_plans_and_does_nothing_while_there_is_none(spec: str) -> None:
    policy = make_policy(spec)
    assert policy.name == spec
    assert policy.watches == 0
    assert policy.plan is policy._decide
    world = World(policy).set_up("f", "a")
    world.tell(m.Planned(PlacementPlan(1, (Replica("f", DeviceId("a")),))))
    assert [type(each) for each in world.out] == [m.LoadCopy]
