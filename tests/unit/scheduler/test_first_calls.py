"""The first calls of a function: nobody knows yet how long one takes, or a load."""

import pytest
from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m

ON = "order=o3+placement=least-wait"


def loads(world: World) -> int:
    return sum(isinstance(each, m.StartCall) and each.grant.cold for each in world.log)


@pytest.mark.parametrize("policy", ["least-wait", ON])
def test_calls_that_come_while_the_first_copy_loads_wait_for_it_and_are_told(policy: str) -> None:
    world = world_of("f", "a b c", policy=policy, load_s=0.7, service_s=0.1, learn=True)
    world.calls(3, "f")
    for world.now in (5.0, 29.0, 31.0, 40.0):
        world.tell(m.Woken())
    assert loads(world) == 1

    world.loaded("f", "a", load_s=40.0)
    world.finish("c0", 0.1)
    world.finish("c1", 0.1)

    assert loads(world) == 1
    waited = [each.grant.load_s for each in world.log if isinstance(each, m.StartCall)]
    assert waited == [0.0, 40.0, 40.0]
    world.finish("c2", 0.1)
    world.call("later", "f")
    assert world.running["later"].load_s == 0.0


def test_more_than_a_few_first_calls_have_another_copy() -> None:
    world = world_of("f", "a b c", load_s=0.7, service_s=0.1, learn=True)

    world.calls(8, "f")

    assert loads(world) > 1


def test_a_known_function_has_another_copy_where_its_load_is_shorter_than_the_wait() -> None:
    world = world_of("f", "a b c", load_s=0.7, service_s=0.1, learn=True)
    world.call("first", "f")
    world.loaded("f", "a", load_s=1.0)
    world.finish("first", 5.0)
    world.scale("f", 0)

    world.calls(2, "f")

    assert loads(world) == 3
