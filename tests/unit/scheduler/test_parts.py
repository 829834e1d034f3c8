"""Copies with parts on several devices: one copy, charged and reserved on each of them. `World` checks every event."""

import random

import msgspec
import pytest
from tests.unit.scheduler.world import World

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Part, Profile
from gpufaas_core.snapshot import DeviceDoc, DeviceSnapshot, EngineDoc, FunctionDoc, ResidentSnapshot, RunningCall
from gpufaas_scheduler import policies as c
from gpufaas_scheduler.engine import Engine


class Told:
    """Proposes what the test tells it, once."""

    name = "told"
    watches = c.ARRIVAL | c.FINISH | c.LOADED | c.FLEET | c.WAKE | c.PLAN

    def __init__(self) -> None:
        self.script: list[c.Action] = []
        self.refused: list[str] = []

    def plan(self, _view: c.View) -> c.Plan:
        while self.script:
            refusal = yield self.script.pop(0)
            if refusal is not None:
                self.refused.append(refusal.reason)


class Site(World):
    """Devices a, b and c; functions `big`, `small` and `tiny`."""

    def __init__(self, *, loads_parts: str = "abc") -> None:
        """:param loads_parts: the devices of nodes that can load copies with several parts"""
        self.policy = Told()
        super().__init__(self.policy)
        for name in "abc":
            self.device(name, loads_parts=name in loads_parts)
        self.deploy("big", 90, load_s=10.0)
        self.deploy("small", 50)
        self.deploy("tiny", 10)

    def do(self, *actions: c.Action) -> list[m.Command]:
        self.policy.script = list(actions)
        self.policy.refused.clear()
        return self.tell(m.Woken())

    def done(self, *actions: c.Action) -> list[m.Command]:
        found = self.do(*actions)
        assert not self.policy.refused
        return found

    def why_not(self, action: c.Action) -> str:
        assert self.do(action) == []
        (reason,) = self.policy.refused
        return reason

    def start(self, name: str, function: str, *devices: str, memory: int = 60) -> None:
        """Start a call of a new copy."""
        self.call(name, function)
        parts = on(*devices, memory=memory) if len(devices) > 1 else on(devices[0], memory=0)
        self.done(c.Start((CallId(name),), parts=parts))

    def warm_big(self) -> None:
        self.start("warm", "big", "a", "b")
        self.finish("warm")

    def used(self) -> dict[str, tuple[int, bool]]:
        return {each.device.id: (each.used, each.busy) for each in self.status.devices}


def on(*devices: str, memory: int = 60) -> tuple[Part, ...]:
    return tuple(Part(DeviceId(each), memory) for each in devices)


BIG = FunctionId("big")


def test_a_start_holds_memory_and_compute_of_each_device_until_it_ends() -> None:
    site = Site()

    site.start("x", "big", "a", "b")

    assert site.running["x"].parts == on("a", "b")
    assert site.used() == {"a": (60, True), "b": (60, True), "c": (0, False)}
    assert site.copies == {"big": 1}
    site.finish("x")
    assert site.used() == {"a": (60, False), "b": (60, False), "c": (0, False)}

    site.call("y", "big")
    site.done(c.Start((CallId("y"),), "big#0"))
    assert (site.running["y"].device, site.running["y"].cold, site.running["y"].parts) == ("a", False, on("a", "b"))
    assert [busy for _, busy in site.used().values()] == [True, True, False]
    assert site.on("a").estimated_finish_s == site.on("b").estimated_finish_s == 1.0


def test_a_load_keeps_each_device_busy_until_it_is_over() -> None:
    site = Site()

    (load,) = site.done(c.Load(BIG, (Part(DeviceId("a"), 20), Part(DeviceId("b"), 60))))

    assert isinstance(load, m.LoadCopy)
    assert [each.device for each in load.parts] == ["a", "b"]
    assert site.on("b").estimated_finish_s == 7.5, "three quarters of it are loaded there"
    site.call("x", "tiny")
    assert "busy with a load" in site.why_not(c.Start((CallId("x"),), parts=on("b", memory=0)))
    site.loaded("big", "a")
    assert [busy for _, busy in site.used().values()] == [False, False, False]
    assert [each.loading for name in "ab" for each in site.on(name).resident] == [False, False]


