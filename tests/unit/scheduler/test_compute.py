"""The compute of devices: grants hold it while they run, copies hold shares, and several run beside each other."""

import pytest
from tests.unit.scheduler.world import explanation

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_core.snapshot import DeviceDoc, DeviceSnapshot, ResidentSnapshot, RunningCall
from gpufaas_scheduler.contract import Start
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

A = DeviceId("a")


class Together:
    """A policy that starts all that waits for a function at once, on the first device that it is offered."""

    name = "together"

    def plan(self, view):  # type: ignore[no-untyped-def]
        for device in list(view.idle()):
            first = view.queue.first()
            calls = tuple(each.id for each in first.owner.flow)
            copy = device.copies.get(first.function)
            self.refusal = yield Start(calls, copy, () if copy else device.part)
            return


class Again:
    """A policy that starts the oldest call on the copy of its function, however many calls run there."""

    name = "again"

    def plan(self, view):  # type: ignore[no-untyped-def]
        if (first := view.queue.first()) is not None:
            held = [device.copies[first.function] for device in view.holders(first)]
            yield Start((first.id,), *held) if held else Start((first.id,), None, next(view.idle()).part)


def an_engine(*functions: tuple[str, Need], policy: object = None) -> Engine:
    made = make_policy("lalb-o3") if policy is None else policy
    engine = Engine(policy=made, replacement=Lru(), learn=False)  # type: ignore[arg-type]
    for name, need in functions:
        profiles = {"*": Profile(3.0, 1.0, 10)}
        engine.handle(m.FunctionDeployed(Function(FunctionId(name), "d", need, profiles)), 0.0)
    engine.handle(m.DeviceJoined(Device(A, "gpu", 100)), 0.0)
    return engine


def arrive(engine: Engine, call: str, function: str, now: float = 0.0) -> list[m.Command]:
    return engine.handle(m.Arrived(CallId(call), FunctionId(function)), now)


def finish(engine: Engine, call: str, now: float) -> list[m.Command]:
    return engine.handle(m.Finished(CallId(call), A, 1.0), now)


def started(commands: list[m.Command]) -> list[CallId]:
    return [call for each in commands if isinstance(each, m.StartCall) for call in each.grant.calls]


HALF = Need(50, "spatial")


def test_two_functions_that_need_half_a_device_run_beside_each_other_and_a_third_one_waits() -> None:
    engine = an_engine(("f", HALF), ("g", HALF), ("h", HALF))

    assert started(arrive(engine, "1", "f")) == ["1"]
    assert started(arrive(engine, "2", "g")) == ["2"]
    assert arrive(engine, "3", "h") == []
    assert started(finish(engine, "1", 4.0)) == ["3"]


def test_an_exclusive_call_waits_until_nothing_runs_beside_it() -> None:
    engine = an_engine(("f", HALF), ("g", HALF), ("large", Need(100)))
    arrive(engine, "1", "f")
    arrive(engine, "2", "g")

    assert arrive(engine, "3", "large") == []
    assert finish(engine, "1", 4.0) == []
    assert started(finish(engine, "2", 4.0)) == ["3"]


def test_all_that_fits_starts_when_a_device_becomes_free() -> None:
    engine = an_engine(("f", HALF), ("g", HALF), ("large", Need(100)))
    arrive(engine, "1", "large")
    arrive(engine, "2", "f")
    arrive(engine, "3", "g")

    assert started(finish(engine, "1", 4.0)) == ["2", "3"]


def test_a_device_where_calls_could_join_others_is_first_again_once_it_is_idle() -> None:
    engine = an_engine(("joined", Need(slots=2)), ("large", Need(100)), policy=make_policy("lb"))
    arrive(engine, "1", "joined")
    engine.handle(m.Loaded(FunctionId("joined"), A, 3.0, 10), 3.0)
    engine.handle(m.DeviceJoined(Device(DeviceId("b"), "gpu", 100)), 3.0)
    finish(engine, "1", 4.0)

    (start,) = arrive(engine, "2", "large", 4.0)

    assert isinstance(start, m.StartCall)
    assert start.grant.device == A, "it has started more calls than b"


