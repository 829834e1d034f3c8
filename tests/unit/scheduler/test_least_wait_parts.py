"""The parts of least-wait, each alone on a cluster that the test builds."""

import pytest
from tests.unit.scheduler.world import World

from gpufaas_scheduler.contract import Plan, start_on
from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.policies.least_wait.order import Order
from gpufaas_scheduler.policies.least_wait.placement import Rooms
from gpufaas_scheduler.policies.least_wait.tuning import DEFAULT_WAIT_BOUND_S, WAITING_WORTH
from gpufaas_scheduler.view_contract import View, WaitingCall
from gpufaas_scheduler.view_nouns import FunctionView


class AsTold:
    """Starts the calls that the test gives a device to; all others wait. Keeps what it is shown."""

    name = "as-told"

    def __init__(self) -> None:
        self.told: dict[str, str] = {}
        self.seen: dict[str, WaitingCall] = {}
        self.functions: dict[str, FunctionView] = {}

    def plan(self, view: View) -> Plan:
        self.view = view
        while (call := view.queue.first()) is not None:
            view.queue.set_aside(call)
            self.seen[call.id], self.functions[call.function] = call, call.owner
            if call.id in self.told:
                told = self.told.pop(call.id)
                yield start_on(next(each for each in view.idle() if each.id == told), call)


class Site(World):
    def __init__(self) -> None:
        self.policy = AsTold()
        super().__init__(self.policy)

    @property
    def view(self) -> View:
        return self.policy.view

    def begin(self, function: str, device: str) -> str:
        """A call that runs on that device from now on."""
        name = f"{function}-{len(self.log)}-{self.now}"
        self.policy.told[name] = device
        self.call(name, function)
        assert self.running[name].device == device
        return name

    def hold(self, *held: tuple[str, str]) -> None:
        """Each device holds the function, and is idle."""
        for function, device in held:
            name = self.begin(function, device)
            self.now += 4.0
            self.finish(name)

    def function(self, name: str) -> FunctionView:
        """One that was called."""
        return self.policy.functions[name]

    def waits(self, function: str) -> WaitingCall:
        """A call arrives and waits. The first of its function that does."""
        self.call(f"waits-{function}-{len(self.waiting)}-{self.now}", function)
        return next(each for each in self.policy.seen.values() if each.function == function and each.id in self.waiting)


def site(devices: int = 2, memory: int = 20) -> Site:
    made = Site()
    for number in range(devices):
        made.device(f"d{number}", memory)
    return made


# --- estimates ---


def test_each_further_copy_saves_less() -> None:
    many = site(devices=8, memory=100)
    many.deploy("f", load_s=3.0, service_s=1.0)
    for _ in range(50):
        many.now += 2.0
        many.waits("f")

    saved = [Estimates(many.view).saved(many.function("f"), copies, "gpu") for copies in range(1, 8)]

    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 100 * saved[-1] > 0.0


def test_the_last_copy_is_worth_a_load_for_each_call_and_more_while_calls_wait() -> None:
    one = site()
    for name in ("seldom", "often"):
        one.deploy(name, load_s=3.0)
    one.hold(("seldom", "d0"), ("often", "d0"), ("often", "d0"), ("often", "d0"))
    estimates = Estimates(one.view)

    seldom, often = (estimates.worth(one.function(name), "gpu") for name in ("seldom", "often"))

    assert often == pytest.approx(3 * seldom, rel=0.2)
    assert seldom > one.view.rate(one.function("seldom")) * 3.0, "a load takes a device from others, too"
    one.waits("seldom")
    assert Estimates(one.view).worth(one.function("seldom"), "gpu") == WAITING_WORTH


def test_a_call_waits_for_what_runs_on_its_holder_and_for_what_waits_for_that() -> None:
    one = site()
    one.deploy("f", size=10, service_s=2.0)
    one.deploy("beside", size=10, service_s=5.0)
    one.hold(("beside", "d0"), ("f", "d0"))
    one.begin("f", "d0")

    call = one.waits("f")

    assert Estimates(one.view).wait_s(call) == pytest.approx(2.0)
    one.waits("f")
    assert Estimates(one.view).wait_s(call) == pytest.approx(2.0 + 2.0)
    one.waits("beside")
    assert Estimates(one.view).wait_s(call) == pytest.approx(2.0 + 2.0 + 5.0)


# --- placement ---


