"""Each action of a policy beside start, assign and load: done, or refused with one reason."""

from math import inf
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.errors import TooLate
from gpufaas_core.model import (
    CallId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    Need,
    NodeId,
    Offer,
    OrderId,
    PlacementPlan,
    Profile,
    Replica,
)
from gpufaas_core.snapshot import DeviceSnapshot, ResidentSnapshot, RunningCall
from gpufaas_scheduler import policies as c
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.handle.workers import KEPT_S
from gpufaas_scheduler.rejections import rejection
from gpufaas_scheduler.world.agenda import CAUSE

ALL = c.ARRIVAL | c.FINISH | c.LOADED | c.FLEET | c.WAKE | c.PLAN


class Scripted:
    """Does what the test tells it in its next run, keeps the answers, and notes why it ran."""

    name = "scripted"

    def __init__(self, watches: int = ALL) -> None:
        self.watches = watches
        self.script: list[c.Action] = []
        self.refusals: list[c.Refusal | None] = []
        self.causes: list[int] = []
        self.woken: list[frozenset[str]] = []
        self.seen: list[m.Event] = []
        self.state = b"nothing"

    def plan(self, view: c.View) -> c.Plan:
        self.view = view
        self.causes.append(view.causes)
        self.woken.append(frozenset(view.woken))
        while self.script:
            self.refusals.append((yield self.script.pop(0)))

    def observe(self, event: m.Event, _now: float) -> None:
        self.seen.append(event)

    def save(self) -> bytes:
        return self.state

    def load(self, state: bytes) -> None:
        self.state = state


class Site:
    """A node n1 with devices a and b, a node n2 with device c; `big` and `small` are variants of one task."""

    def __init__(self, policy: Scripted | None = None) -> None:
        self.policy = policy or Scripted()
        self.engine = Engine(policy=self.policy, replacement=Lru(), learn=False)
        self.now = 0.0
        for device, host in (("n1/a", 0), ("n1/b", 0), ("n2/c", 100)):
            self.tell(m.DeviceJoined(Device(DeviceId(device), "gpu", 100, host_memory=host)))
        self.deploy("big", task="see", idempotent=True)
        self.deploy("small", task="see", max_queue=1)
        self.deploy("other")
        self.deploy("auto", need=Need(100, "auto", slots=2, batch_max=4), min_copies=0)

    def tell(self, event: m.Event) -> list[m.Command]:
        self.out = self.engine.handle(event, self.now)
        return self.out

    def deploy(self, name: str, need: Need = Need(), **options: object) -> None:  # noqa: B008
        self.deploy_with(name, Profile(3.0, 1.0, 10), need, **options)

    def deploy_with(self, name: str, profile: Profile, need: Need = Need(), **options: object) -> None:  # noqa: B008
        profiles = {"*": profile}
        self.tell(m.FunctionDeployed(Function(FunctionId(name), name, need, profiles, **options)))  # type: ignore[arg-type]

    def call(self, name: str, function: str) -> list[m.Command]:
        return self.tell(m.Arrived(CallId(name), FunctionId(function)))

    def do(self, *actions: c.Action) -> list[m.Command]:
        """Let the policy propose *actions*."""
        self.policy.script = list(actions)
        self.policy.refusals.clear()
        self.policy.woken.clear()
        return self.tell(m.Scaled(FunctionId("other"), 0))

    def why_not(self, action: c.Action) -> str:
        """Return why *action* is refused; nothing is commanded for it."""
        assert self.do(action) == []
        (refusal,) = self.policy.refusals
        assert refusal is not None
        return refusal.reason

    def warm(self, function: str, device: str) -> str:
        """Let an idle device hold the function, and return the id of its copy."""
        name = CallId(f"warm {function} {device}")
        self.call(name, function)
        part = self.engine._world.devices[DeviceId(device)].part
        self.do(c.Start((name,), None, part))
        grant = self.out[0].grant  # type: ignore[union-attr]
        self.tell(m.Loaded(FunctionId(function), DeviceId(device), 3.0, 10, grant.copy))
        self.tell(m.Finished(name, DeviceId(device), 1.0))
        return self.engine._world.devices[DeviceId(device)].copies[FunctionId(function)]

    def run(self, call: str, function: str, device: str = "n1/a") -> m.Grant:
        copy = self.warm(function, device)
        self.call(call, function)
        self.do(c.Start((CallId(call),), copy))
        grant: m.Grant = self.out[0].grant  # type: ignore[union-attr]
        return grant