def test_calls_join_those_on_a_copy_that_takes_calls_again() -> None:
    engine = an_engine(("joined", Need(slots=2)), policy=make_policy("lb"))
    arrive(engine, "1", "joined")
    engine.handle(m.Loaded(FunctionId("joined"), A, 3.0, 10), 3.0)
    engine.handle(m.Scaled(FunctionId("joined"), 1), 3.0)
    engine.handle(m.Scaled(FunctionId("joined"), 0), 3.0)
    assert engine.status(3.0).devices[0].resident[0].draining

    assert started(arrive(engine, "2", "joined", 3.0)) == ["2"]


def half_busy_with_a_local_queue() -> Engine:
    """On a, a call of f holds half of the compute, and one of large waits in the local queue. b is idle and small."""
    engine = an_engine(("f", HALF), ("g", HALF), ("large", Need(100)), policy=make_policy("lalb"))
    for name in ("g", "large", "f"):
        arrive(engine, f"first of {name}", name)
        engine.handle(m.Loaded(FunctionId(name), A, 3.0, 10), 0.0)
        finish(engine, f"first of {name}", 0.0)
    engine.handle(m.DeviceJoined(Device(DeviceId("b"), "gpu", 50)), 0.0)
    assert started(arrive(engine, "1", "f")) == ["1"]
    assert arrive(engine, "2", "large") == []
    assert engine.status(0.0).devices[0].local_queue == 1
    return engine


def test_what_a_device_has_spare_is_for_its_local_queue() -> None:
    engine = half_busy_with_a_local_queue()

    assert arrive(engine, "3", "g") == [], "it would delay the call that waits for the whole device"
    assert started(finish(engine, "1", 1.0)) == ["2"]
    assert started(finish(engine, "2", 2.0)) == ["3"]


def test_the_spare_compute_is_for_all_once_nobody_waits_in_the_local_queue() -> None:
    engine = half_busy_with_a_local_queue()

    engine.handle(m.CallerLeft(CallId("2")), 0.5)

    assert started(arrive(engine, "3", "g", 0.5)) == ["3"]


def test_a_local_queue_goes_back_if_a_copy_that_stays_holds_its_compute() -> None:
    engine = half_busy_with_a_local_queue()
    kept = Function(FunctionId("kept"), "d", Need(30, "share"), {"*": Profile(3.0, 1.0, 60)}, min_copies=1)
    (load,) = engine.handle(m.FunctionDeployed(kept), 0.5)
    assert isinstance(load, m.LoadCopy)
    assert load.device == A

    (start,) = finish(engine, "1", 1.0)

    assert isinstance(start, m.StartCall)
    assert (start.grant.calls, start.grant.device) == (("2",), "b")


def test_copies_hold_their_shares_and_idle_ones_give_way_to_an_exclusive_call() -> None:
    share = Need(40, "share", slots=4)
    engine = an_engine(("f", share), ("g", share), ("h", share), ("large", Need(100)))
    assert started(arrive(engine, "1", "f")) == ["1"]
    assert started(arrive(engine, "2", "g")) == ["2"]
    assert arrive(engine, "3", "h") == [], "120 % are more than a device has"
    for name, copy in (("f", 0), ("g", 0)):
        engine.handle(m.Loaded(FunctionId(name), A, 3.0, 10, copy), 3.0)

    (start,) = finish(engine, "1", 4.0)
    assert isinstance(start, m.StartCall)
    assert (start.grant.calls, start.grant.victims, start.grant.parts[0].share) == (("3",), ("f#0",), 40)
    finish(engine, "2", 4.0)
    assert arrive(engine, "4", "large", 4.0) == [], "h runs"
    engine.handle(m.Loaded(FunctionId("h"), A, 3.0, 10, 0), 7.0)
    (start,) = finish(engine, "3", 8.0)
    assert isinstance(start, m.StartCall)
    assert start.grant.victims == ("g#0", "h#0")


