"""The memory of a worker: reservations that hold, and free memory that is lent until another worker needs it."""

from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, FunctionId
from gpufaas_core.units import MiB


def a_world(functions: str, **more: object) -> World:
    return world_of(functions, learn=True, memory=400 * MiB, device_kind="cpu", **more)


def resizes(world: World) -> list[tuple[str, int]]:
    """(function, MiB) of the last event."""
    return [(each.function, each.memory // MiB) for each in world.out if isinstance(each, m.Resize)]


def measured(world: World, function: str, peak: int, *, out_of_memory: bool = False) -> None:
    world.tell(m.Measured(FunctionId(function), DeviceId("a"), peak * MiB, 0, out_of_memory))


def one_that_runs_with_lent_memory() -> World:
    """Call "o" runs on a worker of "outer", which was lent what "inner" would need."""
    world = a_world("outer", slots=1, size=100 * MiB, elastic=True)
    world.deploy("inner", size=250 * MiB)
    world.call("o", "outer")
    world.loaded("outer", "a")
    return world


def answer(world: World, memory: int, asked: int) -> None:
    world.tell(m.Resized(FunctionId("outer"), DeviceId("a"), memory * MiB, 0, asked * MiB))


def test_only_the_answer_to_what_the_node_was_told_last_counts() -> None:
    """The node held what it was told last, and the scheduler promised what an older answer said, for ever."""
    world = one_that_runs_with_lent_memory()
    world.call("i", "inner")
    assert resizes(world) == [("outer", 100)]
    world.finish("o")  # it is idle: what is lacking is taken back, though it has not answered yet
    assert resizes(world) == [("outer", 150)]

    answer(world, 100, asked=100)
    assert world.model("outer", "a").limit == 150 * MiB

    answer(world, 150, asked=150)
    assert world.model("outer", "a").limit == 150 * MiB


def test_a_worker_that_needs_more_than_it_was_asked_to_keep_is_given_it_again() -> None:
    world = one_that_runs_with_lent_memory()
    world.call("i", "inner")
    measured(world, "outer", 200)
    assert resizes(world) == []  # it must not cross the answer

    answer(world, 100, asked=100)

    assert resizes(world) == [("outer", 236)]
    assert world.model("outer", "a").limit == int(200 * MiB * 1.1) + 16 * MiB


def test_what_a_worker_did_not_give_back_is_promised_to_nobody_else() -> None:
    """It was taken for idle; its next call reached the node before the word to give back."""
    world = one_that_runs_with_lent_memory()
    world.finish("o")
    world.call("i", "inner")
    assert resizes(world) == [("outer", 150)]
    world.tell(m.WorkerExited(FunctionId("inner"), DeviceId("a"), "killed"))

    answer(world, 300, asked=150)

    assert world.model("outer", "a").limit == 300 * MiB


def test_what_is_declared_is_reserved_whatever_is_measured() -> None:
    """Three small calls, then a batch that needs what was declared; also after an eviction, and beside others."""
    world = a_world("f g", warm="f", size=200 * MiB, floor=200 * MiB)

    measured(world, "f", 20)
    world.warm("g", "a")

    assert world.model("f", "a").limit == 200 * MiB
    world.tell(m.WorkerExited(FunctionId("f"), DeviceId("a"), "killed"))
    world.call("again", "f")
    assert world.running["again"].memory == 200 * MiB


def test_a_declaration_holds_over_what_an_earlier_deployment_learnt() -> None:
    world = a_world("f", size=36 * MiB, floor=200 * MiB)

    world.call("c", "f")

    assert world.running["c"].memory == 200 * MiB


def test_who_declares_nothing_may_use_what_is_free() -> None:
    world = a_world("f", size=100 * MiB, elastic=True)
    world.call("c", "f")
    assert world.running["c"].memory == 100 * MiB

    world.loaded("f", "a")
    assert resizes(world) == [("f", 400)]
    measured(world, "f", 20)
    assert resizes(world) == []
    world.finish("c")

    assert (world.model("f", "a").memory, world.model("f", "a").limit) == (38 * MiB, 400 * MiB)
    assert world.on("a").used == 38 * MiB  # lent memory is not counted


def test_what_is_lent_goes_to_whoever_needs_it_before_anybody_is_evicted() -> None:
    world = a_world("f", size=100 * MiB, elastic=True)
    world.deploy("g", size=250 * MiB)
    world.warm("f", "a")
    assert world.model("f", "a").limit == 400 * MiB

    world.call("c", "g")

    assert resizes(world) == [("f", 150)]  # no more than is lacking, and before the grant
    assert isinstance(world.out[-1], m.StartCall)
    assert world.out[-1].grant.victims == ()


def test_a_worker_that_runs_is_asked_for_what_it_was_lent() -> None:
    """It may be using it: its node says what it can give, and only that is promised again."""
    world = one_that_runs_with_lent_memory()

    world.call("i", "inner")
    assert world.started == []
    assert resizes(world) == [("outer", 100)]
    world.call("j", "inner")
    assert resizes(world) == []  # once

    world.tell(m.Resized(FunctionId("outer"), DeviceId("a"), 140 * MiB))
    assert world.started == [("i", "a")]
    assert world.model("outer", "a").limit == 140 * MiB


def test_a_worker_that_uses_all_that_it_was_lent_keeps_it_until_its_call_is_over() -> None:
    world = one_that_runs_with_lent_memory()
    world.call("i", "inner")

    world.tell(m.Resized(FunctionId("outer"), DeviceId("a"), 380 * MiB))
    assert world.started == []
    assert resizes(world) == []
    measured(world, "outer", 300)
    world.finish("o")

    assert world.started == [("i", "a")]  # it has 346 MiB of its own by now, and is idle: it goes


def test_a_call_that_runs_out_is_followed_by_one_with_more_room() -> None:
    world = a_world("f", warm="f", size=100 * MiB, floor=100 * MiB)
    world.engine.take_learnt()

    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 0, 0, out_of_memory=True))

    assert world.model("f", "a").limit == 400 * MiB
    (learnt,) = world.engine.take_learnt()
    assert learnt.profile.occupation == 126 * MiB  # more than it had: 100 * 1.1 + 16


