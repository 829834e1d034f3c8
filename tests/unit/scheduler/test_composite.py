"""A policy of six roles: when each is asked, and which one decides where they disagree."""

from collections.abc import Callable

import pytest
from tests.unit.scheduler.world import World

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
    OrderId,
    Part,
    Profile,
)
from gpufaas_scheduler.contract import (
    Action,
    Choose,
    Evict,
    Limit,
    Load,
    Plan,
    Procure,
    Refusal,
    Reject,
    Release,
    Start,
)
from gpufaas_scheduler.policies.batching import Waiting
from gpufaas_scheduler.policies.composite import Composite
from gpufaas_scheduler.policies.load_balance import Anywhere, Arrival
from gpufaas_scheduler.policy_contract import ARRIVAL, FINISH
from gpufaas_scheduler.view_contract import View, WaitingCall


class Admitting:
    def __init__(self, answers: dict[str, Action]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def admit(self, view: View, call: WaitingCall) -> Choose | Reject | None:
        assert not view.queue.count, "it is in no queue yet"
        self.asked.append(call.id)
        return self.answers.get(call.id)  # type: ignore[return-value]


class Scaled:
    """Proposes what *propose* returns, and keeps the answers."""

    def __init__(self, watches: int, propose: Callable[[View], list[Action]]) -> None:
        self.watches = watches
        self.propose = propose
        self.answers: list[Refusal | None] = []

    def plan(self, view: View) -> Plan:
        for action in self.propose(view):
            self.answers.append((yield action))


def made(**roles: object) -> World:
    return World(Composite("mixed", Arrival(), Anywhere(), Lru(), **roles))  # type: ignore[arg-type]


def test_admission_is_asked_once_about_each_call_of_a_function_that_wants_it_before_it_is_placed() -> None:
    admission = Admitting({"no": Reject("no", "not today")})  # type: ignore[arg-type]
    world = made(admission=admission).set_up("g", "a")
    world.tell(m.FunctionDeployed(Function(FunctionId("f"), "", Need(), {"*": Profile(3.0, 1.0, 10)}, sheds=True)))
    world.call("of another function", "g")
    world.finish("of another function")

    world.call("no", "f")
    assert [(each.call, each.message) for each in world.out if isinstance(each, m.RejectCall)] == [("no", "not today")]
    world.call("c1", "f")
    world.call("c2", "f")  # the device is busy, and it is asked all the same
    world.finish("c1")

    assert world.started == [("c2", "a")]
    assert admission.asked == ["no", "c1", "c2"]


def test_admission_gives_a_call_to_another_variant() -> None:
    world = made(admission=Admitting({"c": Choose("c", FunctionId("small"))}))  # type: ignore[arg-type]
    for name in ("large", "small"):
        function = Function(FunctionId(name), "", Need(), {"*": Profile(3.0, 1.0, 10)}, task="answer", sheds=True)
        world.tell(m.FunctionDeployed(function))
    world.device("a")

    commands = world.engine.handle(m.Arrived(world_call := m.CallId("c"), FunctionId("large")), 0.0)

    assert [each.grant.function for each in commands if isinstance(each, m.StartCall)] == ["small"]
    assert world.engine.runs(world_call)


def test_scaling_runs_after_its_causes_only_and_after_the_order() -> None:
    seen: list[int] = []
    scaling = Scaled(FINISH, lambda view: seen.append(len(view.queue)) or [])  # type: ignore[func-returns-value]
    world = made(scaling=scaling).set_up("f", "a")
    world.calls("c1 c2 c3", "f")
    assert seen == []

    world.finish("c1")

    assert seen == [1], "the order has taken c2 from the queue"


def test_a_batch_that_the_engine_refuses_starts_as_the_one_call() -> None:
    class TooMany:
        def extend(self, view: View, start: Start, call: WaitingCall) -> Start:  # noqa: ARG002
            return Start((*start.calls, "another"), start.copy, start.parts)  # type: ignore[arg-type]

    world = made(batching=TooMany()).set_up("f", "a")

    world.call("c1", "f")

    assert world.started == [("c1", "a")]


def test_a_batch_has_the_oldest_waiting_calls_of_the_function_up_to_its_maximum() -> None:
    extended: list[tuple[str, ...]] = []

    class Watched(Waiting):
        def extend(self, view: View, start: Start, call: WaitingCall) -> Start:
            more = super().extend(view, start, call)
            assert isinstance(more, Start)
            extended.append(more.calls)
            return start

    world = made(batching=Watched())
    for name, most in (("f", 3), ("g", 1)):
        need = Need(batch_max=most)
        world.tell(m.FunctionDeployed(Function(FunctionId(name), "", need, {"*": Profile(3.0, 1.0, 10)})))
    for number, function in enumerate("fgfff"):
        world.call(f"{function}{number}", function)

    world.device("a")
    world.finish("f0")

    assert extended == [("f0", "f2", "f3")], "g is not asked about: its calls start one by one"


def test_state_of_roles_is_kept_by_role() -> None:
    class Remembering(Arrival):
        def __init__(self) -> None:
            self.state = b""

        def save(self) -> bytes:
            return b"mine"

        def load(self, state: bytes) -> None:
            self.state = state

    old, order = Composite("a", Remembering(), Anywhere(), Lru()), Remembering()

    Composite("a", order, Anywhere(), Lru()).load(old.save())

    assert order.state == b"mine"
    Composite("b", Arrival(), Anywhere(), Lru()).load(old.save())  # it has no use for it


# --- precedence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (lambda copy: Evict(copy), "1 calls wait for f, which would have no copy left"),
        (lambda copy: Load(FunctionId("g"), (Part(DeviceId("n1/a"), 0),), victims=(copy,)), "1 calls wait for f"),
        (lambda copy: Release(NodeId("n1")), "1 calls wait for f"),  # noqa: ARG005
        (lambda copy: Reject("c", "no"), "Reject is for calls, which are not scaling's"),  # noqa: ARG005
        (lambda copy: Start(("c",), copy), "Start is for calls"),
    ],
)
def test_scaling_gives_way_to_waiting_calls(action: Callable[[CopyId], Action], reason: str) -> None:
    copies: list[CopyId] = []
    scaling = Scaled(ARRIVAL, lambda view: [action(copies[0])] if copies and view.queue else [])
    world = made(scaling=scaling)
    world.set_up("f g", "n1/a", size=60)
    world.call("running", "f")
    copies.append(world.engine._world.devices[DeviceId("n1/a")].copies[FunctionId("f")])

    world.call("c", "f")

    (answer,) = scaling.answers
    assert answer is not None
    assert answer.reason.startswith(reason)


