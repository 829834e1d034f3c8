"""What the view shows of the whole cluster: its functions, its devices, and the variants of a task."""

from msgspec.structs import replace
from tests.unit.scheduler.world import World

from gpufaas_core import messages as m
from gpufaas_core.constraints import Constraint
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_scheduler.policies import Plan, View

SMALL = Function(
    FunctionId("small"), "d", Need(latency_goal_s=0.5), {"*": Profile(3.0, 1.0, 10)}, max_copies=3,
    constraints=(Constraint("zone", "a"),), idempotent=True, tenant="shop", weight=2.0, priority=1,
    task="detect", accuracy=0.7,
)  # fmt: skip


class Looking:
    """Keeps the view."""

    name = "looking"
    watches = 0

    def plan(self, view: View) -> Plan:
        self.view = view
        yield from ()


class Site(World):
    def __init__(self) -> None:
        self.policy = Looking()
        super().__init__(self.policy)
        self.device("n1/a")
        self.deploy("any", slots=4)
        self.deploy("waits")
        self.call("x", "waits")  # so that the policy runs

    @property
    def view(self) -> View:
        return self.policy.view

    def variants(self, task: str = "detect") -> list[str]:
        return [each.id for each in self.view.variants(task)]


def test_the_view_shows_each_function_as_it_was_deployed() -> None:
    site = Site()
    site.tell(m.FunctionDeployed(SMALL))

    assert [each.id for each in site.view.functions()] == ["any", "waits", "small"]
    assert [each.placed for each in site.view.functions()] == [False, True, True]
    (small,) = site.view.variants("detect")
    assert small.declared == SMALL
    assert small.goal_s == 0.5


def test_a_removed_function_is_not_shown_while_its_last_calls_are_served() -> None:
    site = Site()
    site.tell(m.FunctionDeployed(SMALL))
    assert site.variants() == ["small"]

    for function in ("waits", "small"):
        site.tell(m.FunctionRemoved(FunctionId(function)))

    assert site.engine.knows(CallId("x"))
    assert [each.id for each in site.view.functions()] == ["any"]
    assert site.variants() == []


def test_the_variants_of_a_task_follow_each_deployment() -> None:
    site = Site()
    site.tell(m.FunctionDeployed(SMALL))
    large = replace(SMALL, id=FunctionId("large"), accuracy=0.9)

    assert site.variants() == ["small"]
    site.tell(m.FunctionDeployed(large))
    assert site.variants() == ["small", "large"]
    site.tell(m.FunctionDeployed(replace(SMALL, task="classify")))
    assert (site.variants(), site.variants("classify")) == (["large"], ["small"])
    assert site.variants("") == [], "functions without a task are no variants of each other"


def test_a_revision_that_is_deployed_again_shows_the_constraints_that_it_keeps() -> None:
    site = Site()
    site.tell(m.FunctionDeployed(SMALL))
    site.tell(m.FunctionDeployed(replace(SMALL, constraints=(), accuracy=0.8)))

    (small,) = site.view.variants("detect")
    assert (small.declared.constraints, small.declared.accuracy) == (SMALL.constraints, 0.8)


def test_the_view_shows_all_devices_with_what_their_nodes_say() -> None:
    site = Site()
    priced = Device(DeviceId("n2/a"), "h100", 80, {"zone": "a"}, loads_parts=True, price_per_h=32.0)
    site.tell(m.DeviceJoined(priced))
    site.tell(m.DeviceDrained(DeviceId("n1/a")))

    found = {each.id: each for each in site.view.devices()}
    assert list(found) == ["n1/a", "n2/a"]
    assert [each.closed for each in found.values()] == [True, False]
    assert found[DeviceId("n2/a")].device == priced
    site.tell(m.DeviceLeft(DeviceId("n2/a"), "gone"))
    assert [each.id for each in site.view.devices()] == ["n1/a"]
