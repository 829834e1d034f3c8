"""The states of a call: a step that the table does not allow changes nothing."""

import pytest
from tests.unit.scheduler.world import state_of, world_of

from gpufaas_cache_manager.residency import Copy
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, NodeId
from gpufaas_core.snapshot import DeviceSnapshot, ResidentSnapshot, RunningCall
from gpufaas_core.steps import IllegalStep
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.handle.grants import end, start
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import (
    ADOPT,
    END,
    ENDED,
    ENQUEUE,
    LEAVE,
    LOCAL,
    NEW,
    RETURN,
    RUNNING,
    START,
    WAIT,
    WAITING,
)
from gpufaas_scheduler.world.calls import CallBook
from gpufaas_scheduler.world.changes import Changes
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.hosts import Host

STEPS = {
    "WAIT": (WAIT, {NEW: WAITING, ENDED: WAITING}),
    "ENQUEUE": (ENQUEUE, {WAITING: LOCAL}),
    "RETURN": (RETURN, {LOCAL: WAITING}),
    "START": (START, {WAITING: RUNNING, LOCAL: RUNNING}),
    "ADOPT": (ADOPT, {NEW: RUNNING, ENDED: RUNNING}),
    "END": (END, {RUNNING: ENDED}),
    "LEAVE": (LEAVE, {WAITING: ENDED, LOCAL: ENDED}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_leads_from_the_states_that_the_table_names_and_from_no_other(name: str) -> None:
    step, legal = STEPS[name]

    for state in (WAITING, LOCAL, RUNNING, ENDED, NEW):
        if state in legal:
            assert step[state] == legal[state]
        else:
            with pytest.raises(IllegalStep, match=r"a call that .+ cannot .+"):
                step[state]
    assert step == legal, "looking up what is not there adds nothing"


def test_an_illegal_step_in_the_book_changes_nothing() -> None:
    book, owner = CallBook(), FunctionState(Function(FunctionId("f"), ""), Changes())
    call = Call(CallId("c"), owner.id, owner, 0, 0.0, None)

    for step in (book.leave, book.back):
        with pytest.raises(IllegalStep):
            step(call)
    assert (list(book), book.waiting, owner.waiting, call.state) == ([], 0, 0, NEW)

    book.wait(call)
    for step in (book.wait, book.back):
        with pytest.raises(IllegalStep):
            step(call)
    with pytest.raises(IllegalStep):
        book.adopt(
            call,
            DeviceState(Device(DeviceId("a"), "gpu", 1), 0, Changes(), Host(NodeId(""))),
            Copy(owner, 1, 0.0, 0.0),
            twin=False,
        )
    assert (list(book), book.waiting, owner.waiting, owner.running, call.state) == ([call], 1, 1, 0, WAITING)


def test_a_call_that_runs_is_not_started_and_one_that_is_over_does_not_end() -> None:
    engine = with_a_call_on_a()
    world = state_of(engine)
    call = world.calls.by_id[CallId("c")]
    device, model = call.device, call.copy
    assert device is not None
    assert model is not None
    before, grant = engine.status(0.0), world.grant

    with pytest.raises(IllegalStep, match="a call that runs cannot start"):
        start(world, call, device, model, ())
    assert (engine.status(0.0), world.grant) == (before, grant)

    end(world, call)
    before = engine.status(0.0)
    with pytest.raises(IllegalStep, match="a call that is over cannot end"):
        end(world, call)
    assert engine.status(0.0) == before


def test_a_call_that_runs_twice_is_known_by_its_id_and_by_where_it_is_to_stop() -> None:
    """The node that came back is told to stop it, and says so under the id that the call has everywhere."""
    engine = with_a_call_on_a()
    b = Device(DeviceId("b"), "gpu", 100)
    resident = ResidentSnapshot(FunctionId("f"), "digest of f", 10, 1)
    joined = m.DeviceJoined(b, DeviceSnapshot(b, (resident,), (RunningCall(CallId("c"), FunctionId("f"), 1),)))

    assert engine.handle(joined, 1.0) == [m.Abort(CallId("c"), b.id)]

    assert engine.calls() == ["c"]
    assert [each.calls for each in engine.holdings([DeviceId("a"), b.id]).values()] == [{"c"}, {"c"}]
    engine.handle(m.Finished(CallId("c"), b.id, 0.0, ok=False), 2.0)
    assert [each.calls for each in engine.holdings([DeviceId("a"), b.id]).values()] == [{"c"}, set()]


def with_a_call_on_a() -> Engine:
    world = world_of("f")
    world.call("c", "f")
    return world.engine
