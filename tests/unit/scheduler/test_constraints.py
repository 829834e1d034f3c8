"""Functions run only on devices that satisfy their constraints; other devices have no effect on them."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.examples import examples
from tests.unit.scheduler import test_invariants as invariants
from tests.unit.scheduler.world import World

from gpufaas_core import messages as m
from gpufaas_core.constraints import Constraint, parse_constraint, satisfied
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Part, Profile
from gpufaas_scheduler.policies import Plan, Start, View

POLICIES = ["lb", "lalb", "lalb-o3"]


class Labelled(World):  # type: ignore[misc, valid-type]
    """
    Devices have the label zone, by the last letter of their name, and some functions have constraints, by their name.

    After every event: nothing is resident where it may not be.
    """

    def __init__(self, *args: object, constraints: dict[str, str], **options: object) -> None:
        super().__init__(*args, **options)
        self.constraints = {name: (parse_constraint(text),) for name, text in constraints.items() if text}
        self.zones: dict[str, str] = {}

    def device(self, name: str, memory: int = 100, kind: str = "gpu") -> None:
        zone = self.zones.get(name, name[-1])
        self.tell(m.DeviceJoined(Device(DeviceId(name), kind, memory, {"zone": zone})))

    def deploy(  # type: ignore[no-untyped-def]
        self, name: str, size: int = 10, load_s: float = 3.0, service_s: float = 1.0, *, slots=None, min_copies=0,
        max_queue=1000, max_copies=0, kind="*",
    ) -> None:  # fmt: skip
        self.tell(
            m.FunctionDeployed(
                Function(
                    FunctionId(name), f"digest of {name}", Need(100 if slots is None else 0, slots=slots or 1),
                    {kind: Profile(load_s, service_s, size)}, min_copies, max_queue, max_copies, self.asked(name),
                )
            )
        )  # fmt: skip

    def asked(self, name: str) -> tuple[Constraint, ...]:
        return self.constraints.get(name, ())

    def tell(self, event: m.Event) -> list[m.Command]:
        out: list[m.Command] = super().tell(event)
        for device in self.status.devices:
            for model in device.resident:
                assert satisfied(self.asked(model.function), device.device.labels), (
                    f"{model.function} is on {device.device.id}"
                )
        return out


def a_world(policy: str = "lalb-o3", devices: str = "ab", **constraints: str) -> Labelled:
    world = Labelled(policy, constraints=constraints)
    for name in devices:
        world.device(name)
    for name in ("f", "g"):
        world.deploy(name)
    return world


# --- by example -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_passes_over_an_idle_device_that_its_function_may_not_use(policy: str) -> None:
    world = a_world(policy, f="zone=b")

    world.call("c1", "f")

    assert world.started == [("c1", "b")]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_waits_for_its_device_though_another_is_idle_and_others_go_ahead_there(policy: str) -> None:
    world = a_world(policy, f="zone=b", g="zone!=b")
    world.calls("c1 c2", "f")

    world.call("c3", "g")
    assert world.started == [("c3", "a")]

    world.finish("c1")
    assert world.started == [("c2", "b")]


def test_an_idle_device_that_it_may_not_use_sends_no_call_into_a_local_queue() -> None:
    """Waiting for the holder is weighed against loading here; where it cannot load there is nothing to weigh."""
    world = Labelled(constraints={"f": "zone=b"})
    world.device("a", memory=5)
    world.device("b")
    world.deploy("f")
    world.deploy("large", size=50)
    world.warm("f", "b")
    world.call("c1", "f")
    world.call("keeps the idle device looked at", "large")

    world.call("c2", "f")

    assert world.on("b").local_queue == 0
    assert world.engine.queue_length == 2


def test_a_device_that_no_waiting_call_may_use_counts_no_passes() -> None:
    """Else a GPU's queue would lose its order of hits to scans for a CPU device that has nothing to do."""
    world = a_world(devices="ab", f="zone=b", g="zone=b")
    world.warm("f", "b")
    world.call("run", "f")
    world.call("miss", "g")
    for number in range(40):  # over the limit of passes, had each of these scans been one
        world.call(f"other{number}", "g")

    world.call("hit", "f")
    world.finish("run")

    assert world.started == [("hit", "b")]


def test_a_cpu_function_is_loaded_where_it_may_be_and_waits_for_room_there() -> None:
    world = Labelled(constraints={"s": "zone=b"})
    world.device("a")
    world.device("b", memory=15)
    world.deploy("s", 10, slots=1)
    world.deploy("large", 12, slots=1)
    world.call("c1", "large")
    world.call("c2", "s")
    world.finish("c1")

    assert [grant.device for grant in world.running.values()] == ["b"]
    assert world.models("a") == ["large"]


def test_copies_without_calls_are_made_only_where_they_may_be() -> None:
    world = Labelled(constraints={"f": "zone=b"}).set_up("f", "a", min_copies=2)
    assert world.models("a") == []

    world.device("b")

    assert world.models("b") == ["f"]


def test_a_call_that_may_run_nowhere_is_told_what_was_asked() -> None:
    world = a_world(f="zone=c")

    world.call("c1", "f")

    assert world.rejected == [("c1", "no_device")]
    assert "none satisfies its constraints zone=c" in world.message