def test_an_idle_copy_is_evicted_to_where_the_policy_says() -> None:
    site = Site()
    gone, kept = site.warm("big", "n1/a"), site.warm("big", "n2/c")

    assert site.do(c.Evict(gone)) == [m.EvictCopy(FunctionId("big"), DeviceId("n1/a"), 0)]
    assert site.do(c.Evict(kept, c.HOST)) == [m.EvictCopy(FunctionId("big"), DeviceId("n2/c"), 1, "host")]


def test_a_copy_that_is_used_kept_or_unknown_is_not_evicted() -> None:
    site = Site()
    copy = site.warm("big", "n1/a")

    assert site.why_not(c.Evict("nobody#7")) == "there is no copy nobody#7"
    assert site.why_not(c.Evict(copy, "tape")) == "there is no tier tape"
    assert site.why_not(c.Evict(copy, c.HOST)) == "node n1 has no memory for weights"
    site.call("x", "big")
    site.do(c.Start((CallId("x"),), copy))
    assert site.why_not(c.Evict(copy)) == f"copy {copy} is in use"
    site.tell(m.Finished(CallId("x"), DeviceId("n1/a"), 1.0))
    site.deploy("big", min_copies=1)
    assert site.why_not(c.Evict(copy)) == f"copy {copy} is within the minimum of 1 of big"


def test_a_copy_is_limited_within_its_need_and_its_device() -> None:
    site = Site()
    copy, fixed = site.warm("auto", "n1/a"), site.warm("big", "n1/b")

    assert site.do(c.Limit(copy, 30, 2, 4)) == [m.SetLimit(FunctionId("auto"), DeviceId("n1/a"), 0, 30, 2, 4)]

    assert site.why_not(c.Limit("nobody#7")) == "there is no copy nobody#7"
    assert site.why_not(c.Limit(fixed, 30)) == "big has no share of its own: its sharing is exclusive"
    assert site.why_not(c.Limit(copy, 30, 3)) == "a copy of auto runs 1 to 2 grants at once, not 3"
    assert site.why_not(c.Limit(copy, 30, 1, 5)) == "a grant of auto has 1 to 4 calls, not 5"
    for share in (-1, 101):
        said = f"device n1/a has 100 % of compute left to share, not {share} %"
        assert site.why_not(c.Limit(copy, share)) == said


def test_shares_of_a_device_fit_its_compute_together() -> None:
    site = Site()
    site.deploy("auto too", need=Need(100, "auto"))
    one, two = site.warm("auto", "n1/a"), site.warm("auto too", "n1/a")
    site.do(c.Limit(one, 70))

    assert site.why_not(c.Limit(two, 40)) == "device n1/a has 30 % of compute left to share, not 40 %"
    site.do(c.Limit(two, 30))
    assert site.policy.refusals == [None]


def test_a_copy_whose_change_of_share_failed_has_its_old_share_again_and_keeps_it_for_a_while() -> None:
    site = Site()
    site.deploy("auto too", need=Need(100, "auto"))
    one, two = site.warm("auto", "n1/a"), site.warm("auto too", "n1/a")
    site.do(c.Limit(one, 70))
    site.do(c.Limit(one, 30))
    site.do(c.Limit(two, 50))

    site.tell(m.ShareKept(FunctionId("auto"), DeviceId("n1/a"), 0, 70, "no memory"))
    site.tell(m.ShareKept(FunctionId("nobody"), DeviceId("n1/a"), 0, 70, "no memory"))

    device = site.engine._world.devices[DeviceId("n1/a")]
    assert (device.residency.copies[one].share, device.spare) == (70, -20), "the other one has begun to use what it got"
    assert site.why_not(c.Limit(one, 20)) == "a worker of auto with another share did not load a moment ago"
    site.do(c.Limit(two, 30))
    assert device.spare == 0
    site.now += KEPT_S
    assert site.do(c.Limit(one, 20)) == [m.SetLimit(FunctionId("auto"), DeviceId("n1/a"), 0, 20)]