def test_a_batch_ends_call_by_call_and_its_compute_is_free_with_the_last() -> None:
    policy = Together()
    engine = an_engine(("f", Need(100, batch_max=2)), ("g", Need(100)), policy=policy)
    arrive(engine, "0", "g")
    arrive(engine, "1", "f")
    arrive(engine, "2", "f")

    (start,) = finish(engine, "0", 4.0)
    assert isinstance(start, m.StartCall)
    assert start.grant.calls == ("1", "2")
    assert finish(engine, "1", 8.0) == []
    assert arrive(engine, "3", "g", 8.0) == []
    assert engine.status(8.0).running == {"f": 1}
    assert started(finish(engine, "2", 8.0)) == ["3"]


def test_a_batch_has_as_many_calls_as_its_function_takes() -> None:
    policy = Together()
    engine = an_engine(("f", Need(100, batch_max=2)), ("g", Need(100)), policy=policy)
    arrive(engine, "0", "g")
    for name in "123":
        arrive(engine, name, "f")

    assert finish(engine, "0", 4.0) == []
    assert engine.refusals[-1].reason == "3 calls of f cannot start together: at most 2 may"


@pytest.mark.parametrize("sharing", ["spatial", "share"])
def test_compute_that_no_device_has_is_refused_in_words(sharing: str) -> None:
    engine = an_engine(("f", Need(60, sharing)))
    engine.handle(m.DeviceLeft(A, "gone"), 0.0)
    engine.handle(m.DeviceJoined(Device(A, "gpu", 100, compute=50)), 0.0)

    (refused,) = arrive(engine, "1", "f")

    assert isinstance(refused, m.RejectCall)
    assert refused.code == "no_device"
    assert refused.message == "function f needs 60 % of the compute of a device, and the most that a device has is 50 %"


def test_a_device_that_comes_back_keeps_what_runs_there_beside_each_other() -> None:
    engine = an_engine(("f", HALF), ("g", HALF), ("h", HALF))
    arrive(engine, "1", "f")
    arrive(engine, "2", "g")
    held = tuple(ResidentSnapshot(FunctionId(each), "d", 10) for each in "fg")
    runs = tuple(RunningCall(CallId(call), FunctionId(each), begun=True) for call, each in (("1", "f"), ("2", "g")))

    engine.handle(m.DeviceJoined(Device(A, "gpu", 100), DeviceSnapshot(Device(A, "gpu", 100), held, runs)), 4.0)

    assert arrive(engine, "3", "h", 4.0) == []
    assert started(finish(engine, "2", 5.0)) == ["3"]
    doc = engine.doc("devices/a", 5.0)
    assert isinstance(doc, DeviceDoc)
    assert [(each.call, each.compute) for each in doc.running] == [("1", 50), ("3", 50)]


def test_a_call_that_kept_shares_leave_too_little_compute_for_is_refused_in_words() -> None:
    engine = an_engine(("large", Need(100)), ("f", Need(30, "share")))
    assert started(arrive(engine, "1", "large")) == ["1"]
    finish(engine, "1", 4.0)
    kept = Function(FunctionId("kept"), "d", Need(60, "share"), {"*": Profile(3.0, 1.0, 10)}, min_copies=1)
    engine.handle(m.FunctionDeployed(kept), 5.0)

    [refused] = [each for each in arrive(engine, "2", "large", 9.0) if isinstance(each, m.RejectCall)]

    assert refused.code == "no_room"
    assert "it needs 100 % of the compute of a (60 % of 100 % are held)" in refused.message
    assert "those of kept. Lower their minimum" in refused.message
    assert engine.status(9.0).kept_out == {"large": refused.message}, "known without a call"
    assert started(arrive(engine, "3", "f", 9.0)) == ["3"], "there is compute for a smaller share"


def nested(engine: Engine, call: str, function: str, outer: str, now: float) -> list[m.Command]:
    return engine.handle(m.Arrived(CallId(call), FunctionId(function), outer=m.Outer(A, FunctionId(outer), 0)), now)