def test_nothing_else_runs_over_on_a_further_device() -> None:
    site = Site()
    site.start("x", "big", "a", "b")
    site.call("y", "tiny")

    assert site.why_not(c.Start((CallId("y"),), parts=on("b", memory=0))) == "device b is busy with call x"
    site.finish("x")
    site.done(c.Start((CallId("y"),), parts=on("b", memory=0)))
    site.call("z", "big")
    assert site.why_not(c.Start((CallId("z"),), copy="big#0")) == "device b is busy with call y"
    site.finish("y")
    site.done(c.Start((CallId("z"),), copy="big#0"))


def test_pinned_parts_are_no_victims_and_idle_ones_leave_together() -> None:
    site = Site()
    site.start("x", "big", "a", "b", memory=90)
    site.call("y", "small")
    site.finish("x")
    site.done(c.Start((CallId("y"),), parts=on("b", memory=0)))

    assert site.running["y"].victims == ("big#0",)
    assert site.used() == {"a": (0, False), "b": (50, True), "c": (0, False)}
    assert site.copies == {"small": 1}


def test_victims_are_found_on_each_device() -> None:
    site = Site()
    site.start("x", "small", "a")
    site.finish("x")
    site.start("y", "tiny", "b")
    site.finish("y")
    site.call("z", "big")

    assert "what could be evicted is too little" not in site.why_not(
        c.Start((CallId("z"),), parts=on("a", "b", memory=95), victims=("small#0",))
    )
    site.done(c.Start((CallId("z"),), parts=on("a", "b", memory=95)))
    assert set(site.running["z"].victims) == {"small#0", "tiny#0"}


def test_an_eviction_frees_all_parts_and_names_the_first_device() -> None:
    site = Site()
    site.warm_big()

    assert site.done(c.Evict("big#0")) == [m.EvictCopy(BIG, DeviceId("a"), 0)]
    assert site.used() == {"a": (0, False), "b": (0, False), "c": (0, False)}


@pytest.mark.parametrize(("leaves", "stays"), [("a", "b"), ("b", "a")])
def test_a_device_that_leaves_takes_the_whole_copy(leaves: str, stays: str) -> None:
    site = Site()
    site.start("x", "big", "a", "b")

    out = site.tell(m.DeviceLeft(DeviceId(leaves), "gone"))

    assert out == [m.EvictCopy(BIG, DeviceId(stays), 0)]
    assert site.used() == {stays: (0, False), "c": (0, False)}
    assert not site.status.running
    site.start("y", "small", stays)


def test_a_drain_lets_the_call_end_and_then_evicts_the_copy() -> None:
    site = Site()
    site.start("x", "big", "a", "b")

    site.tell(m.DeviceDrained(DeviceId("b")))
    assert [busy for _, busy in site.used().values()] == [True, True, False]
    site.finish("x")

    assert m.EvictCopy(BIG, DeviceId("a"), 0) in site.out
    assert site.used() == {"a": (0, False), "b": (0, False), "c": (0, False)}


def test_a_worker_that_ends_takes_all_parts() -> None:
    site = Site()
    site.start("x", "big", "a", "b")
    site.finish("x")

    site.tell(m.WorkerExited(BIG, DeviceId("a"), "gone", 0))

    assert site.used() == {"a": (0, False), "b": (0, False), "c": (0, False)}