def test_one_that_asks_for_more_than_the_device_has_teaches_nothing() -> None:
    """Else one senseless request would make its function evict everybody for ever."""
    world = a_world("f", warm="f", size=100 * MiB, elastic=True)
    world.engine.take_learnt()

    world.tell(m.Measured(FunctionId("f"), DeviceId("a"), 0, 0, out_of_memory=True))

    assert world.engine.take_learnt() == []
    assert world.model("f", "a").memory == 100 * MiB


def test_idle_ones_leave_for_one_that_declares_nothing_and_ran_out() -> None:
    """A device that has served for a while is full of them. What it does not use is only lent to it."""
    world = a_world("f", warm="f", size=30 * MiB, elastic=True)
    for name in ("g", "h", "i"):
        world.deploy(name, size=120 * MiB)
        world.warm(name, "a")
    world.call("runs", "i")

    world.call("c", "f")  # waits for the device
    world.finish("runs")
    measured(world, "f", 0, out_of_memory=True)

    evicted = [each.function for each in world.out if isinstance(each, m.EvictCopy)]
    assert evicted == ["g"], "least recently used first, until it may have four times what it had"
    assert resizes(world) == [("f", 160)]
    assert world.on("a").used == 270 * MiB  # h and i have the rest of it


def test_what_was_lent_to_a_copy_that_is_gone_is_given_back_once() -> None:
    """The call that it was loaded for is refused, and another call on it ends later."""
    world = a_world("f", size=100 * MiB, slots=2, elastic=True)
    world.calls("first second", "f")
    measured(world, "f", 100)
    measured(world, "f", 20)
    assert world.model("f", "a").limit > world.model("f", "a").memory, "it was lent what it needs no more"
    world.refuse("first")

    world.tell(m.Finished(CallId("second"), DeviceId("a"), 1.0))

    residency = world.engine._world.devices[DeviceId("a")].residency
    assert (residency.held, residency.free) == (0, 400 * MiB - sum(each.memory for each in residency))


def test_nobody_leaves_for_one_that_declares_a_size() -> None:
    world = a_world("f", size=200 * MiB, floor=200 * MiB)
    world.deploy("g", size=200 * MiB)
    world.warm("f", "a")
    world.warm("g", "a")

    measured(world, "f", 0, out_of_memory=True)

    assert world.out == []