def place(made: Site, function: str):  # type: ignore[no-untyped-def]
    """Where *function*, which has a call, would be loaded."""
    call = made.waits(function)
    return Rooms(made.view, Estimates(made.view)).cheapest(call.owner)


def test_a_model_is_loaded_where_the_victims_are_worth_least() -> None:
    full = site(devices=3, memory=10)
    for name in ("a", "b", "c", "new"):
        full.deploy(name, size=10)
    full.hold(("a", "d0"), ("b", "d1"), ("c", "d2"), ("a", "d0"), ("c", "d2"))

    found = place(full, "new")

    assert (found.device.id, found.victims) == ("d1", ("b#0",))
    assert found.worth > 0.0


def test_an_empty_device_costs_nothing() -> None:
    one = site(devices=2, memory=10)
    one.deploy("a", size=10)
    one.deploy("new", size=10)
    one.hold(("a", "d0"))

    found = place(one, "new")

    assert (found.device.id, found.victims, found.worth) == ("d1", (), 0.0)


def test_victims_that_are_not_needed_stay() -> None:
    """Per byte the small one is the cheapest, but the large one has to go anyway, and is enough."""
    one = site(devices=1, memory=40)
    for name, size in (("small", 10), ("large", 30), ("new", 30)):
        one.deploy(name, size=size)
    one.hold(("large", "d0"), ("large", "d0"), ("large", "d0"), ("large", "d0"), ("small", "d0"))

    assert place(one, "new").victims == ("large#0",)


def test_there_is_no_place_beside_what_cannot_leave() -> None:
    two = site(devices=2, memory=40)
    for name, least in (("kept", 1), ("busy", 0), ("new", 0)):
        two.deploy(name, size=30, min_copies=least)
    two.loaded("kept", "d0")
    two.begin("busy", "d1")

    assert place(two, "new") is None


def test_of_idle_holders_the_one_whose_other_models_are_missed_least_takes_the_call() -> None:
    two = site(devices=2, memory=20)
    for name in ("f", "hot", "cold"):
        two.deploy(name, size=10)
    two.hold(("f", "d0"), ("hot", "d0"), ("f", "d1"), ("cold", "d1"), *[("hot", "d0")] * 5)
    call = two.waits("f")

    found = Rooms(two.view, Estimates(two.view)).idle_holder(call)

    assert found is not None
    assert found.id == "d1"


# --- order ---


def order(made: Site, bound_s: float = DEFAULT_WAIT_BOUND_S) -> Order:
    return Order(made.view, bound_s, Rooms(made.view, Estimates(made.view)))


def test_the_pull_of_a_call_is_its_age_and_grows_without_limit_before_the_bound() -> None:
    one = site()
    one.deploy("f")
    call = one.waits("f")
    pulls = []
    for _ in range(30):
        one.now += 1.0
        one.deploy("tick")  # an event: the clock of the view moves with them
        pulls.append(order(one)._pull(call))

    assert pulls[0] == pytest.approx(1.0, rel=1e-3)
    assert pulls == sorted(pulls)
    assert pulls[-1] > 1000 * pulls[14]


def test_a_call_that_its_holder_will_serve_sooner_than_a_load_is_promised_that() -> None:
    two = site()
    two.deploy("f", load_s=30.0, service_s=1.0)
    two.hold(("f", "d0"))
    two.now += 1000.0  # it is not called often enough for a second copy
    two.begin("f", "d0")
    call = two.waits("f")
    asked = order(two)

    assert asked.action() is None
    (promise,) = asked.promises
    assert (promise.call, promise.at) == (call.id, pytest.approx(two.now + 1.0))
    assert asked.look_at == promise.at


@pytest.mark.parametrize("first", ["held", "orphan"])
def test_a_hit_gives_way_to_a_load_that_relieves_more_waiting(first: str) -> None:
    one = site(devices=1)
    for name in ("held", "beside", "orphan"):
        one.deploy(name, size=10, load_s=1.0, service_s=1.0)
    one.hold(("held", "d0"), ("beside", "d0"))
    for _ in range(20 if first == "orphan" else 1):
        one.waits(first)
    one.now += 20.0
    one.waits("orphan" if first == "held" else "held")

    found = order(one).action()

    assert found is not None
    action, function = found
    assert function == first
    assert action.victims == (("beside#0",) if first == "orphan" else None)
