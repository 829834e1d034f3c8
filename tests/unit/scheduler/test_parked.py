"""Copies are parked instead of ended where their node can do that, and the next load there wakes them."""

import pytest
from tests.unit.scheduler.conformance import Rig
from tests.unit.scheduler.test_actions import Scripted, Site
from tests.unit.scheduler.world import explanation, state_of

from gpufaas_cache_manager.replacement import Lru, ReplacementOptions
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, FunctionId, Need, Part, Profile
from gpufaas_core.snapshot import DeviceSnapshot, ParkedSnapshot
from gpufaas_scheduler import contract as c
from gpufaas_scheduler.check import compare
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

A, B, D = FunctionId("a"), FunctionId("b"), DeviceId("n/d")
LOADS = Profile(3.0, 1.0, 60, loads={"host": 2.0})


class Parking(Site):
    """A device of 100 bytes on a node that parks, and functions of 60; those *missed* were loaded there in turn."""

    def __init__(self, *missed: FunctionId, parks: bool = True, asks: bool = True) -> None:
        self.policy = Scripted()
        replacement = Lru(ReplacementOptions(park=asks))
        self.engine = Engine(policy=self.policy, replacement=replacement, learn=True)
        self.now = 0.0
        self.tell(m.DeviceJoined(Device(D, "gpu", 100, parks=parks)))
        for name in (A, B, FunctionId("other")):
            self.deploy_with(name, LOADS)
        for name in missed:
            self.miss(name)

    def miss(self, function: FunctionId, load_s: float = 3.0, tier: str = "disk") -> m.Grant:
        """A call of *function* loads it on the device, and ends."""
        name = CallId(f"{function} {self.now}")
        self.now += 1.0
        self.call(name, function)
        self.do(c.Start((name,), None, (Part(D, 0),)))
        grant: m.Grant = next(each.grant for each in self.out if isinstance(each, m.StartCall))
        self.tell(m.Loaded(function, D, load_s, 10, grant.copy, tier))
        self.tell(m.Finished(name, D, 1.0))
        return grant

    def parked(self) -> list[tuple[str, int]]:
        (device,) = self.engine.status(self.now).devices
        return [(each.function, each.copy) for each in device.parked]

    def load_s(self, function: FunctionId) -> float:
        world = state_of(self.engine)
        return world.functions[function].load_on(world.devices[D])


def test_a_victim_is_parked_and_the_next_miss_wakes_it() -> None:
    site = Parking()
    assert site.miss(A).parked == ()
    grant = site.miss(B)
    assert (grant.victims, grant.parked) == (("a#0",), ("a#0",))
    site.tell(m.Parked(A, D, 0))
    assert site.parked() == [("a", 0)]

    grant = site.miss(A, 0.5, "parked")
    assert (grant.cold, grant.copy, grant.victims, grant.parked) == (True, 0, ("b#0",), ("b#0",))
    assert site.parked() == [("b", 0)]
    assert site.engine.status(site.now).devices[0].resident[0].tier == "parked"


def test_an_explanation_lists_what_was_parked_apart_from_what_was_evicted() -> None:
    site = Parking(A)
    assert site.miss(B).victims == ("a#0",)
    found = explanation(site.engine, "b 1.0", site.now)
    assert (found.victims, found.parked) == ((), ("a#0",))

    site = Parking(A, B, parks=False)
    found = explanation(site.engine, "b 1.0", site.now)
    assert (found.victims, found.parked) == (("a#0",), ())


def test_a_wake_is_expected_to_take_as_long_as_wakes_took() -> None:
    site = Parking(A)
    assert site.load_s(A) == 3.0
    site.miss(B)
    assert site.load_s(A) == 2.0, "as a load from host memory, until one was measured"
    site.miss(A, 0.5, "parked")
    site.miss(B)
    assert site.load_s(A) == 0.5
    assert state_of(site.engine).functions[A].load_s("gpu") == 0.5
    site.tell(m.Unparked(A, D, 0, "its process was killed"))
    assert site.load_s(A) == 3.0
    assert state_of(site.engine).functions[A].load_s("gpu") == 3.0


def test_what_wakes_no_sooner_than_it_loads_is_not_parked() -> None:
    site = Parking(A, B)
    site.miss(A, 4.0, "parked")
    assert site.miss(B).parked == ()


def test_a_copy_that_could_not_be_parked_is_loaded_anew() -> None:
    site = Parking(A, B)
    site.tell(m.Unparked(A, D, 0, "it has no room"))
    assert site.parked() == []
    assert site.miss(A).copy == 1


def test_a_copy_whose_worker_had_ended_when_it_was_evicted_is_not_parked() -> None:
    site = Parking(A, B)
    site.tell(m.WorkerExited(A, D, "it ended just before", 0))
    assert site.parked() == []
    assert site.miss(A).copy == 1


def test_nothing_is_parked_unless_node_and_policy_park() -> None:
    for site in (Parking(parks=False), Parking(asks=False)):
        site.miss(A)
        assert site.miss(B).parked == ()
        assert site.parked() == []


def test_a_late_word_about_a_copy_that_wakes_already_changes_nothing() -> None:
    site = Parking(A, B)
    site.call("x", A)
    site.do(c.Start((CallId("x"),), None, (Part(D, 0),)))

    assert site.tell(m.Parked(A, D, 0)) == []
    assert site.parked() == [("b", 0)]