def test_a_function_too_large_for_the_devices_that_it_may_use_is_told_their_sizes() -> None:
    world = Labelled(constraints={"f": "zone=b"})
    world.device("a", memory=1 << 30)
    world.device("b", memory=1 << 20)
    world.deploy("f", size=2 << 20)

    world.call("c1", "f")

    assert world.rejected == [("c1", "no_device")]
    assert "fits no device that it may run on" in world.message
    assert "the largest device is b with 1 MiB" in world.message


def test_a_load_that_ran_out_of_memory_is_widened_to_the_largest_device_that_it_may_use() -> None:
    world = Labelled(constraints={"f": "zone=b"}, learn=True)
    world.device("a", memory=100)
    world.device("b", memory=15)
    world.deploy("f", size=10)
    world.call("c1", "f")

    world.tell(m.CopyFailed(FunctionId("f"), DeviceId("b"), "no memory", out_of_memory=True))
    world.call("c2", "f")

    assert world.started == [("c2", "b")]
    assert world.model("f", "b").memory == 15


def test_a_policy_that_proposes_a_device_that_is_not_allowed_is_refused() -> None:
    class Stubborn:
        name = "stubborn"

        def plan(self, _view: View) -> Plan:
            yield Start((CallId("c1"),), parts=(Part(DeviceId("a"), 0),))

    world = Labelled(Stubborn(), constraints={"f": "zone=b"}).set_up("f", "a b")

    world.call("c1", "f")

    assert world.started == []
    assert world.engine.refusals[-1].reason == "device a does not satisfy the constraints of f"


def test_who_waits_is_placed_when_a_device_joins_that_it_may_use() -> None:
    world = Labelled(constraints={"f": "zone=a"})
    world.deploy("f")
    world.call("c1", "f")

    world.device("b")
    world.device("a")

    assert world.started == [("c1", "a")]


# --- whatever happens -------------------------------------------------------------------------------------------------

CONSTRAINTS = st.sampled_from(["", "", "zone=0", "zone=1", "zone!=0", "zone!=2"])


@examples(200)
@given(
    st.sampled_from([*POLICIES, "hostile"]), st.lists(CONSTRAINTS, min_size=8, max_size=8), st.booleans(),
    st.integers(0, 2**32), st.lists(st.integers(0, 2**16), min_size=20, max_size=120),
)  # fmt: skip
@example("lb", ["zone=0", "", "zone=0", "", "", "", "", ""], False, 14, [*[0] * 15, 204, 882, 34955, 1241, 537])
def test_nothing_runs_where_it_may_not_and_no_call_is_lost(
    policy: str, constraints: list[str], learn: bool, seed: int, events: list[int]
) -> None:
    rng = random.Random(seed)
    world = Labelled(
        invariants.Hostile(rng) if policy == "hostile" else policy, limit=3, learn=learn, max_queue=30,
        constraints={f"f{number}": text for number, text in enumerate(constraints)},
    )  # fmt: skip
    for number in range(3):
        world.device(f"d{number}", rng.randint(20, 60) << 20)
    for number in range(8):
        world.deploy(
            f"f{number}", rng.randint(4, 30) << 20, slots=rng.choice([None, None, 1, 3]),
            min_copies=rng.choice([0, 0, 1, 2]), max_queue=12,
        )  # fmt: skip
    for number, choice in enumerate(events):
        world.now += rng.choice([0.0, 0.25, 1.0])
        invariants.step(world, choice, number, rng)
        wake_at = world.engine.wake_at
        if wake_at is not None and wake_at <= world.now:
            world.tell(m.Woken())

    if policy != "hostile":
        for name in ("large0", "large1", "large2"):
            world.device(name, 10_000 << 20)
        invariants.beside(world, invariants.LARGEST)
        invariants.drain(world)
        invariants.rest(world)


def decisions(world: Labelled) -> list[m.Command]:
    """What was commanded, without the words of refusals: those say how many devices there are."""
    return [replace(each, message="") if isinstance(each, m.RejectCall) else each for each in world.out]


@examples(200)
@given(
    st.sampled_from(["lb", "lalb", "lalb-o3"]),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 2**16), min_size=20, max_size=100),
)
def test_devices_that_no_function_may_use_change_no_decision(policy: str, seed: int, events: list[int]) -> None:
    """Of the published policies: least-wait weighs by how busy the whole cluster is."""
    names = [f"f{number}" for number in range(8)]
    alone = Labelled(policy, limit=3, constraints={})
    beside = Labelled(policy, limit=3, constraints=dict.fromkeys(names, "zone!=x"))
    rng = random.Random(seed)
    sizes = {name: (rng.randint(4, 30) << 20, rng.choice([None, None, 1, 3])) for name in names}
    memory = [rng.randint(20, 60) << 20 for _ in range(3)]
    for number in range(3):
        beside.device(f"{number}x", 60 << 20)
        for world in (alone, beside):
            world.device(f"d{number}", memory[number])
    for world in (alone, beside):
        for name, (size, slots) in sizes.items():
            world.deploy(name, size, slots=slots)
    for number, choice in enumerate(events):
        pause = rng.choice([0.0, 0.25, 1.0])
        running = sorted(alone.running)
        for world in (alone, beside):
            world.now += pause
            if choice % 3 < 2 or not running:
                world.call(f"c{number}", names[choice // 3 % 8])
            else:
                world.finish(running[choice // 3 % len(running)])
        assert decisions(alone) == decisions(beside)
