"""The engine learns nothing from impossible figures."""

from math import inf, nan

import pytest
from tests.unit.scheduler.world import world_of

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, FunctionId
from gpufaas_scheduler.world.costs import Costs


@pytest.mark.parametrize("wrong", [nan, inf, -1.0, 1e300])
def test_times_that_are_none_are_not_learnt_and_the_call_is_over(wrong: float) -> None:
    world = world_of("f", "g", learn=True, load_s=3.0, service_s=1.0)
    world.call("a", "f")

    world.loaded("f", "g", load_s=wrong)
    world.finish("a", service_s=wrong)

    for learnt in world.engine.take_learnt():
        assert (learnt.profile.load_s, learnt.profile.service_s) == (3.0, 1.0)
    world.call("b", "f")
    assert world.running["b"].cold is False


@pytest.mark.parametrize("wrong", [-1, 1 << 62])
def test_sizes_that_are_none_are_not_learnt(wrong: int) -> None:
    world = world_of("f", "g", learn=True, warm="f", size=10)
    world.engine.take_learnt()

    assert world.tell(m.Measured(FunctionId("f"), DeviceId("g"), wrong)) == []

    assert not [each for each in world.engine.take_learnt() if each.profile.occupation != 10]


def test_a_profile_says_what_of_it_was_measured() -> None:
    world = world_of("f", "g", learn=True, load_s=3.0, service_s=1.0)
    world.call("a", "f")

    world.loaded("f", "g", load_s=2.0)
    (loaded,) = world.engine.take_learnt()
    world.finish("a", service_s=0.5)
    (served,) = world.engine.take_learnt()

    assert (loaded.profile.measured, loaded.profile.load_s, "call" in loaded.profile.estimated) == (True, 2.0, True)
    assert "call" not in served.profile.estimated
    assert (Costs(loaded.profile).loaded, Costs(loaded.profile).served) == (True, False), "as it was, after a restart"