@pytest.mark.parametrize("function", [A, FunctionId("large")])
def test_what_a_refused_grant_would_have_woken_or_ended_is_left_on_no_node(function: FunctionId) -> None:
    """The engine has no such copy any more; its node, which did not do what the grant said, has it parked."""
    site = Parking(A, B)
    site.tell(m.Parked(A, D, 0, 30))
    site.deploy_with(FunctionId("large"), Profile(3.0, 1.0, 90))
    site.call("x", function)
    site.do(c.Start((CallId("x"),), None, (Part(D, 0),)))
    (grant,) = (each.grant for each in site.out if isinstance(each, m.StartCall))

    out = site.tell(m.NodeRefused.of(grant, "it does not know the function"))

    assert {m.EvictCopy(A, D, 0), m.EvictCopy(B, D, 0, "host")} <= set(out)
    assert site.parked() == [("b", 0)]


def test_what_parked_copies_hold_of_the_device_is_given_to_a_copy_that_needs_it() -> None:
    site = Parking(A, B)
    assert site.tell(m.Parked(A, D, 0, 30)) == []
    assert state_of(site.engine).devices[D].residency.unpromised == 10
    site.deploy_with(FunctionId("large"), Profile(3.0, 1.0, 90))

    grant = site.miss(FunctionId("large"))
    assert (set(grant.victims), grant.parked) == ({"a#0", "b#0"}, ("b#0",))
    assert state_of(site.engine).devices[D].residency.unpromised == 10


def test_a_parked_copy_that_holds_more_than_is_free_ends() -> None:
    site = Parking(A, B)
    assert site.tell(m.Parked(A, D, 0, 50)) == [m.EvictCopy(A, D, 0)]
    assert site.parked() == []
    site.miss(A)
    assert site.miss(B).parked == (), "it is known now what it would hold"


def test_parked_copies_of_a_function_that_is_removed_end() -> None:
    site = Parking(A, B)
    assert site.tell(m.FunctionRemoved(A)) == [m.EvictCopy(A, D, 0)]


def test_a_parked_worker_that_the_engine_does_not_know_is_found_by_the_check_of_its_node() -> None:
    site = Parking(A, B)
    held = site.engine.holdings([D])[D]
    told = DeviceSnapshot(Device(D, "gpu", 100), parked=(ParkedSnapshot(A, "a", 0), ParkedSnapshot(A, "a", 7)))

    assert [(each.function, each.copy) for each in compare(held, told, held).extra] == [(A, 7)]


def test_a_policy_parks_a_copy_by_an_eviction_to_host() -> None:
    site = Parking(A)
    site.tell(m.DeviceJoined(Device(D, "gpu", 100, host_memory=100, parks=True)))
    site.miss(B)
    assert site.do(c.Evict("b#0", c.HOST)) == [m.EvictCopy(B, D, 0, "host")]
    assert site.parked() == [("b", 0)]


def test_a_node_that_comes_back_says_what_it_has_parked() -> None:
    site = Parking(A)
    device = Device(D, "gpu", 100, parks=True)
    told = (ParkedSnapshot(A, "a", 3, 5), ParkedSnapshot(B, "older", 1), ParkedSnapshot(FunctionId("gone"), "", 0))

    out = site.tell(m.DeviceJoined(device, DeviceSnapshot(device, parked=told)))

    assert [each for each in out if isinstance(each, m.EvictCopy)] == [
        m.EvictCopy(B, D, 1),
        m.EvictCopy(FunctionId("gone"), D, 0),
    ]
    assert site.parked() == [("a", 3)]
    assert site.miss(A).copy == 3
    assert site.miss(B).copy == 2, "numbers are not used again"


def test_a_parked_copy_draws_its_call_to_its_device() -> None:
    """Another device would be as good: it has more room even."""
    engine = Engine(policy=make_policy("least-wait"), replacement=make_policy("least-wait").replacement)
    for number in range(12):
        engine.handle(m.DeviceJoined(Device(DeviceId(f"n/{number}"), "gpu", 100, parks=True)), 0.0)
    engine.handle(m.FunctionDeployed(_function(A)), 0.0)
    engine.handle(m.Parked(A, DeviceId("n/0"), 5), 0.0)
    state_of(engine).devices[DeviceId("n/0")].starts = 50  # the last one that would be considered

    (start,) = engine.handle(m.Arrived(CallId("x"), A), 1.0)

    assert isinstance(start, m.StartCall)
    assert (start.grant.device, start.grant.copy) == ("n/0", 5)


def _function(name: FunctionId):  # type: ignore[no-untyped-def]
    return m.Function(name, name, profiles={"*": LOADS})


@pytest.mark.parametrize("spec", ["least-wait", "order=o3+placement=locality+replacement=cost-aware:park=true"])
def test_a_cluster_that_breaks_answers_all_calls_and_wakes_many(spec: str) -> None:
    """`Rig` checks after each event that no device is promised twice, what parked copies hold included."""
    woken = 0
    for seed in range(6):
        rig = Rig(spec, seed, functions=0, devices=2)
        for number in range(8):
            rig.deploy(f"f{number}", Need(), Profile(2.0, 0.5, 25 + 4 * number, loads={"host": 1.0, "parked": 0.2}))
        rig.work(150, per_s=2.0)
        rig.until_rest()
        assert set(rig.ended.values()) == {1}
        woken += rig.woken

    assert woken > 10