def test_what_nobody_waits_for_may_go() -> None:
    world_copies: list[CopyId] = []
    scaling = Scaled(ARRIVAL, lambda view: [Evict(each) for each in world_copies])  # noqa: ARG005
    world = made(scaling=scaling)
    world.set_up("f g", "a b")
    world.call("c", "f")
    world.finish("c")
    world_copies.append(next(iter(world.engine._world.copies)))

    world.call("d", "g")

    assert scaling.answers == [None]
    assert "f" not in world.copies


def test_what_is_in_use_and_what_was_declared_stay_whatever_a_role_proposes() -> None:
    copies: list[CopyId] = []
    scaling = Scaled(ARRIVAL, lambda view: [Evict(each) for each in copies])  # noqa: ARG005
    world = made(scaling=scaling)
    world.set_up("f", "a", min_copies=1)
    world.loaded("f", "a")
    copies.append(next(iter(world.engine._world.copies)))

    world.call("c", "f")
    world.finish("c")
    copies_before = dict(world.copies)
    world.deploy("g")
    world.call("d", "g")

    assert [each is not None for each in scaling.answers] == [True, True]
    assert world.copies["f"] == copies_before["f"] == 1  # type: ignore[index]


def test_a_cap_leaves_a_function_with_a_latency_goal_the_share_that_it_asks_for() -> None:
    copies: list[CopyId] = []
    scaling = Scaled(ARRIVAL, lambda view: [Limit(each, 20) for each in copies])  # noqa: ARG005
    world = made(scaling=scaling)
    for name, goal_s in (("f", 2.0), ("g", None)):
        need = Need(100, "auto", latency_goal_s=goal_s)
        world.tell(m.FunctionDeployed(Function(FunctionId(name), "", need, {"*": Profile(3.0, 1.0, 10)})))
    for name in "ab":
        world.device(name)
    world.call("c1", "f")
    world.call("c2", "g")
    copies += world.engine._world.copies

    world.call("c3", "g")

    of_f, of_g = scaling.answers
    assert of_f is not None
    assert of_f.reason == "f has a latency goal of 2 s, for which it needs 100 %"
    assert of_g is None


def test_scaling_procures_nodes() -> None:
    scaling = Scaled(ARRIVAL, lambda view: [Procure("gpu", 1)] if "gpu" in view.offers else [])
    world = made(scaling=scaling)
    world.deploy("f")
    world.tell(m.Offered((Offer("gpu", 100, 1, 1.0, 60.0, 3),)))

    world.call("c", "f")

    assert [each for each in world.out if isinstance(each, m.ProcureNodes)] == [m.ProcureNodes("gpu", OrderId("1-1"))]


def test_the_calls_of_a_batch_start_together_whatever_the_order() -> None:
    for policy in ("lb", "lalb-o3", "least-wait"):
        world = World(f"{policy}+batching=waiting")
        need = Need(batch_max=3)
        world.tell(m.FunctionDeployed(Function(FunctionId("f"), "", need, {"*": Profile(3.0, 1.0, 10)})))
        for number in range(5):
            world.tell(m.Arrived(m.CallId(f"c{number}"), FunctionId("f")))

        commands = world.engine.handle(m.DeviceJoined(Device(DeviceId("a"), "gpu", 100)), 0.0)

        assert [each.grant.calls for each in commands if isinstance(each, m.StartCall)] == [("c0", "c1", "c2")], policy