def test_a_copy_with_several_parts_is_refused_where_one_of_its_nodes_cannot_load_it() -> None:
    site = Site(loads_parts="ac")
    site.call("x", "big")
    why = "a copy on b has one part, not 2: its node cannot load several"

    assert site.why_not(c.Start((CallId("x"),), parts=on("a", "b"))) == why
    assert site.why_not(c.Load(BIG, on("a", "b"))) == why
    site.done(c.Start((CallId("x"),), parts=on("a", "c")))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Part(DeviceId("a"), 95), "a copy with one part has its profile's memory: do not say it for a"),
        (Part(DeviceId("a"), 0, 30), "big has no share of its own: its sharing is exclusive"),
    ],
)
def test_a_single_part_that_says_what_it_would_not_have_is_refused(part: Part, why: str) -> None:
    site = Site()
    site.call("x", "big")

    for action in (c.Start((CallId("x"),), parts=(part,)), c.Load(BIG, (part,)), c.Load(BIG, (part,), beside=True)):
        assert site.why_not(action) == why


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (on("a", "nowhere"), "there is no device nowhere"),
        (on("a", "a"), "one part on a device, not two on a"),
        (on("a", "b", memory=0), "one of several parts says its memory: that on a has 0"),
        (on("a", "b", memory=101), "big needs"),
        ((Part(DeviceId("a"), 9, 30), Part(DeviceId("b"), 9)), "all parts of a copy hold a share, or none does"),
        ((Part(DeviceId("a"), 9, 101), Part(DeviceId("b"), 9, 1)), "a share there cannot be 101 %"),
        ((Part(DeviceId("a"), 9, 30), Part(DeviceId("b"), 9, 30)), "big has no share of its own"),
    ],
)
def test_parts_that_cannot_be_are_refused_in_words(parts: tuple[Part, ...], why: str) -> None:
    site = Site()

    assert why in site.why_not(c.Load(BIG, parts))
    assert site.used() == {"a": (0, False), "b": (0, False), "c": (0, False)}


def test_calls_of_a_copy_with_parts_wait_in_no_local_queue() -> None:
    site = Site()
    site.start("x", "big", "a", "b")
    site.call("y", "big")

    assert "has several parts" in site.why_not(c.Assign(CallId("y"), "big#0"))


def test_parts_hold_shares_on_each_device_and_calls_run_within() -> None:
    policy = Told()
    engine = Engine(policy=policy, replacement=Lru(), learn=False)
    for name in "ab":
        engine.handle(m.DeviceJoined(Device(DeviceId(name), "gpu", 100, loads_parts=True)), 0.0)
    for name, need in (("auto", Need(100, "auto")), ("half", Need(50, "spatial"))):
        engine.handle(m.FunctionDeployed(Function(FunctionId(name), name, need, {"*": Profile(3.0, 1.0, 10)})), 0.0)
    engine.handle(m.Arrived(CallId("x"), FunctionId("auto")), 0.0)
    engine.handle(m.Arrived(CallId("y"), FunctionId("half")), 0.0)
    parts = (Part(DeviceId("a"), 10, 30), Part(DeviceId("b"), 10, 60))
    policy.script = [c.Start((CallId("x"),), parts=parts), c.Start((CallId("y"),), parts=on("b", memory=0))]

    (start,) = engine.handle(m.Woken(), 0.0)

    assert isinstance(start, m.StartCall)
    assert start.grant.parts == parts
    assert "half needs 50 % of the compute of b, which has 40 % spare" in policy.refused[0]
    policy.script = [c.Start((CallId("y"),), parts=on("a", memory=0))]
    (start,) = engine.handle(m.Woken(), 0.0)
    assert isinstance(start, m.StartCall)
    engine.handle(m.Finished(CallId("x"), DeviceId("a"), 1.0), 1.0)
    assert [each.busy for each in engine.status(1.0).devices] == [True, False]


