"""Inner calls: they run elsewhere, or are refused at once; there is no deadlock."""

from random import Random

import pytest
from tests.unit.scheduler.world import World

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_core.units import MiB
from gpufaas_scheduler.policies import POLICIES

DEVICES = ("d1", "d2", "d3")


class Nest(World):
    def inner(self, name: str, function: str, outer: str, deadline: float | None = None, **more: object) -> None:
        """A call of *function* that is made where *outer* runs."""
        grant = self.running[outer]
        said = m.Outer(grant.device, grant.function, grant.copy, str(more.get("sent", "")))
        self.tell(m.Arrived(CallId(name), FunctionId(function), deadline, outer=said))

    def refused(self, name: str) -> str:
        rejects = [each for each in self.log if isinstance(each, m.RejectCall) and each.code == "nested"]
        return next((each.message for each in rejects if each.call == name), "")

    def runs_on(self, name: str) -> str:
        return str(self.running[name].device)


@pytest.fixture(params=POLICIES)
def nest(request: pytest.FixtureRequest) -> Nest:
    return Nest(request.param)


def test_on_one_device_the_inner_call_is_refused_at_once_and_the_outer_goes_on(nest: Nest) -> None:
    nest.set_up("f g", "d1")
    nest.call("outer", "f")

    nest.inner("c", "g", "outer")

    assert "device d1 is held by call outer of f" in nest.refused("c")
    assert "/async-function/" in nest.refused("c")
    nest.finish("outer")


def test_a_model_that_calls_itself_is_refused(nest: Nest) -> None:
    nest.set_up("f", "d1")
    nest.call("outer", "f")

    nest.inner("c", "f", "outer")

    assert nest.refused("c")


def test_a_call_of_nobody_waits_for_the_same_device(nest: Nest) -> None:
    nest.set_up("f", "d1")
    nest.call("outer", "f")

    nest.call("c", "f")

    assert "c" in nest.waiting


@pytest.mark.parametrize("warm", [False, True])
def test_where_another_device_is_idle_the_inner_call_loads_there(nest: Nest, warm: bool) -> None:
    """Also if its model is on its outer's device: what is there cannot serve it."""
    nest.set_up("f", "d1", memory=30)
    nest.deploy("g", load_s=1000.0)
    if warm:
        nest.warm("g", "d1")
    nest.call("outer", "f")
    nest.device("d2", 30)

    nest.inner("c", "g", "outer")

    assert nest.runs_on("c") == "d2"


def test_it_goes_before_other_calls_to_the_holder_that_becomes_idle(nest: Nest) -> None:
    nest.set_up("f", "d1 d2", memory=10)
    nest.deploy("g")
    nest.call("outer", "f")
    nest.call("busy", "g")
    nest.inner("c", "g", "outer")
    assert "c" in nest.waiting

    nest.finish("busy")

    assert nest.runs_on("c") == "d2"


def test_of_two_that_wait_for_each_other_only_the_last_is_refused(nest: Nest) -> None:
    nest.set_up("f g h", "d1 d2")
    nest.call("a", "f")
    nest.call("b", "g")
    assert {nest.runs_on("a"), nest.runs_on("b")} == {"d1", "d2"}

    nest.inner("a2", "h", "a")
    assert "a2" in nest.waiting
    nest.inner("b2", "h", "b")

    assert nest.refused("b2")
    assert not nest.refused("a2")
    nest.finish("b")
    assert "a2" in nest.running


def test_a_device_that_leaves_takes_the_last_place_with_it(nest: Nest) -> None:
    nest.set_up("f", "d1 d2")
    nest.deploy("g")
    nest.call("a", "f")
    nest.call("busy", "f" if nest.runs_on("a") == "d1" else "g")
    nest.call("busy2", "g")
    nest.inner("c", "g", "a")
    if "c" in nest.running:
        return
    nest.tell(m.DeviceLeft(DeviceId("d2" if nest.runs_on("a") == "d1" else "d1"), "gone"))

    assert nest.refused("c")


def test_a_cpu_function_calls_a_model_on_its_device_but_not_one_that_does_not_fit_beside_it(nest: Nest) -> None:
    nest.set_up("cpu", "d1", memory=100, size=50, slots=4)
    nest.deploy("small", 50)
    nest.deploy("large", 60)
    nest.call("a", "cpu")

    nest.inner("b", "small", "a")
    nest.inner("c", "large", "a")

    assert nest.runs_on("b") == "d1"
    assert "device d1 has 50 B beside what stays there" in nest.refused("c")


def test_a_cpu_function_that_calls_itself_has_its_slots_then_a_copy_then_a_refusal(nest: Nest) -> None:
    nest.set_up("cpu", "d1", memory=20, size=10, slots=2)
    nest.call("1", "cpu")
    nest.loaded("cpu", "d1")
    for number in (2, 3, 4):
        nest.inner(str(number), "cpu", str(number - 1))
        if number == 3:
            nest.loaded("cpu", "d1", copy=1)
    assert [nest.running[str(each)].copy for each in (1, 2, 3, 4)] == [0, 0, 1, 1]

    nest.inner("5", "cpu", "4")

    assert "all slots of cpu are held" in nest.refused("5")