def test_a_call_becomes_one_of_a_variant_with_its_number() -> None:
    site = Site()
    site.call("first", "big")
    site.call("x", "big")
    site.deploy("small", task="see", max_queue=9)
    site.call("later", "small")

    site.do(c.Choose(CallId("x"), FunctionId("small")))
    heads = []
    while (head := site.policy.view.queue.first()) is not None:
        heads.append((head.id, head.function))
        site.policy.view.queue.set_aside(head)
    site.policy.view.queue.rewind()

    assert heads == [("first", "big"), ("x", "small")], "it is before the call that arrived later"
    assert site.engine.status(0.0).queued == {"big": 1, "small": 2}
    part = site.engine._world.devices[DeviceId("n1/a")].part
    (started,) = site.do(c.Start((CallId("x"),), None, part))
    assert isinstance(started, m.StartCall)
    assert (started.grant.call, started.grant.function) == ("x", "small")


def test_a_call_becomes_no_call_of_what_is_no_variant() -> None:
    site = Site()
    site.deploy("cpu", need=Need(0, slots=2), task="see")
    site.deploy("huge", task="see")
    site.tell(m.FunctionDeployed(Function(FunctionId("huge"), "huge", Need(), {"*": Profile(1, 1, 1000)}, task="see")))
    site.call("x", "big")
    site.call("y", "other")
    choose = lambda to, call="x": site.why_not(c.Choose(CallId(call), FunctionId(to)))  # noqa: E731

    assert choose("small", "nobody") == "call nobody does not wait in the global queue"
    assert choose("nobody") == "no function nobody is deployed"
    assert choose("big") == "the call is one of big already"
    assert choose("other") == "other is no variant of big: they have no task in common"
    assert choose("big", "y") == "big is no variant of other: they have no task in common"
    assert choose("cpu") == "the calls of cpu start without a policy"
    assert choose("huge") == "huge fits no device"
    site.call("z", "small")
    assert choose("small") == "small has 1 calls waiting already"


def test_a_call_is_rejected_in_the_policy_s_words() -> None:
    site = Site()
    site.call("x", "big")

    too_late = c.Reject(CallId("x"), "not today", 503, {"goal_s": 1.0}, 2.0)
    assert site.why_not(replace(too_late, status=500)) == "a call is refused with status 422, 429, 503, not 500"
    assert site.do(too_late) == [m.RejectCall(CallId("x"), "policy", "not today", 2.0, 503, {"goal_s": 1.0})]
    assert site.why_not(too_late) == "call x does not wait in the queue of its function"
    refused = rejection(m.RejectCall(CallId("x"), "policy", "not today", 2.0, 503, {"goal_s": 1.0}))
    assert isinstance(refused, TooLate)
    assert (refused.details, refused.retry_after_s) == ({"goal_s": 1.0}, 2.0)
    assert not site.engine.knows(CallId("x"))


def test_a_preempted_call_waits_again_with_its_number_once_its_node_has_ended_it() -> None:
    site = Site()
    grant = site.run("x", "big")
    site.call("later", "big")
    for _ in range(5):  # more often than a call may be refused
        (abort,) = site.do(c.Preempt(grant.number))
        assert abort == m.Abort(CallId("x"), grant.device, True, "the policy stopped the call", grant.number)
        assert site.why_not(c.Preempt(grant.number)) == f"grant {grant.number} is being stopped already"
        site.tell(m.NodeRefused(CallId("x"), grant.device, "stopped", opened=True))
        first = site.policy.view.queue.first()
        assert first is not None
        assert first.id == "x"
        site.do(c.Start((CallId("x"),), site.engine._world.devices[grant.device].copies[FunctionId("big")]))
        grant = site.out[0].grant  # type: ignore[union-attr]


def test_a_preempted_call_that_does_not_wait_again_ends() -> None:
    site = Site()
    grant = site.run("x", "other")

    assert site.why_not(c.Preempt(4711)) == "no grant 4711 runs"
    assert site.why_not(c.Preempt(grant.number)) == "other is not idempotent: its calls cannot run again"
    (abort,) = site.do(c.Preempt(grant.number, requeue=False))
    assert abort == m.Abort(CallId("x"), grant.device, False, "the policy stopped the call", grant.number)
    site.tell(m.Finished(CallId("x"), grant.device, 0.5, ok=False))
    assert not site.engine.knows(CallId("x"))


