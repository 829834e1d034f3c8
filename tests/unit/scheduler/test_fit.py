"""Whether a copy fits, and which victims leave: one check for policies and for the engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduler.world import world_of

from gpufaas_cache_manager.eviction import evictable
from gpufaas_cache_manager.replacement import CostAware, Lru, Replacement
from gpufaas_cache_manager.residency import Copy
from gpufaas_core.model import CopyId, Device, DeviceId, Function, FunctionId, NodeId, Profile
from gpufaas_core.units import MiB
from gpufaas_scheduler.contract import Start
from gpufaas_scheduler.fit import Fit, Reason, fits, in_the_way
from gpufaas_scheduler.world.changes import Changes
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.hosts import Host

LRU = Lru()


def function(name: str, size: int = 10, min_copies: int = 0) -> FunctionState:
    profiles = {"gpu": Profile(1.0, 1.0, size * MiB)}
    return FunctionState(Function(FunctionId(name), "", profiles=profiles, min_copies=min_copies), Changes())


def device(memory: int, *held: FunctionState, kind: str = "gpu") -> DeviceState:
    """A device that holds idle copies, the least recently used first."""
    state = DeviceState(Device(DeviceId("d0"), kind, memory * MiB), 0, Changes(), Host(NodeId("")))
    for owner in held:
        need = owner.need(state)
        assert not isinstance(need, Reason)
        model = Copy(owner, need, 0.0, 0.0)
        model.loading = False
        state.residency.insert(model)
        owner.add(model, state)
    return state


def ask(
    state: DeviceState, owner: FunctionState, leaving: Replacement | tuple[str, ...] = LRU
) -> tuple[str, ...] | str:
    """Who leaves, or why it does not fit."""
    need = owner.need(state)
    names = tuple(CopyId(each) for each in leaving) if isinstance(leaving, tuple) else leaving
    found = need if isinstance(need, Reason) else fits(state.residency, need, owner, names)
    if isinstance(found, Fit):
        return tuple(each.id for each in found.victims)
    return found.say(owner.id, state.id, state.kind)


def test_who_leaves_is_found_in_the_replacement_order_or_is_given() -> None:
    x, y, new = function("x"), function("y"), function("new", 15)
    state = device(25, x, y)

    assert ask(state, new) == ("x#0",)
    assert ask(state, new, ("y#0",)) == ("y#0",)
    assert ask(state, new, ("y#0", "x#0", "y#0")) == ("y#0", "x#0"), "all that are named leave, each once"
    assert ask(device(25, x), new, ()) == ()


def test_copies_within_their_minimum_are_in_the_way_also_once_all_calls_have_ended() -> None:
    x, y = function("x", min_copies=1), function("y")
    state = device(30, x, y)
    elsewhere = device(30, x)

    def kept(need: int, state: DeviceState, *leaving: Copy[FunctionState]) -> list[str]:
        return [each.id for each in in_the_way(state.residency, need * MiB, lambda each: each in leaving)]

    assert kept(20, state) == [], "x has a second copy elsewhere: either may leave"
    x.drop(next(iter(elsewhere.residency)))
    assert kept(20, state) == [], "y leaves"
    assert kept(21, state) == ["x#0"]
    assert kept(21, state, next(iter(state.residency))) == [], "x drains"
    for each in state.residency:
        each.running = 1
    assert kept(20, state) == [], "calls end"


def test_a_reason_says_what_is_the_case() -> None:
    kept, pinned, idle = function("kept", min_copies=1), function("pinned"), function("idle")
    state = device(40, kept, pinned, idle)
    state.residency.copies["pinned#0"].running = 1
    new = function("new", 25)

    assert ask(state, function("huge", 50)) == "huge needs 50 MiB, device d0 has 40 MiB"
    assert ask(state, new) == "new needs 25 MiB, device d0 has 10 MiB free, and what could be evicted is too little"
    assert ask(state, new, ("nobody",)) == "nobody cannot be evicted: d0 does not hold it"
    for name in ("kept#0", "pinned#0"):
        said = f"{name} cannot be evicted from d0: it is pinned, or within its minimum of copies"
        assert ask(state, new, (name,)) == said
    assert ask(state, new, ("idle#0",)) == "new needs 25 MiB, device d0 has 20 MiB free once 1 are evicted"
    assert ask(state, new, ()) == "new needs 25 MiB, device d0 has 10 MiB free once 0 are evicted"
    assert ask(device(40, kind="tpu"), new) == "new has no profile for devices of kind tpu"


def test_a_policy_that_names_no_victims_gets_none() -> None:
    """An empty tuple is not None: the engine does not choose in the policy's place."""

    class Names:
        name = "names"

        def plan(self, view):  # type: ignore[no-untyped-def]
            for each in list(view.idle()):
                yield Start((view.queue.first().id,), None, each.part, ())

    world = world_of("x", "d0", policy=Names(), memory=10, size=10)
    world.deploy("y", size=10)
    world.call("a", "x")
    world.now += 5
    world.finish("a")

    world.call("b", "y")

    assert "b" not in world.running
    assert world.engine.refusals[-1].reason.endswith("free once 0 are evicted")


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1), st.booleans()), max_size=6),
    st.integers(1, 120),
    st.sampled_from([Lru(), CostAware()]),
)
def test_what_fits_in_the_replacement_order_fits_with_the_same_victims_named(
    held: list[tuple[int, int, bool]], need: int, order: Replacement
) -> None:
    """Whatever the view says that fits, the commit of an action takes; what does not, it refuses."""
    owners = [function(f"f{number}", size, least) for number, (size, least, _) in enumerate(held)]
    state = device(100 if sum(size for size, _, _ in held) <= 100 else 180, *owners)
    for model, (_, _, pinned) in zip(list(state.residency), held, strict=True):
        model.queued = pinned
    new = function("new", need)

    found = ask(state, new, order)

    everyone = tuple(each.id for each in state.residency if evictable(each))
    if isinstance(found, tuple):
        assert ask(state, new, found) == found
        assert isinstance(ask(state, new, everyone), tuple)
    else:
        assert isinstance(ask(state, new, everyone), str)


@pytest.mark.parametrize(("others", "may"), [(0, True), (1, True), (2, False)])
def test_copies_leave_down_to_the_minimum(others: int, may: bool) -> None:
    owner = function("f", min_copies=1)
    for _ in range(3):
        device(10, owner)

    assert owner.copies == 3
    assert evictable(next(iter(owner.active)), others) is may