@pytest.mark.parametrize("again", [False, True])
def test_a_cpu_function_that_is_scaled_down_while_it_calls_itself_has_no_more_copies_than_before(again: bool) -> None:
    """Its copies were to go since there were too many, did not count any more, and for each another one was started."""
    nest = Nest().set_up("cpu", "d1", memory=100, size=10, slots=2, max_copies=2)
    nest.call("1", "cpu")
    nest.loaded("cpu", "d1")
    nest.inner("2", "cpu", "1")
    nest.inner("3", "cpu", "2")
    nest.loaded("cpu", "d1", copy=1)
    nest.tell(m.Scaled(FunctionId("cpu"), 1))
    if again:
        nest.tell(m.Scaled(FunctionId("cpu"), 2))

    nest.inner("4", "cpu", "3")
    nest.inner("5", "cpu", "4")

    assert nest.running["4"].copy == 1
    assert "all slots of cpu are held" in nest.refused("5")
    for each in "4321":
        nest.finish(each)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_cpu_function_that_calls_itself_has_back_what_its_worker_was_lent(copies: int) -> None:
    """Its first worker was lent the whole device, so there was no room for a second one, and no end of the wait."""
    nest = Nest(learn=True)
    nest.device("d1", 400 * MiB, "cpu")
    nest.deploy("cpu", 100 * MiB, slots=2, elastic=True, max_copies=copies)
    nest.call("1", "cpu")
    nest.loaded("cpu", "d1")
    assert nest.model("cpu", "d1").limit == 400 * MiB
    nest.inner("2", "cpu", "1")
    nest.inner("3", "cpu", "2")
    if copies == 2:
        assert m.Resize(FunctionId("cpu"), DeviceId("d1"), 100 * MiB, 0) in nest.out

        nest.tell(m.Resized(FunctionId("cpu"), DeviceId("d1"), 120 * MiB, 0, 100 * MiB))

        assert nest.running["3"].copy == 1
        nest.loaded("cpu", "d1", copy=1)
        nest.inner("4", "cpu", "3")
        nest.inner("5", "cpu", "4")
    last = str(2 * copies + 1)
    assert "all slots of cpu are held" in nest.refused(last)
    assert not any(isinstance(each, m.Resize) for each in nest.out), "one more copy may not be"


def test_a_cpu_function_that_uses_what_its_worker_was_lent_is_refused_the_inner_call() -> None:
    nest = Nest(learn=True)
    nest.set_up("cpu", "d1", memory=400 * MiB, device_kind="cpu", size=100 * MiB, slots=1, elastic=True)
    nest.call("1", "cpu")
    nest.loaded("cpu", "d1")
    nest.inner("2", "cpu", "1")
    assert not nest.refused("2")

    nest.tell(m.Resized(FunctionId("cpu"), DeviceId("d1"), 390 * MiB, 0, 100 * MiB))

    assert nest.refused("2")
    nest.finish("1")


def test_of_two_calls_of_a_worker_the_one_that_ends_has_not_made_what_is_waited_for(nest: Nest) -> None:
    """The engine took x for the maker of g1. It was y: so what y holds does not become free."""
    nest.set_up("f", "d1", memory=20, size=10, slots=2)
    nest.deploy("g", 10, slots=1)
    nest.calls("x y", "f")
    nest.inner("g1", "g", "y")
    nest.finish("x")

    nest.inner("g2", "g", "g1")

    assert "all slots of g are held" in nest.refused("g2")
    nest.finish("g1")
    nest.finish("y")


def test_calls_of_a_cpu_function_that_only_compute_are_waited_for(nest: Nest) -> None:
    nest.set_up("cpu", "d1", memory=10, size=10, slots=3)
    for each in "abc":
        nest.call(each, "cpu")

    nest.inner("x", "cpu", "a", sent="a")
    nest.inner("y", "cpu", "b")
    assert {"x", "y"} <= nest.waiting.keys()
    nest.inner("z", "cpu", "c")

    assert nest.refused("z")
    nest.finish("c")
    assert "x" in nest.running


def test_a_copy_that_drains_is_no_place_for_a_call_though_it_has_a_free_slot(nest: Nest) -> None:
    nest.device("d1")
    nest.tell(m.FunctionDeployed(Function(FunctionId("f"), "f", Need(slots=2), {"*": Profile(3.0, 1.0, 10)})))
    nest.deploy("g")
    nest.call("a", "f")
    nest.device("d2")
    nest.call("b", "g")
    nest.tell(m.DeviceDrained(DeviceId("d1")))
    nest.tell(m.DeviceDrained(DeviceId("d1"), drain=False))
    nest.inner("b1", "f", "b")
    assert not nest.refused("b1"), "a may end"

    nest.inner("a1", "g", "a")

    assert nest.refused("a1")
    nest.finish("a")
    assert nest.runs_on("b1") == "d1"