def test_a_fetch_goes_along_a_chain_of_nodes() -> None:
    site = Site()
    nodes = (NodeId("n1"), NodeId("n2"))

    assert site.do(c.Fetch(FunctionId("big"), nodes, "", ((0, 5),))) == [
        m.FetchBundle(FunctionId("big"), NodeId("n1"), "", ((0, 5),)),
        m.FetchBundle(FunctionId("big"), NodeId("n2"), "n1", ((0, 5),)),
    ]
    assert site.why_not(c.Fetch(FunctionId("nobody"), nodes)) == "no function nobody is deployed"
    assert site.why_not(c.Fetch(FunctionId("big"), ())) == "a fetch names the nodes that it is for"
    assert site.why_not(c.Fetch(FunctionId("big"), (NodeId("n9"),))) == "there is no node n9"
    assert site.why_not(c.Fetch(FunctionId("big"), nodes, "n8")) == "there is no node n8"


@pytest.mark.parametrize(
    ("can", "fetch", "why"),
    [
        ({"fetches": False}, {}, "node n3 fetches nothing ahead of a load"),
        ({"fetches_from": False}, {}, None),
        (
            {"fetches_from": False},
            {"source": "n1"},
            "node n3 fetches from any node, not from n1: fetch for one node, without a source",
        ),
        ({"fetches_ranges": False}, {}, None),
        ({"fetches_ranges": False}, {"ranges": ((0, 5),)}, "node n3 fetches all of the weights, not ranges of them"),
    ],
)
def test_a_fetch_is_refused_where_the_node_says_that_it_would_not_carry_it_out(
    can: dict[str, bool], fetch: dict[str, Any], why: str | None
) -> None:
    site = Site()
    site.tell(m.DeviceJoined(Device(DeviceId("n3/a"), "gpu", 100, **can)))
    action = c.Fetch(FunctionId("big"), (NodeId("n3"),), **fetch)

    if why is None:
        assert site.do(action) == [m.FetchBundle(FunctionId("big"), NodeId("n3"))]
    else:
        assert site.why_not(action) == why


def test_a_fetch_along_a_chain_is_refused_as_a_whole_if_its_last_node_does_not_fetch_from_the_one_before() -> None:
    site = Site()
    site.tell(m.DeviceJoined(Device(DeviceId("n3/a"), "gpu", 100, fetches_from=False)))
    chain = c.Fetch(FunctionId("big"), (NodeId("n1"), NodeId("n3")))

    assert site.why_not(chain) == "node n3 fetches from any node, not from n1: fetch for one node, without a source"


def test_wakes_come_by_key_and_later_ones_replace_earlier_ones() -> None:
    site = Site()
    site.do(c.Wake(5.0, "early"), c.Wake(7.0, "moved"), c.Wake(8.0, "off"))
    site.do(c.Wake(5.0, "both"), c.Wake(9.0, "moved"), c.Wake(inf, "off"))
    assert site.engine.wake_at == 5.0
    assert site.why_not(c.Wake(0.0)) == "a wake lies in the future"

    site.now = 5.5
    site.policy.woken.clear()
    site.tell(m.Woken())
    assert site.policy.woken == [{"early", "both"}]
    assert site.policy.causes[-1] == c.WAKE
    assert site.engine.wake_at == 9.0


def test_a_policy_that_watches_nothing_runs_only_while_a_call_waits_and_a_device_is_idle() -> None:
    site = Site(Scripted(watches=0))
    assert site.policy.causes == []
    site.policy.script = [c.Wake(5.0)]
    site.call("x", "big")

    assert site.policy.causes == [c.ARRIVAL]
    assert site.engine.wake_at == 5.0
    site.tell(m.CallerLeft(CallId("x")))
    assert site.engine.wake_at is None, "it would not run"


def test_causes_are_those_of_the_event() -> None:
    site = Site()
    copy = site.warm("big", "n1/a")
    site.policy.causes.clear()
    site.call("x", "big")
    site.do(c.Start((CallId("x"),), copy))
    site.tell(m.Finished(CallId("x"), DeviceId("n1/a"), 1.0))
    site.tell(m.WorkerExited(FunctionId("big"), DeviceId("n1/a"), "gone", 0))
    site.tell(m.Planned(PlacementPlan(1)))

    assert site.policy.causes == [c.ARRIVAL, c.FLEET, c.FINISH, c.LOADED, c.PLAN]
    assert isinstance(site.policy.seen[-1], m.Planned)


