"""The weights of calls that wait are staged while devices compute."""

import pytest

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, NodeId, Part, Profile
from gpufaas_scheduler import policies as c
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

PROFILE = Profile(4.0, 10.0, 60, measured=True, loads={"host": 1.0})
"""A load from the host tier saves 3 s."""


class Site:
    """Each device has room for one model; `busy` holds all of them."""

    def __init__(self, policy: str, devices: tuple[str, ...] = ("n1/a", "n1/b"), host: int = 1000) -> None:
        made = make_policy(policy)
        self.engine = Engine(policy=made, replacement=Lru(), learn=False)
        self.now = 0.0
        self.calls = 0
        for each in devices:
            self.tell(m.DeviceJoined(Device(DeviceId(each), "gpu", 100, host_memory=host)))
        self.deploy("busy")

    def tell(self, event: m.Event) -> list[m.Command]:
        return self.engine.handle(event, self.now)

    def deploy(self, name: str, profile: Profile = PROFILE) -> None:
        self.tell(m.FunctionDeployed(Function(FunctionId(name), name, profiles={"*": profile})))

    def call(self, function: str) -> list[m.Stage]:
        """A call arrives; return what is staged for it."""
        self.calls += 1
        return staged(self.tell(m.Arrived(CallId(f"c{self.calls}"), FunctionId(function))))


def staged(commands: list[m.Command]) -> list[m.Stage]:
    return [each for each in commands if isinstance(each, m.Stage)]


def stage(function: str, node: str = "n1") -> m.Stage:
    return m.Stage(FunctionId(function), NodeId(node))


def full(policy: str = "least-wait", functions: str = "", **options: object) -> Site:
    """All devices load and serve for 14 s from now on; each of *functions* is deployed."""
    site = Site(policy, **options)  # type: ignore[arg-type]
    for each in range(len(site.engine.status(0.0).devices)):
        site.deploy(f"busy{each}")
        assert site.call(f"busy{each}") == []
    for name in functions:
        site.deploy(name)
    return site


def test_a_call_that_no_device_holds_the_model_for_has_its_weights_staged() -> None:
    site = full(functions="f")

    assert site.call("f") == [stage("f")]
    assert site.call("f") == [], "once is enough"
    assert staged(site.tell(m.Staged(NodeId("n1"), FunctionId("f"), 50))) == []
    assert site.call("f") == []


@pytest.mark.parametrize(("policy", "options", "profile"), [
    ("least-wait", {"host": 0}, PROFILE),
    ("least-wait+prefetch=none", {}, PROFILE),
    ("lb", {}, PROFILE),
    ("lalb", {}, PROFILE),
    ("lalb-o3", {}, PROFILE),
    ("least-wait", {}, Profile(4.0, 10.0, 60, measured=True)),
    ("least-wait", {}, Profile(20.0, 10.0, 60, measured=True, loads={"host": 1.0})),
], ids=["no host tier", "off", "lb", "lalb", "lalb-o3", "no gain known", "a device is free sooner"])  # fmt: skip
def test_nothing_is_staged(policy: str, options: dict[str, object], profile: Profile) -> None:
    site = full(policy, **options)
    site.deploy("f", profile)

    assert site.call("f") == []


def test_other_policies_can_have_it() -> None:
    site = full("lalb-o3+prefetch=next-misses", "f")

    assert site.call("f") == [stage("f")]


def test_they_are_staged_on_the_node_whose_device_is_free_first() -> None:
    site = full(functions="f", devices=("n2/b", "n1/a"))
    site.now = 3.0
    (busy,) = (each.resident[0].function for each in site.engine.status(3.0).devices if each.device.id == "n1/a")
    site.tell(m.Loaded(busy, DeviceId("n1/a"), 3.0, 10))
    site.now = 6.0  # the call on n1/a has 7 s left, the one on n2/b 8

    assert site.call("f") == [stage("f", "n1")]


def test_a_call_that_starts_gives_time_to_stage_for_another_one() -> None:
    site = Site("lalb-o3+prefetch=next-misses", devices=("n1/a",))
    for name in "fg":
        site.deploy(name)
    assert [site.call(name) for name in "fgf"] == [[], [stage("g")], []]
    site.tell(m.Unstaged(NodeId("n1"), FunctionId("g"), "others are worth more"))
    site.now = 4.0
    assert site.tell(m.Loaded(FunctionId("f"), DeviceId("n1/a"), 4.0, 10)) == []
    site.now = 14.0

    start, second = site.tell(m.Finished(CallId("c1"), DeviceId("n1/a"), 10.0))
    assert isinstance(start, m.StartCall)
    assert (start.grant.cold, second) == (False, stage("g"))


def test_it_tries_again_when_a_node_can_bring_more() -> None:
    site = full(functions="fgh")

    assert [site.call(name) for name in "fgh"] == [[stage("f")], [stage("g")], []]
    assert staged(site.tell(m.Staged(NodeId("n1"), FunctionId("f"), 50))) == [stage("h")]


def test_a_node_that_has_no_room_is_not_asked_at_each_event() -> None:
    site = full(functions="f")
    assert site.call("f") == [stage("f")]
    site.tell(m.Unstaged(NodeId("n1"), FunctionId("f"), "others are worth more"))

    assert [site.call("f") for _ in range(5)] == [[]] * 5


