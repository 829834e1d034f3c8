"""The table of policies, and the engine's reaction to their actions."""

from inspect import signature

import pytest
from tests.compiled import python_only
from tests.unit.scheduler.world import world_of

from gpufaas_core import messages as m
from gpufaas_scheduler import view_contract
from gpufaas_scheduler.policies import POLICIES, Plan, View, Wake, make_policy, start_on
from gpufaas_scheduler.view import ClusterView


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_made_by_name(name: str) -> None:
    assert make_policy(name).name == name


def test_a_policy_says_when_it_looks_again_and_is_asked_then() -> None:
    class Patient:
        """Starts nothing before it has looked three times."""

        name = "patient"
        looks = 0

        def plan(self, view: View) -> Plan:
            self.looks += 1
            call, device = view.queue.first(), next(iter(view.idle()))
            assert call is not None
            yield Wake(view.now + 2.0) if self.looks < 3 else start_on(device, call)

    policy = Patient()
    world = world_of("f", policy=policy)
    world.call("c", "f")
    assert world.engine.wake_at == 2.0

    world.now = 1.0
    world.tell(m.Woken())
    assert policy.looks == 1, "it was too early"
    world.now = 2.0
    world.tell(m.Woken())
    assert (world.started, world.engine.wake_at) == ([], 4.0)
    world.now = 4.5
    world.tell(m.Woken())

    assert (world.started, world.engine.wake_at) == ([("c", "a")], None)


@python_only  # compiled methods tell no signature with an infinite default
@pytest.mark.parametrize(
    "part", [view_contract.FleetView, view_contract.ResidencyView, view_contract.CostsView, view_contract.View]
)
def test_the_view_has_what_the_contract_says(part: type) -> None:
    """Its methods name the engine's own types, so the type checker does not compare the two."""
    for name, said in vars(part).items():
        if name.startswith("_"):
            continue
        has = getattr(ClusterView, name)
        if isinstance(said, property):
            assert not callable(has), name
        else:
            assert [(each.name, each.default) for each in signature(has).parameters.values()] == [
                (each.name, each.default) for each in signature(said).parameters.values()
            ], name