def test_nodes_are_procured_within_the_offer_and_released_once_they_are_empty() -> None:
    site = Site()
    assert site.why_not(c.Procure("gpu")) == "nodes cannot be ordered on this platform: none are offered"
    assert site.why_not(c.Release(NodeId("n1"))) == "node n1 is of no kind that is offered, so nobody takes it back"
    site.tell(m.Offered((Offer("gpu", 100, 2, limit=2),)))
    assert site.why_not(c.Procure("tpu")) == "no nodes of kind tpu are offered"
    assert site.why_not(c.Procure("gpu", 3)) == "1 to 2 nodes of kind gpu can be procured, not 3"
    assert site.why_not(c.Procure("gpu", 0)) == "1 to 2 nodes of kind gpu can be procured, not 0"

    one, two = OrderId("1-1"), OrderId("1-2")
    assert site.do(c.Procure("gpu", 2)) == [m.ProcureNodes("gpu", one), m.ProcureNodes("gpu", two)]
    assert site.policy.view.ordered == {one: "gpu", two: "gpu"}
    assert site.why_not(c.Procure("gpu")) == "1 to 0 nodes of kind gpu can be procured, not 1"
    for device in ("n3/a", "n3/b"):
        site.tell(m.DeviceJoined(Device(DeviceId(device), "gpu", 100), order=two))
    assert site.policy.view.ordered == {one: "gpu"}, "a node has joined, with two devices"
    for device in ("n3/a", "n2/a"):
        site.tell(m.DeviceLeft(DeviceId(device), "gone"))
        site.tell(m.DeviceJoined(Device(DeviceId(device), "gpu", 100)))
    site.tell(m.DeviceJoined(Device(DeviceId("n4/a"), "gpu", 100)))
    assert site.policy.view.ordered == {one: "gpu"}, "nodes of its kind that do not name it are others"

    grant = site.run("x", "big", "n1/b")
    assert site.why_not(c.Release(NodeId("n9"))) == "there is no node n9"
    assert site.do(c.Release(NodeId("n1"))) == [], "a call runs there"
    assert site.why_not(c.Release(NodeId("n1"))) == "node n1 is being released already"
    copy = int(grant.copy)
    out = site.tell(m.Finished(CallId("x"), grant.device, 1.0))
    assert out == [m.EvictCopy(FunctionId("big"), grant.device, copy), m.ReleaseNode(NodeId("n1"))]
    assert site.do(c.Release(NodeId("n2"))) == [m.ReleaseNode(NodeId("n2"))], "it is empty at once"


def test_an_order_that_fails_is_open_no_more_and_the_policy_sees_why_until_a_node_of_its_kind_has_come() -> None:
    site = Site()
    one, two = OrderId("1-1"), OrderId("1-2")
    site.tell(m.Offered((Offer("gpu", 100, limit=2),)))
    site.do(c.Procure("gpu", 2))

    site.tell(m.OrderFailed(one, "sold out"))

    assert site.policy.causes[-1] == c.FLEET
    assert (site.policy.view.ordered, site.policy.view.unmet) == ({two: "gpu"}, {"gpu": "sold out"})
    status = site.engine.status(site.now)
    assert (status.ordered, status.unmet) == ({two: "gpu"}, {"gpu": "sold out"})
    site.tell(m.OrderFailed(one, "sold out, said twice"))
    assert site.engine.ignored["OrderFailed"] == 1
    site.tell(m.DeviceJoined(Device(DeviceId("n3/a"), "gpu", 100), order=two))
    assert (site.policy.view.ordered, site.policy.view.unmet) == ({}, {})


def test_after_a_takeover_the_open_orders_are_those_of_the_ledger_and_releases_are_told_again() -> None:
    site = Site()
    site.tell(m.Offered((Offer("gpu", 100, limit=5),)))
    site.do(c.Procure("gpu", 3))
    site.tell(m.OrderFailed(OrderId("1-3"), "sold out"))
    assert site.do(c.Release(NodeId("n2"))) == [m.ReleaseNode(NodeId("n2"))]
    doc = site.engine.doc("engine", site.now)
    successor = Scripted(ALL)
    engine = Engine(policy=successor, replacement=Lru(), epoch=2)
    engine.handle(m.Restored(doc), 0.0)  # type: ignore[arg-type]
    open_orders = tuple((OrderId(each), "gpu") for each in ("1-2", "1-4"))  # of the last one the doc knows nothing
    engine.handle(m.Offered((Offer("gpu", 100, limit=2),), open_orders), 0.0)
    engine.handle(m.DeviceJoined(Device(DeviceId("n2/a"), "gpu", 100)), 0.0)
    engine.handle(m.DeviceJoined(Device(DeviceId("n3/a"), "gpu", 100), order=OrderId("1-2")), 0.0)

    commands = engine.handle(m.Serving(), 0.0)

    assert commands == [m.ReleaseNode(NodeId("n2"))]
    assert (successor.view.ordered, successor.view.unmet) == ({OrderId("1-4"): "gpu"}, {})
    successor.script = [c.Procure("gpu")]
    (order,) = engine.handle(m.FunctionDeployed(Function(FunctionId("new"), "")), 0.0)
    assert isinstance(order, m.ProcureNodes)
    assert order.order.startswith("2-"), "numbers are of an epoch: none is given twice"


