"""A call that smaller ones keep waiting has a device cleared for it, and nothing else waits for long."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from tests.unit.scheduler.test_takeover import left
from tests.unit.scheduler.world import explanation

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.constraints import parse_constraint
from gpufaas_core.explanation import Explanation
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_core.snapshot import DeviceSnapshot, ResidentSnapshot, RunningCall
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import POLICIES, make_policy
from gpufaas_scheduler.world.clearing import PAUSE_S, WAIT_S

HALF = Need(50, "spatial")
SHARE = Need(30, "share", slots=2)
LATE = WAIT_S + 1.0
NEEDS = {
    "half": HALF, "other": HALF, "third": HALF, "fourth": HALF, "share": SHARE, "second": SHARE,
    "small": Need(20, "spatial"), "tiny": Need(20, "spatial"), "whole": Need(), "timed": Need(100, "time"),
}  # fmt: skip


@dataclass
class Site:
    """An engine, the time, and which calls run where."""

    engine: Engine
    now: float = 0.0
    running: dict[str, m.Grant] = field(default_factory=dict)
    log: list[m.Command] = field(default_factory=list)

    def tell(self, event: m.Event) -> list[m.Command]:
        commands = self.engine.handle(event, self.now)
        self.log += commands
        for each in commands:
            if isinstance(each, m.StartCall):
                self.running.update(dict.fromkeys(each.grant.calls, each.grant))
        for each in commands:
            if isinstance(each, m.StartCall) and each.grant.cold:
                self.tell(m.Loaded(each.grant.function, each.grant.device, 3.0, 10, each.grant.copy))
        return commands

    def device(self, name: str, labels: dict[str, str] | None = None, memory: int = 100) -> None:
        self.tell(m.DeviceJoined(Device(DeviceId(name), "gpu", memory, labels or {})))

    def deploy(self, name: str, need: Need, **more: object) -> None:
        function = Function(FunctionId(name), "d", need, {"*": Profile(3.0, 1.0, 10)}, **more)  # type: ignore[arg-type]
        self.tell(m.FunctionDeployed(function))

    def call(self, name: str, function: str, **more: object) -> bool:
        """Return whether it starts."""
        self.tell(m.Arrived(CallId(name), FunctionId(function), **more))  # type: ignore[arg-type]
        return name in self.running

    def inner(self, name: str, function: str, outer: str) -> bool:
        grant = self.running[outer]
        return self.call(name, function, outer=m.Outer(grant.device, grant.function, grant.copy, outer))

    def finish(self, *calls: str) -> None:
        for call in calls:
            self.tell(m.Finished(CallId(call), self.running.pop(call).device, 1.0))

    def leave(self, call: str) -> None:
        self.tell(m.CallerLeft(CallId(call)))

    def evicted(self) -> list[str]:
        found = [each.function for each in self.log if isinstance(each, m.EvictCopy)]
        self.log.clear()
        return found

    def late(self) -> None:
        """So much time passes that what waits has waited too long, and something happens then."""
        self.now += LATE
        self.tell(m.Woken())

    def explain(self, call: str) -> Explanation:
        return explanation(self.engine, call, self.now)


@pytest.fixture(params=POLICIES)
def make(request: pytest.FixtureRequest) -> Callable[..., Site]:
    def made(*devices: str) -> Site:
        site = Site(Engine(policy=make_policy(request.param), replacement=Lru(), learn=False))
        for name, need in NEEDS.items():
            site.deploy(name, need)
        for each in devices:
            site.device(each)
        return site

    return made


def take_turns(site: Site) -> None:
    """Two halves run, and a call waits for the whole device that they share."""
    site.call("a", "half")
    site.call("b", "other")
    assert not site.call("large", "whole")


def test_the_device_takes_no_smaller_calls_until_the_large_one_has_run(make: Callable[..., Site]) -> None:
    site = make("d")
    take_turns(site)
    site.finish("a")
    assert site.call("c", "half"), "the call has not waited for long"

    site.late()
    site.finish("b")
    assert not site.call("d", "other")
    site.finish("c")

    assert "large" in site.running
    assert "kept it waiting" in site.explain("large").rule
    site.finish("large")
    assert "d" in site.running


def test_a_call_that_waits_for_its_turn_among_equals_has_no_device_cleared(make: Callable[..., Site]) -> None:
    site = make("d")
    site.call("a", "whole")
    site.call("b", "whole")
    assert not site.call("large", "timed")
    site.late()

    site.leave("b")
    site.leave("large")
    site.finish("a")

    assert site.call("c", "half")
    assert site.call("d", "other")


def test_where_two_devices_are_shared_one_is_cleared_and_the_other_goes_on(make: Callable[..., Site]) -> None:
    site = make("d", "e")
    for name, function in (("a", "half"), ("b", "other"), ("c", "third"), ("d", "fourth")):
        site.call(name, function)
    assert sorted(each.device for each in site.running.values()) == ["d", "d", "e", "e"]
    assert not site.call("large", "whole")
    assert not site.call("larger", "timed")
    site.late()

    on = {name: [call for call, each in site.running.items() if each.device == name] for name in ("d", "e")}
    for call in (on["d"][0], on["e"][0]):
        site.finish(call)
    for number, function in enumerate(("half", "other", "third", "fourth")):
        site.call(f"next-{number}", function)
    kept = [name for name in on if sum(each.device == name for each in site.running.values()) == 2]

    assert len(kept) == 1
    (cleared,) = {"d", "e"} - set(kept)
    site.finish(on[cleared][1])
    assert site.running["large"].device == cleared


def test_the_device_with_the_copy_is_cleared_if_a_load_elsewhere_takes_longer(make: Callable[..., Site]) -> None:
    site = make("d")
    site.call("first", "whole")
    site.finish("first")
    site.call("a", "half")
    site.call("b", "other")
    site.device("e")
    site.call("c", "third")
    site.call("d", "third")
    site.call("e", "small")
    assert not site.call("large", "whole")
    site.late()

    site.finish("a", "b")

    assert (site.running["large"].device, site.running["large"].cold) == ("d", False)


def test_idle_shares_go_and_others_end_their_calls_and_take_no_more(make: Callable[..., Site]) -> None:
    site = make("d")
    for name in ("a1", "a2"):
        site.call(name, "share")
    site.call("b", "second")
    assert not site.call("a3", "share"), "both slots are taken"
    assert not site.call("large", "whole")
    site.late()

    site.finish("b")
    assert site.evicted() == ["second"]
    assert not site.call("b2", "second")
    site.finish("a1")
    assert "a3" not in site.running
    site.finish("a2")

    assert "large" in site.running
    site.finish("large")
    assert {"a3", "b2"} <= site.running.keys()


def test_a_share_goes_on_another_device_meanwhile(make: Callable[..., Site]) -> None:
    site = make("d")
    site.call("a1", "share")
    assert not site.call("large", "whole")
    site.now += LATE
    site.call("a2", "share")
    assert not site.call("a3", "share")

    site.device("e")

    assert site.running["a3"].device == "e"
    site.finish("a1", "a2")
    assert site.running["large"].device == "d"


def test_a_copy_within_its_minimum_keeps_its_share_and_its_device_is_not_cleared_in_vain(
    make: Callable[..., Site],
) -> None:
    site = make("d")
    take_turns(site)
    site.deploy("kept", SHARE, min_copies=1)
    site.finish("a")
    site.tell(m.Loaded(FunctionId("kept"), DeviceId("d"), 3.0, 10, 0))
    site.late()

    assert site.call("c", "small")
    assert site.call("k", "kept")
    site.deploy("kept", SHARE)
    site.now += PAUSE_S
    site.tell(m.Woken())
    assert not site.call("d", "tiny")


def test_what_a_call_without_a_deadline_holds_is_not_waited_for(make: Callable[..., Site]) -> None:
    """A WebSocket may stay for days."""
    site = make("d")
    site.call("socket", "half", endless=True)
    site.call("a", "small")
    assert not site.call("large", "whole")
    site.late()

    assert site.call("b", "tiny")


def test_the_calls_of_calls_that_run_there_start_all_the_same(make: Callable[..., Site]) -> None:
    site = make("d")
    site.call("a", "half")
    site.call("b", "small")
    assert not site.call("large", "whole")
    site.late()
    assert not site.call("c", "tiny")

    assert site.inner("a1", "share", "a")
    assert "c" not in site.running

    site.finish(*list(site.running))
    assert "large" in site.running


def test_the_calls_of_calls_wait_for_others_there_to_end_and_go_first(make: Callable[..., Site]) -> None:
    site = make("d")
    take_turns(site)
    site.late()
    assert not site.inner("a1", "third", "a")
    assert not site.call("c", "small")

    site.finish("b")
    assert "a1" in site.running
    assert "c" not in site.running
    site.finish("a1", "a")

    assert "large" in site.running


def test_a_call_of_a_call_that_is_kept_waiting_elsewhere_has_a_device_cleared_first(make: Callable[..., Site]) -> None:
    """Otherwise the device of its caller could not become free."""
    site = make("d")
    site.call("a", "half")
    site.device("e", labels={"large": "yes"})
    for name, function in (("b", "other"), ("c", "third"), ("d", "fourth")):
        site.call(name, function)
    assert site.running["a"].device == "d"
    site.deploy("only", Need(), constraints=(parse_constraint("large == yes"),))
    assert not site.call("large", "whole")
    site.late()
    (cleared,) = [each.id for each in site.engine._world.devices.values() if each.shut]
    assert not site.inner("a1", "only", "a")

    site.late()
    on = [call for call, each in site.running.items() if each.device == "e"]
    site.finish(*on)
    if "a1" not in site.running:
        assert cleared == "e"
        site.finish("large")

    assert "a1" in site.running


def test_the_calls_of_calls_start_on_a_share_that_was_to_go(make: Callable[..., Site]) -> None:
    site = make("d")
    site.call("a", "half")
    site.call("s", "share")
    assert not site.call("large", "whole")
    site.late()
    assert not site.call("s2", "share")

    assert site.inner("s3", "share", "a") or "s2" in site.running
    site.finish("s", *(each for each in ("s2",) if each in site.running))

    assert "s3" in site.running
    for call in list(site.running):
        site.finish(call)
    assert "large" in site.running


def test_the_clearing_ends_when_no_function_is_left_that_takes_a_part_of_a_device(make: Callable[..., Site]) -> None:
    site = make("d")
    take_turns(site)
    site.late()
    for name, need in NEEDS.items():
        if need.compute < 100:
            site.tell(m.FunctionRemoved(FunctionId(name)))

    site.finish("b", "a")

    assert "large" in site.running
    site.finish("large")
    assert site.call("next", "timed")


def test_a_call_of_a_call_that_loses_its_last_place_to_the_clearing_is_refused(make: Callable[..., Site]) -> None:
    """It waited for a slot of the share that has to go, on which its own caller runs: neither would ever end."""
    site = make("d")
    site.deploy("large share", Need(40, "share", slots=2))
    site.call("a", "large share")
    site.call("b", "large share")
    site.tell(m.Scaled(FunctionId("large share"), 2))
    (load,) = [each for each in site.log if isinstance(each, m.LoadCopy)]
    site.tell(m.Loaded(load.function, load.device, 3.0, 10, load.copy))
    site.call("c", "large share")
    site.call("x", "large share")
    assert site.running["c"].copy == site.running["x"].copy == load.copy
    assert not site.inner("a1", "half", "a")
    site.now += 10.0
    assert not site.inner("b1", "half", "b")
    assert not site.inner("c1", "large share", "c")
    site.now += LATE - 10.0
    site.tell(m.Woken())

    assert [each.call for each in site.log if isinstance(each, m.RejectCall)] == ["c1"]
    site.finish("x", "c")

    assert "a1" in site.running


@pytest.mark.parametrize("goes", ["call", "device", "drained"])
def test_when_the_call_or_the_device_goes_the_others_start_at_once(make: Callable[..., Site], goes: str) -> None:
    site = make("d", "e")
    for name, function in (("a", "half"), ("b", "other"), ("c", "third"), ("d", "fourth")):
        site.call(name, function)
    assert not site.call("large", "whole")
    site.late()
    (cleared,) = [each.id for each in site.engine._world.devices.values() if each.shut]
    gone = [call for call, each in site.running.items() if each.device == cleared]
    site.finish(gone[0])
    assert not site.call("small", "small")

    if goes == "call":
        site.leave("large")
        assert site.running["small"].device == cleared
    elif goes == "device":
        site.tell(m.DeviceLeft(DeviceId(cleared), "gone"))
        site.device(cleared)
        assert {"large", "small"} & site.running.keys()
    else:
        site.tell(m.DeviceDrained(DeviceId(cleared)))
        site.tell(m.DeviceDrained(DeviceId(cleared), drain=False))
        assert site.running["small"].device == cleared


def test_a_node_that_comes_back_is_cleared_again(make: Callable[..., Site]) -> None:
    site = make("d")
    take_turns(site)
    site.late()
    snapshot = DeviceSnapshot(
        Device(DeviceId("d"), "gpu", 100),
        tuple(ResidentSnapshot(each.function, "d", 10, each.copy) for each in site.running.values()),
        tuple(
            RunningCall(CallId(call), each.function, each.copy, 1.0, True, False) for call, each in site.running.items()
        ),
    )

    site.tell(m.DeviceJoined(snapshot.device, snapshot))
    site.now += PAUSE_S
    site.tell(m.Woken())
    site.finish("a")
    assert not site.call("c", "half")
    site.finish("b")

    assert "large" in site.running


def test_a_successor_goes_on_clearing(make: Callable[..., Site]) -> None:
    site = make("d")
    take_turns(site)
    site.late()
    site.finish("a")
    store: dict[str, bytes] = {}
    for key in site.engine.take_changed():
        store[key] = msgspec.json.encode(site.engine.doc(key, site.now))

    engine = Engine(policy=site.engine.policy, replacement=Lru(), epoch=2, learn=False)
    after = Site(engine, site.now, dict(site.running))
    for name, need in NEEDS.items():
        after.deploy(name, need)
    after.tell(left(store, site.now, queued=True))
    residents = site.engine.status(site.now).devices[0].resident
    snapshot = DeviceSnapshot(
        Device(DeviceId("d"), "gpu", 100),
        tuple(ResidentSnapshot(each.function, "d", each.memory, each.copy) for each in residents),
        (RunningCall(CallId("b"), FunctionId("other"), site.running["b"].copy, 1.0, True, True),),
    )
    after.tell(m.DeviceJoined(snapshot.device, snapshot))
    assert after.tell(m.Serving()) == []

    assert not after.call("c", "half")
    after.finish("b")
    assert "large" in after.running
