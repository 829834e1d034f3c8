"""Invariants that hold for any events in any order, and any policy. `World.tell` checks after each event."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_scheduler.policies import POLICIES, Assign, Load, Plan, Start, View, Wake


class Hostile:
    """Proposes anything: calls that do not wait, devices that do not exist or are full, everything twice."""

    name = "hostile"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def plan(self, view: View) -> Plan:
        for _ in range(self.rng.randrange(40)):
            call = CallId(f"c{self.rng.randrange(60)}")
            device = DeviceId(f"d{self.rng.randrange(5)}")
            parts = (Part(device, 0),) * self.rng.choice([0, 1, 1, 1, 1, 1, 2])
            copy = f"{device}/f{self.rng.randrange(9)}"
            kind = self.rng.randrange(8)
            names = [FunctionId(f"f{self.rng.randrange(9)}") for _ in range(self.rng.randrange(3))]
            if kind == 6:
                function = FunctionId(f"f{self.rng.randrange(9)}")
                yield Load(function, parts, victims=self.rng.choice([None, tuple(names)]))
            elif kind == 7:
                yield Start((call,), None, parts, tuple(names))
            elif kind < 3:
                action = Start((call,), self.rng.choice([copy, None]), parts)
                yield action
                if kind == 0:
                    assert (yield action) is not None, "done twice"
            elif kind == 3:
                yield Assign(call, copy)
            elif kind == 4:
                yield Wake(view.now + self.rng.randrange(-5, 100))
            elif (first := view.queue.first()) is not None:
                view.queue.set_aside(first)
                if self.rng.random() < 0.5:
                    view.queue.rewind()
        if self.rng.random() < 0.3:
            yield "nonsense"  # type: ignore[misc]


TRIED = st.sampled_from([*POLICIES, "hostile"])
LARGEST = 60 << 20
"""What a function may be measured as, with its headroom."""
EVENTS = st.lists(st.integers(0, 2**16), min_size=20, max_size=120)


# A call loads the copy that had to wait after a failed load: then nothing is missing any more.
@example("lb", "lru", False, 0, [0] * 8 + [8] * 6 + [262, 13, 673, 0, 1135, 12738])
# A silent copy is heard again after others were loaded up to the most that its function may have.
@example("lb", "lru", False, 675, [0, 0, 0, 1491, 3698, *[0] * 10, 13, 497, 13, 221, 7773])
@examples(300)
@given(TRIED, st.sampled_from(["lru", "cost-aware"]), st.booleans(), st.integers(0, 2**32), EVENTS)
def test_no_call_is_lost_and_no_memory_is_promised_twice(
    policy: str, replacement: str, learn: bool, seed: int, events: list[int]
) -> None:
    rng = random.Random(seed)
    world = World(
        Hostile(rng) if policy == "hostile" else policy, limit=3, learn=learn, max_queue=30, replacement=replacement
    )
    for number in range(rng.randint(1, 4)):
        world.device(f"d{number}", rng.randint(20, 60) << 20, rng.choice(["cpu", "gpu"]))
    functions = [f"f{i}" for i in range(8)]
    least = rng.choice([[0], [0, 0, 0, 1, 2, 4]])
    for function in functions:
        slots = rng.choice([None, None, 1, 3])
        size = rng.randint(2, 30) << 20
        declares = rng.random() < 0.3
        world.deploy(
            function, size, slots=slots, min_copies=rng.choice(least), max_queue=12,
            max_copies=rng.choice([0, 0, 4]), floor=size if declares else 0,
            elastic=not declares and rng.random() < 0.7,
        )  # fmt: skip
    for number, choice in enumerate(events):
        world.now += rng.choice([0.0, 0.25, 1.0])
        step(world, choice, number, rng)
        wake_at = world.engine.wake_at
        assert wake_at is None or world.waiting or lacks(world)
        if wake_at is not None and wake_at <= world.now:
            world.tell(m.Woken())

    if policy != "hostile":
        beside(world, LARGEST)
        drain(world)
        assert world.ended == world.arrived
        rest(world)


@examples(200)
@given(st.sampled_from(list(POLICIES)), st.booleans(), st.integers(0, 2**32), EVENTS)
def test_no_call_is_lost_by_scaling_and_updates(policy: str, model: bool, seed: int, events: list[int]) -> None:
    """
    Nothing breaks here and no caller leaves, so each call is served by a revision that was deployed when it came; or it
    is told at once that a minimum of copies leaves no room for it.
    """
    rng = random.Random(seed)
    world = World(policy, limit=3)
    for number in range(rng.randint(1, 3)):
        world.device(f"d{number}", rng.choice([10, 15, 40]))
    world.deploy("other", 10, slots=1)
    slots = None if model else rng.choice([1, 3])
    revision = newest = 0
    world.deploy("f@0", 10, slots=slots)
    calls = {}
    for number, choice in enumerate(events):
        world.now += rng.choice([0.0, 0.25, 1.0])
        kind, pick = choice % 10, choice // 10
        running = sorted(world.running)
        if kind < 5:
            calls[f"c{number}"] = "other" if pick % 5 == 0 else f"f@{revision}"
            world.call(f"c{number}", calls[f"c{number}"])
        elif kind < 7 and running:
            world.finish(running[pick % len(running)])
        elif kind < 9:
            world.scale(f"f@{revision}", pick % 7)
        elif kind == 9:
            if revision == newest:
                newest += 1
                waits = f"f@{revision}" if pick % 8 < 4 else ""
                world.deploy(f"f@{newest}", 10, slots=slots, min_copies=pick % 4, succeeds=waits)
                if waits:
                    continue
            failed = pick % 5 == 0  # no call was placed at it yet
            world.tell(m.FunctionRemoved(FunctionId(f"f@{newest if failed else revision}"), drain=not failed))
            revision, newest = (revision, revision) if failed else (newest, newest)

    if revision != newest:
        world.tell(m.FunctionRemoved(FunctionId(f"f@{revision}"), drain=True))
        revision = newest
    beside(world, 10)
    drain(world)
    world.device("room", 1000)
    rest(world)
    refused = [each for each in world.log if isinstance(each, m.RejectCall | m.Abort)]
    assert all(isinstance(each, m.RejectCall) and each.code == "no_room" for each in refused)
    calls = {call: function for call, function in calls.items() if call not in {each.call for each in refused}}
    served = {each.grant.call: each.grant.function for each in world.log if isinstance(each, m.StartCall)}
    assert served == calls
    assert set(world.copies) <= {"other", f"f@{revision}"}, "an old revision was left behind"
    if not model:  # there is room for every copy that was asked for
        last = FunctionId(f"f@{revision}")
        asked = max(world.functions[last].min_copies, world.status.desired.get(last, 0))
        assert world.copies.get(last, 0) >= asked


@examples(200)
@given(st.sampled_from(list(POLICIES)), st.sampled_from(["lru", "cost-aware"]), st.integers(0, 2**32), EVENTS)
def test_every_call_is_served_where_one_device_is_just_large_enough(
    policy: str, replacement: str, seed: int, events: list[int]
) -> None:
    """Nothing breaks and no caller leaves; not a byte more than the largest function needs beside the minima."""
    rng = random.Random(seed)
    world = World(policy, limit=3, replacement=replacement)
    functions = [f"f{number}" for number in range(6)]
    sizes = {each: rng.randint(2, 30) for each in functions}
    minima = {each: rng.choice([0, 0, 0, 1]) for each in functions}
    pinned = sum(sizes[each] * minima[each] for each in functions)
    world.device("just", max(sizes[each] * (1 - minima[each]) for each in functions) + pinned)
    for number in range(rng.randint(0, 2)):
        world.device(f"small{number}", rng.randint(1, 20))
    for each in functions:
        world.deploy(each, sizes[each], slots=rng.choice([None, None, 1, 3]), min_copies=minima[each])
    for number, choice in enumerate(events):
        world.now += rng.choice([0.0, 0.25, 1.0])
        kind, pick, running, loading = choice % 10, choice // 10, sorted(world.running), world.loading()
        if kind < 5:
            world.call(f"c{number}", functions[pick % 6])
        elif kind < 7 and running:
            world.finish(running[pick % len(running)])
        elif kind < 9 and loading:
            world.loaded(*loading[pick % len(loading)])
        elif kind == 9:
            world.scale(functions[pick % 6], pick % 5)
        if (wake_at := world.engine.wake_at) is not None and wake_at <= world.now:
            world.tell(m.Woken())

    drain(world)

    assert not [each for each in world.log if isinstance(each, m.RejectCall | m.Abort)]
    assert world.ended == world.arrived
    rest(world)


def lacks(world: World) -> bool:
    """Some function has fewer copies than it should have without a call."""
    desired = world.status.desired
    return any(
        world.copies.get(id_, 0) < max(each.min_copies, desired.get(id_, 0)) for id_, each in world.functions.items()
    )


def step(world, choice: int, number: int, rng: random.Random) -> None:  # type: ignore[no-untyped-def]
    """One event of those that are possible now, and now and then one that is not."""
    kind, pick = choice % 23, choice // 23
    running = sorted(world.running)
    held = [
        (model.function, device.device.id, model.copy) for device in world.status.devices for model in device.resident
    ]
    loading = world.loading()
    if kind < 8:
        deadline = world.now + rng.randint(0, 20) if rng.random() < 0.3 else None
        world.call(f"c{number}", f"f{pick % 8}", deadline)
    elif kind < 12 and running:
        grant = world.running[running[pick % len(running)]]
        if (grant.function, grant.device, grant.copy) in loading:
            world.loaded(grant.function, grant.device, grant.copy)
        world.tell(m.Finished(grant.call, grant.device, 1.0, pick % 5 > 0))
    elif kind == 12 and running:
        world.refuse(running[pick % len(running)])
    elif kind == 13 and loading:
        function, device, copy = loading[pick % len(loading)]
        world.tell(m.CopyFailed(function, device, "broken", pick % 2 == 0, copy))
    elif kind == 14 and loading:
        world.loaded(*loading[pick % len(loading)])
    elif kind == 15 and held:
        function, device, copy = held[pick % len(held)]
        world.tell(m.WorkerExited(function, device, "killed", copy))
    elif kind == 16 and held:
        function, device, copy = held[pick % len(held)]
        if pick % 3 == 0:
            world.tell(m.Resized(function, device, rng.randint(1, 40) << 20, copy))
        world.tell(m.Measured(function, device, rng.randint(1, 40) << 20, copy, pick % 5 == 0))
    elif kind == 17:
        known = [*running, *sorted(world.waiting), "nobody"]
        world.tell(m.CallerLeft(CallId(known[pick % len(known)])))
    elif kind == 18:
        devices = [each.device for each in world.status.devices]
        if devices and pick % 2:
            world.tell(m.DeviceLeft(devices[pick % len(devices)].id, "gone"))
        else:
            world.device(f"d{pick % 5}", rng.randint(20, 60) << 20)
    elif kind == 22 and held:
        function, device, copy = held[pick % len(held)]
        world.tell(m.CopySilent(function, device, copy, pick % 3 > 0))
    elif kind > 19:
        world.scale(f"f{pick % 8}", (pick // 8) % 8)
    elif kind == 19:
        which = pick % 6
        if which == 0:
            world.tell(m.FunctionRemoved(FunctionId(f"f{pick % 8}"), pick % 3 > 0))
        elif which == 1:
            world.tell(m.Finished(CallId("nobody"), DeviceId("d0"), 1.0))
        elif which == 2:
            world.tell(m.Loaded(FunctionId("f0"), DeviceId("d9"), 1.0, 0))
        elif which == 3 and running:
            world.tell(m.Finished(CallId(running[0]), DeviceId("elsewhere"), 1.0))
        else:
            world.deploy(
                f"f{pick % 8}", rng.randint(4, 30) << 20, max_queue=12,
                min_copies=pick % 2 if any(each.min_copies for each in world.functions.values()) else 0,
                slots=None if world.functions[f"f{pick % 8}"].need.compute else 3,  # more, never fewer than run
            )  # fmt: skip


def beside(world: World, largest: int) -> None:
    """Add a device that has room for a function of size *largest*, beside what minima of copies may take for good."""
    pinned = sum(world.functions[each].min_copies for each in world.functions.keys() - world.removed)
    world.device("large", (1 + pinned) * largest)


def drain(world: World) -> None:
    """Let everything end: if each function fits beside the minima of others, no call waits for ever."""
    world.hear()
    for _ in range(1000):
        if not world.running and not world.waiting:
            return
        world.now += 1.0
        if (wake_at := world.engine.wake_at) is not None and wake_at <= world.now:
            world.tell(m.Woken())
        for place in world.loading():
            if place in world.loading():
                world.loaded(*place)
        for call in list(world.running):
            if call in world.running:
                grant = world.running[call]
                world.tell(m.Finished(CallId(call), grant.device, 1.0))
    pytest.fail(f"these wait forever: {world.waiting}, running {world.running}")


def rest(world) -> None:  # type: ignore[no-untyped-def]
    """Without calls nothing happens any more: functions do not evict each other, and none has too many copies."""
    for _ in range(100):
        loading = world.loading()
        if not loading:
            break
        for place in loading:
            world.loaded(*place)
    else:
        pytest.fail(f"copies are loaded for ever: {loading}")
    assert not world.draining
    for function, desired in world.status.desired.items():
        if not world.functions[function].need.compute or desired == 0:
            assert world.copies.get(function, 0) <= desired


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("resident", ["model", "CPU function", "CPU function above its minimum", "replica"])
def test_a_model_gets_the_room_of_whatever_is_idle_on_a_device_as_large_as_itself(policy: str, resident: str) -> None:
    world = World(policy)
    least = 20 if resident == "CPU function above its minimum" else 0
    world.device("d0", 40 + least)
    world.deploy("large", 40)
    if resident == "model":
        world.deploy("other", 40)
        world.warm("other", "d0")
    elif resident == "replica":
        world.deploy("other", 40)
        world.scale("other", 1)
        world.loaded("other", "d0")
    else:
        world.deploy("other", 20, slots=1, min_copies=1 if least else 0)
        world.scale("other", 3 if least else 2)
        while loading := world.loading():
            world.loaded(*loading[0])
        assert world.copies["other"] * 20 == 40 + least

    world.call("c", "large")

    assert world.started == [("c", "d0")]
    assert world.copies.get("other", 0) * 20 == least


def test_a_policy_that_never_stops_proposing_is_stopped() -> None:
    class Stubborn:
        name = "stubborn"

        def plan(self, _view: View) -> Plan:
            while True:
                yield Start((CallId("nobody"),), parts=(Part(DeviceId("nowhere"), 0),))

    world = world_of("f", policy=Stubborn())

    world.call("c", "f")

    assert world.status.queued == {"f": 1}
    assert "run ended" in world.engine.refusals[-1].reason


def test_what_a_policy_raises_is_passed_on() -> None:
    """A policy with a bug ends the process loudly; the journal replays it."""

    class Broken:
        name = "broken"

        def plan(self, _view: View) -> Plan:
            raise ZeroDivisionError
            yield

    world = world_of("f", policy=Broken())

    with pytest.raises(ZeroDivisionError):
        world.call("c", "f")