def test_a_device_of_a_released_node_that_comes_back_takes_no_calls() -> None:
    site = Site()
    site.tell(m.Offered((Offer("gpu", 100),)))
    site.do(c.Release(NodeId("n2")))
    site.tell(m.DeviceJoined(Device(DeviceId("n2/c"), "gpu", 100)))
    site.call("x", "big")
    part = site.engine._world.devices[DeviceId("n2/c")].part

    assert site.why_not(c.Start((CallId("x"),), None, part)) == "device n2/c does not satisfy the constraints of big"


def test_a_plan_is_kept_and_the_policy_runs_for_it() -> None:
    site = Site()
    plan = PlacementPlan(
        2, (Replica(FunctionId("big"), DeviceId("n1/a"), 30, slots=2, batch=8),), ("two of three fit",)
    )

    assert site.do(c.SetPlan(plan)) == []
    assert site.policy.view.placement == plan
    assert site.engine.wake_at == site.now
    site.tell(m.Woken())
    assert site.policy.causes[-1] == c.PLAN | c.WAKE
    assert site.engine.wake_at is None

    assert site.why_not(c.SetPlan(plan)) == "plan 2 is not newer than plan 2, which is in force"
    unknown = PlacementPlan(3, (Replica(FunctionId("nobody"), DeviceId("n1/a")),))
    assert site.why_not(c.SetPlan(unknown)) == "plan 3 names nobody, which is not deployed"
    nowhere = PlacementPlan(3, (Replica(FunctionId("big"), DeviceId("n9/a")),))
    assert site.why_not(c.SetPlan(nowhere)) == "plan 3 names device n9/a, which is not there"


@pytest.mark.parametrize(
    ("name", "state", "wake_at"), [("scripted", b"kept", 109.0), ("scripted:option=1", b"nothing", None)]
)
def test_what_a_policy_asked_for_and_its_state_survive_a_takeover(
    name: str, state: bytes, wake_at: float | None
) -> None:
    """The state, and the wakes with its keys, are for a policy of the same spec only."""
    site = Site()
    site.policy.state = b"kept"
    site.tell(m.Offered((Offer("gpu", 100, limit=5),)))
    plan = PlacementPlan(1)
    site.do(c.Wake(9.0, "later"), c.SetPlan(plan), c.Procure("gpu"))
    site.tell(m.Woken())
    site.do(c.Release(NodeId("n2")))
    doc = site.engine.doc("engine", site.now)

    successor = Scripted(ALL & ~c.FLEET)
    successor.name = name
    engine = Engine(policy=successor, replacement=Lru(), epoch=2)
    engine.handle(m.Restored(doc), 100.0)  # type: ignore[arg-type]
    engine.handle(m.Serving(), 100.0)

    assert successor.state == state
    assert engine.wake_at == wake_at
    engine.handle(m.Planned(plan), 100.0)
    view = successor.view
    assert (view.placement, view.ordered) == (plan, {"1-1": "gpu"})
    assert not view.offers, "the platform of the successor says itself what it can order"


@pytest.mark.parametrize(("name", "runs"), [("scripted", [c.FLEET, c.PLAN | c.WAKE]), ("scripted:option=1", [c.FLEET])])
def test_a_plan_that_the_policy_has_not_run_for_is_not_lost_in_a_takeover(name: str, runs: list[int]) -> None:
    site = Site()
    site.do(c.SetPlan(PlacementPlan(1)))
    doc = site.engine.doc("engine", site.now)

    successor = Scripted()
    successor.name = name
    engine = Engine(policy=successor, replacement=Lru(), epoch=2)
    engine.handle(m.Restored(doc), 100.0)  # type: ignore[arg-type]
    engine.handle(m.Serving(), 100.0)
    if engine.wake_at is not None:
        engine.handle(m.Woken(), 100.0)

    assert successor.causes == runs