@pytest.mark.parametrize("torn", [False, True])
def test_a_takeover_keeps_a_copy_whose_parts_are_all_there(torn: bool) -> None:
    site = Site()
    site.start("x", "big", "a", "b")
    site.loaded("big", "a")
    docs = {key: msgspec.json.decode(msgspec.json.encode(site.engine.doc(key, site.now)), type=kind) for key, kind in (
        ("engine", EngineDoc), ("functions/big", FunctionDoc), ("devices/a", DeviceDoc), ("devices/b", DeviceDoc),
    )}  # fmt: skip
    policy = Told()
    engine = Engine(policy=policy, replacement=Lru(), epoch=2, learn=False)
    engine.handle(m.FunctionDeployed(site.functions[BIG]), 0.0)
    kept = (docs["engine"], (docs["functions/big"],), (docs["devices/a"], docs["devices/b"]))
    engine.handle(m.Restored(*kept), 0.0)  # type: ignore[arg-type]
    there = (ResidentSnapshot(BIG, site.functions[BIG].digest, 60),)
    runs = (RunningCall(CallId("x"), BIG, begun=True),)
    for name, running, residents in (("b", (), () if torn else there), ("a", runs, there)):
        device = Device(DeviceId(name), "gpu", 100, loads_parts=True)
        engine.handle(m.DeviceJoined(device, DeviceSnapshot(device, residents, running)), 0.0)

    out = engine.handle(m.Serving(), 0.0)

    found = {each.device.id: (each.used, each.busy) for each in engine.status(0.0).devices}
    if torn:
        assert out == [m.EvictCopy(BIG, DeviceId("a"), 0)]
        assert found == {"a": (0, False), "b": (0, False)}
        return
    assert out == []
    assert found == {"a": (60, True), "b": (60, True)}
    engine.handle(m.Finished(CallId("x"), DeviceId("a"), 1.0), 1.0)
    assert [each.busy for each in engine.status(1.0).devices] == [False, False]
    policy.script = [c.Evict("big#0")]
    assert engine.handle(m.Woken(), 2.0) == [m.EvictCopy(BIG, DeviceId("a"), 0)]
    assert [each.used for each in engine.status(2.0).devices] == [0, 0]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_device_holds_or_runs_more_than_it_has(seed: int) -> None:
    rng, site, gone = random.Random(seed), Site(), list[DeviceId]()

    def parts() -> tuple[Part, ...]:
        names = rng.sample(devices, min(len(devices), rng.choice([1, 2, 2, 3])))
        return on(*names, memory=rng.choice([20, 50, 60]) if len(names) > 1 else 0)

    for step in range(400):
        site.now += 1.0
        devices = [each.device.id for each in site.status.devices]
        copies = [f"{each.function}#{each.copy}" for device in site.status.devices for each in device.resident]
        waiting, running, loading = list(site.waiting), list(site.running), site.loading()
        match rng.choices(range(9), (30, 16, 12, 5, 5, 14, 6, 4, 3))[0]:
            case 0:
                site.call(f"c{step}", rng.choice(["big", "small", "tiny"]))
            case 1 if waiting:
                site.do(c.Start((CallId(rng.choice(waiting)),), parts=parts()))
            case 2 if waiting and copies:
                site.do(c.Start((CallId(rng.choice(waiting)),), rng.choice(copies)))
            case 3:
                site.do(c.Load(FunctionId(rng.choice(["big", "small"])), parts()))
            case 4 if copies:
                site.do(c.Evict(rng.choice(copies)))
            case 5 if running:
                site.finish(rng.choice(running))
            case 6 if loading:
                function, device, copy = rng.choice(loading)
                site.loaded(function, device, copy)
            case 7:
                site.tell(m.DeviceDrained(DeviceId(rng.choice(devices)), rng.random() < 0.5))
            case 8 if len(devices) > 1:
                gone.append(device := rng.choice(devices))
                site.tell(m.DeviceLeft(device, "gone"))
            case _ if gone:
                site.device(gone.pop(), loads_parts=True)
    assert site.parts, "no copy had several parts"