def refusals(commands: list[m.Command]) -> list[m.RejectCall]:
    return [each for each in commands if isinstance(each, m.RejectCall)]


@pytest.mark.parametrize("policy", ["lb", "lalb-o3", "least-wait"])
def test_a_nested_call_waits_for_compute_that_a_neighbour_of_its_caller_holds(policy: str) -> None:
    engine = an_engine(("f", HALF), ("g", HALF), ("h", HALF), policy=make_policy(policy))
    arrive(engine, "outer", "f")
    arrive(engine, "beside", "g")

    assert refusals(nested(engine, "inner", "h", "f", 1.0)) == []
    assert started(finish(engine, "beside", 4.0)) == ["inner"]


@pytest.mark.parametrize("inner", [Need(100), Need(60, "spatial"), Need(60, "share")])
def test_a_nested_call_that_its_caller_leaves_too_little_compute_for_is_refused(inner: Need) -> None:
    engine = an_engine(("f", HALF), ("g", inner))
    arrive(engine, "outer", "f")

    [refused] = refusals(nested(engine, "inner", "g", "f", 1.0))

    assert "device a is held by call outer of f" in refused.message


def test_a_spatial_function_that_calls_itself_is_refused_where_its_only_slot_is_taken() -> None:
    engine = an_engine(("f", HALF))
    arrive(engine, "outer", "f")

    assert len(refusals(nested(engine, "inner", "f", "f", 1.0))) == 1


def test_a_start_that_is_refused_for_lack_of_slots_evicts_no_share() -> None:
    engine = an_engine(("f", HALF), ("s", Need(30, "share")), policy=Again())
    arrive(engine, "1", "f")
    arrive(engine, "2", "s")
    finish(engine, "2", 1.0)

    commands = arrive(engine, "3", "f", 2.0)

    assert commands == []
    assert engine.refusals[-1].reason == "all 1 slots of copy f#0 are taken"
    assert [each.function for each in engine.status(2.0).devices[0].resident] == ["f", "s"]


def test_it_is_said_why_copies_are_missing_and_calls_that_start_without_a_policy_wait() -> None:
    engine = an_engine(("half", HALF))
    arrive(engine, "1", "half")
    kept = Function(FunctionId("f"), "d", Need(30, "share"), {"*": Profile(3.0, 1.0, 10)}, min_copies=2)
    engine.handle(m.FunctionDeployed(kept), 0.0)
    assert engine.status(0.0).lacking == {}, "the first copy loads"
    engine.handle(m.Loaded(FunctionId("f"), A, 3.0, 10, 0), 3.0)

    why = "f needs 30 % of the compute of a, which has 20 % spare"
    reason = engine.status(3.0).lacking["f"]
    assert reason == why

    assert started(arrive(engine, "2", "f", 3.0)) == ["2"]
    assert arrive(engine, "3", "f", 3.0) == []
    explained = explanation(engine, "3", 4.0)
    assert (explained.state, explained.waited_s) == ("waiting", 1.0)
    assert explained.rule == "it starts without the policy, once a copy has a free slot"
    explained = explanation(engine, "2", 4.0)
    assert (explained.state, explained.hit, explained.device, explained.at) == ("running", True, A, 3.0)
    assert explained.rule == "it started without the policy, on the copy with the fewest calls"
    engine.handle(m.Finished(CallId("2"), A, 1.0, True), 4.0)
    assert explanation(engine, "2", 4.0).state == "ended"
    explained = explanation(engine, "3", 4.0)
    assert (explained.waited_s, explained.rule[-35:]) == (1.0, "the first copy that had a free slot")

    engine.handle(m.FunctionDeployed(Function(FunctionId("g"), "d", Need(60, "share"), kept.profiles)), 4.0)
    assert arrive(engine, "4", "g", 4.0) == []
    explained = explanation(engine, "4", 4.0)
    assert "no device has room: g needs 60 % of the compute of a, which has 20 % spare" in explained.rule