class Noting(Scripted):
    """Notes 7 with each call that leaves the queue."""

    def leaving(self, _call: c.WaitingCall) -> int:
        return 7


@pytest.mark.parametrize(("name", "note"), [("scripted", 7), ("another", 0)])
def test_a_note_is_for_a_policy_of_the_same_spec_and_another_one_runs_at_once(name: str, note: int) -> None:
    site = Site(Noting())
    grant = site.run("x", "big")
    site.tell(m.NodeRefused(CallId("x"), grant.device, "no", opened=True))
    docs = [site.engine.doc(key, site.now) for key in ("engine", "functions/big")]

    successor = Noting(0)
    successor.name = name
    engine = Engine(policy=successor, replacement=Lru(), epoch=2)
    engine.handle(m.FunctionDeployed(docs[1].function), 100.0)  # type: ignore[union-attr]
    engine.handle(m.Restored(docs[0], (docs[1],), queued=True), 100.0)  # type: ignore[arg-type]
    engine.handle(m.DeviceJoined(Device(DeviceId("n1/b"), "gpu", 100)), 100.0)
    engine.handle(m.Serving(), 100.0)

    assert bool(successor.causes) == (name != "scripted"), "the same policy would do nothing now"
    first = engine._world.view.queue.first()
    assert first is not None
    assert (first.id, first.note) == ("x", note)


def test_a_call_that_is_being_preempted_waits_again_under_the_next_engine_and_what_it_loads_stays() -> None:
    site = Site()
    site.call("x", "big")
    site.do(c.Start((CallId("x"),), None, site.engine._world.devices[DeviceId("n1/a")].part))
    grant = site.out[0].grant  # type: ignore[union-attr]
    site.do(c.Preempt(grant.number))
    docs = [site.engine.doc(key, site.now) for key in ("engine", "functions/big", "devices/n1/a")]

    successor = Site()
    engine = successor.engine = Engine(policy=successor.policy, replacement=Lru(), epoch=2)
    engine.handle(m.FunctionDeployed(docs[1].function), 0.0)  # type: ignore[union-attr]
    engine.handle(m.Restored(docs[0], (docs[1],), (docs[2],)), 0.0)  # type: ignore[arg-type]
    resident = ResidentSnapshot(FunctionId("big"), "big", 10, loading=True)
    running = RunningCall(CallId("x"), FunctionId("big"), cold=True, abandoned=True)
    snapshot = DeviceSnapshot(docs[2].device, (resident,), (running,))  # type: ignore[union-attr]
    engine.handle(m.DeviceJoined(snapshot.device, snapshot), 0.0)
    engine.handle(m.Serving(), 0.0)

    assert successor.tell(m.NodeRefused(CallId("x"), grant.device, "stopped")) == []

    (device,) = engine.status(0.0).devices
    assert [(each.function, each.loading) for each in device.resident] == [("big", True)]
    assert successor.policy.view.queue.first() is not None


def test_calls_of_a_limited_copy_hold_nothing_but_its_share_when_their_node_comes_back() -> None:
    site = Site()
    copy = site.warm("auto", "n1/a")
    site.do(c.Limit(copy, 40, 2))
    site.call("x", "auto")
    site.do(c.Start((CallId("x"),), copy))
    state = site.engine._world.devices[DeviceId("n1/a")]
    assert (state.reserved, state.residency.shares) == (0, 40)

    number = state.residency.copies[copy].number
    resident = ResidentSnapshot(FunctionId("auto"), "auto", 10, number)
    running = RunningCall(CallId("x"), FunctionId("auto"), number, begun=True)
    site.tell(m.DeviceJoined(state.device, DeviceSnapshot(state.device, (resident,), (running,))))

    state = site.engine._world.devices[DeviceId("n1/a")]
    assert (state.reserved, state.residency.shares) == (0, 40)
    assert site.tell(m.Finished(CallId("x"), state.id, 1.0)) == []
    assert not state.grants()


def test_each_event_has_a_cause() -> None:
    assert set(get_args(m.Event)) == CAUSE.keys()