def test_an_inner_call_joins_its_outer_one_though_others_wait_for_the_device(nest: Nest) -> None:
    nest.device("d1")
    nest.tell(m.FunctionDeployed(Function(FunctionId("f"), "f", Need(slots=3), {"*": Profile(3.0, 1.0, 10)})))
    nest.deploy("g")
    nest.warm("f", "d1")
    nest.warm("g", "d1")
    nest.call("a", "g")
    for call, function in (("outer", "f"), ("b", "g"), ("x", "f")):
        nest.call(call, function)
    nest.finish("a")
    assert "b" not in nest.running

    nest.inner("c", "f", "outer")

    assert nest.runs_on("c") == "d1"
    nest.finish("c")
    nest.finish("outer")
    assert nest.running.keys() & {"b", "x"}


def test_it_ends_with_its_outer_call() -> None:
    nest = Nest().set_up("f", "d1 d2")
    nest.call("a", "f", 10.0)
    nest.now = 4.0

    nest.inner("b", "f", "a", 60.0)
    nest.device("d3")
    nest.inner("c", "f", "a", 5.0)

    assert nest.running["b"].within_s == 6.0
    assert nest.running["c"].within_s is None, "its own time is over before"


def test_what_is_said_of_a_worker_that_runs_nothing_counts_for_nothing(nest: Nest) -> None:
    nest.set_up("f", "d1", warm="f")
    nest.call("a", "f")
    nobody = m.Outer(DeviceId("d9"), FunctionId("f"))

    nest.tell(m.Arrived(CallId("b"), FunctionId("f"), outer=nobody))

    assert "b" in nest.waiting


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("seed", range(150))
def test_nests_of_any_shape_drain(seed: int, told: bool) -> None:
    """
    Calls make calls, which make calls. Each ends once all that it made have ended or were refused, and no other way:
    so a deadlock shows as a call that is left. *told*: they say who they are; else each waits for what it has made, and
    the engine guesses.
    """
    random = Random(seed)
    nest = Nest(random.choice(sorted(POLICIES)), limit=random.choice([0, 2, 25]))
    for each in DEVICES[: random.randint(1, 3)]:
        nest.device(each, random.choice([40, 60, 100]))
    names = []
    for number in range(random.randint(2, 6)):
        cpu = random.random() < 0.3
        nest.deploy(f"f{number}", random.choice([10, 20, 40]), random.choice([0.1, 3.0, 50.0]),
                    slots=random.randint(1, 3) if cpu else None, max_copies=random.choice([0, 0, 1, 2]))  # fmt: skip
        names.append(f"f{number}")
    made: dict[str, list[str]] = {}
    left, steps = 40, 0
    while left or nest.running or nest.waiting:
        steps += 1
        assert steps < 3000, "it goes round"
        nest.now += random.random()
        if random.random() < 0.1:
            nest.tell(m.Scaled(FunctionId(random.choice(names)), random.choice([0, 1, 2, 3])))
        open_ = {name for names_ in made.values() for name in names_ if name in nest.running or name in nest.waiting}
        free = [each for each in nest.running if not (set(made.get(each, ())) & open_)]
        if left and random.random() < 0.6:
            left -= 1
            name = f"c{left}"
            makers = sorted(nest.running if told else free)
            if makers and random.random() < 0.7:
                outer = random.choice(makers)
                made.setdefault(outer, []).append(name)
                nest.inner(name, random.choice(names), outer, sent=outer if told else "")
            else:
                nest.call(name, random.choice(names))
        elif free:
            nest.finish(random.choice(sorted(free)))
        elif loads := [(each.function, device.device.id, each.copy) for device in nest.status.devices
                       for each in device.resident if each.loading]:  # fmt: skip
            nest.loaded(*loads[0])
        elif not left:
            pytest.fail(f"{sorted(nest.running)} wait for {sorted(nest.waiting)}")


def test_a_call_that_uses_all_that_it_was_lent_does_not_keep_its_own_inner_call_waiting() -> None:
    """It cannot give that back before it ends, and it ends after the inner call: that is refused once it is known."""
    nest = Nest(learn=True)
    nest.set_up("f", "d1", memory=400 * MiB, device_kind="cpu", slots=1, size=100 * MiB, elastic=True)
    nest.deploy("g", size=250 * MiB)
    nest.call("outer", "f")
    nest.loaded("f", "d1")

    nest.inner("c", "g", "outer")
    assert not nest.refused("c")
    nest.tell(m.Resized(FunctionId("f"), DeviceId("d1"), 380 * MiB))

    assert "device d1 has 20 MiB beside what stays there" in nest.refused("c")
    nest.finish("outer")
    nest.call("again", "g")
    assert nest.runs_on("again") == "d1"