def loads(commands: list[m.Command]) -> list[m.LoadCopy]:
    return [each for each in commands if isinstance(each, m.LoadCopy)]


def roomy(**options: object) -> Site:
    """As `full`, on devices with room for a second small model, of `f`, whose weights are staged on n1."""
    site = full(**options)  # type: ignore[arg-type]
    site.now = 4.0
    for number, each in enumerate(site.engine.status(0.0).devices):
        site.tell(m.Loaded(FunctionId(f"busy{number}"), each.device.id, 4.0, 10))
    site.deploy("f", Profile(4.0, 10.0, 40, measured=True, loads={"host": 1.0}))
    site.tell(m.Staged(NodeId("n1"), FunctionId("f"), 40))
    return site


def test_what_is_staged_is_loaded_beside_the_calls_of_the_device_that_is_free_first() -> None:
    site = roomy()

    (load,) = loads(site.tell(m.Arrived(CallId("x"), FunctionId("f"))))
    assert (load.function, load.device, load.victims, load.beside) == ("f", "n1/a", (), True)
    assert not loads(site.tell(m.Arrived(CallId("y"), FunctionId("f")))), "there is a copy now"
    device = next(each for each in site.engine.status(4.0).devices if each.device.id == "n1/a")
    assert (device.used, device.reserved) == (100, 100)

    site.now = 5.0
    assert site.tell(m.Loaded(FunctionId("f"), DeviceId("n1/a"), 1.0, 10, load.copy, "host")) == []
    site.now = 14.0
    (start,) = site.tell(m.Finished(CallId("c1"), DeviceId("n1/a"), 10.0))
    assert isinstance(start, m.StartCall)
    assert (start.grant.calls, start.grant.cold, start.grant.copy) == (("x",), False, load.copy)


def test_a_copy_is_loaded_on_a_node_that_has_the_weights() -> None:
    site = roomy(devices=("n2/a", "n1/b"))

    (load,) = loads(site.tell(m.Arrived(CallId("x"), FunctionId("f"))))
    assert load.device == "n1/b"


@pytest.mark.parametrize("kind", ["gpu", "cpu", "cpu-0.6"])
def test_loads_take_no_cores_from_the_calls_of_cpu_devices(kind: str) -> None:
    site = Site("least-wait", devices=())
    site.tell(m.DeviceJoined(Device(DeviceId("n1/a"), kind, 100, host_memory=100)))
    site.deploy("f", Profile(4.0, 10.0, 40, measured=True, loads={"host": 1.0}))
    site.call("busy")
    site.tell(m.Loaded(FunctionId("busy"), DeviceId("n1/a"), 4.0, 10))
    site.tell(m.Staged(NodeId("n1"), FunctionId("f"), 40))

    assert len(loads(site.tell(m.Arrived(CallId("x"), FunctionId("f"))))) == (kind == "gpu")


def test_nothing_gives_way_to_a_load_beside_calls() -> None:
    site = roomy()
    site.deploy("large", Profile(4.0, 10.0, 41, measured=True, loads={"host": 1.0}))
    site.tell(m.Staged(NodeId("n1"), FunctionId("large"), 41))

    assert not loads(site.tell(m.Arrived(CallId("x"), FunctionId("large"))))


class Proposed:
    """A prefetch that proposes what the test says."""

    def __init__(self, *actions: c.Action) -> None:
        self.actions = actions
        self.refusals: list[c.Refusal | None] = []

    def plan(self, view: c.View, devices: object) -> c.Plan:  # noqa: ARG002
        for each in self.actions:
            self.refusals.append((yield each))


def test_a_prefetch_does_nothing_else() -> None:
    site = full("lalb-o3")
    wrong = Proposed(c.Load(FunctionId("f"), (Part(DeviceId("n1/a"), 0),)), c.Evict("busy0#0"))
    site.engine._world.prefetch = wrong
    site.deploy("f")

    assert site.call("f") == []
    assert [each and each.reason for each in wrong.refusals] == [
        "a prefetch loads into host tiers, and beside what devices compute"
    ] * 2


def beside(function: str, *devices: str) -> c.Load:
    return c.Load(FunctionId(function), tuple(Part(DeviceId(each), 0) for each in devices), beside=True)


def test_what_cannot_be_loaded_beside_calls_is_refused() -> None:
    site = roomy(policy="lalb-o3")
    for name, size in (("g", 20), ("h", 20), ("large", 41)):
        site.deploy(name, Profile(4.0, 10.0, size, measured=True))
    proposed = Proposed(
        beside("g", "n1/a"), beside("h", "n1/a"), beside("h", "n9/z"), beside("h"), beside("large", "n1/b"),
        beside("busy0", "n1/a"),
    )  # fmt: skip
    site.engine._world.prefetch = proposed
    site.call("f")
    reasons = [each and each.reason for each in proposed.refusals]

    assert reasons[:4] == [
        None, "device n1/a is busy with a load", "there is no device n9/z", "a copy has one part, not 0"
    ]  # fmt: skip
    assert "large" in str(reasons[4])
    assert reasons[5] == "device n1/a holds busy0 already"
