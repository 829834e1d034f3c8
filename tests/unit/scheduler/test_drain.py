"""A drained device completes its calls, evicts its copies, and takes nothing new until the drain is undone."""

import pytest

from gpufaas_cache_manager.replacement import make_replacement
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

A, B = DeviceId("n/cpu:0"), DeviceId("n/cpu:1")


def an_engine(policy: str, *functions: str, queued: bool = True) -> Engine:
    engine = Engine(policy=make_policy(policy), replacement=make_replacement("lru"), learn=False)
    for device in (A, B):
        engine.handle(m.DeviceJoined(Device(device, "cpu", 100)), 0.0)
    for name in functions:
        profile = Profile(load_s=1.0, service_s=1.0, occupation=40)
        engine.handle(
            m.FunctionDeployed(
                Function(FunctionId(name), name, need=Need() if queued else Need(0, slots=2), profiles={"*": profile})
            ),
            0.0,
        )
    return engine


def starts(commands: list[m.Command]) -> list[m.Grant]:
    return [each.grant for each in commands if isinstance(each, m.StartCall)]


@pytest.mark.parametrize("policy", ["lb", "lalb", "lalb-o3", "least-wait"])
@pytest.mark.parametrize("queued", [True, False])
def test_a_drained_device_takes_no_call(policy: str, queued: bool) -> None:
    engine = an_engine(policy, "f", "g", queued=queued)
    engine.handle(m.DeviceDrained(A), 1.0)

    for at, name in enumerate(["f", "g", "f", "g"]):
        for grant in starts(engine.handle(m.Arrived(CallId(f"c{at}"), FunctionId(name)), 1.0 + at)):
            assert grant.device == B
            engine.handle(m.Loaded(grant.function, B, 1.0, 40, grant.copy), 1.1 + at)
            engine.handle(m.Finished(grant.call, B, 0.1), 1.2 + at)


@pytest.mark.parametrize("policy", ["lb", "lalb", "lalb-o3", "least-wait"])
@pytest.mark.parametrize("queued", [True, False])
def test_what_runs_there_ends_and_then_its_copy_goes(policy: str, queued: bool) -> None:
    engine = an_engine(policy, "f", queued=queued)
    (grant,) = starts(engine.handle(m.Arrived(CallId("c"), FunctionId("f")), 1.0))
    engine.handle(m.Loaded(FunctionId("f"), grant.device, 1.0, 40), 2.0)

    drained = engine.handle(m.DeviceDrained(grant.device), 2.5)
    ended = engine.handle(m.Finished(CallId("c"), grant.device, 1.0), 3.0)

    assert not [each for each in drained if isinstance(each, m.Evict)]
    assert [each.device for each in ended if isinstance(each, m.Evict)] == [grant.device]
    assert starts(engine.handle(m.Arrived(CallId("d"), FunctionId("f")), 4.0))[0].device != grant.device


def test_idle_copies_go_at_once() -> None:
    engine = an_engine("lalb-o3", "f")
    (grant,) = starts(engine.handle(m.Arrived(CallId("c"), FunctionId("f")), 1.0))
    engine.handle(m.Loaded(FunctionId("f"), grant.device, 1.0, 40), 2.0)
    engine.handle(m.Finished(CallId("c"), grant.device, 1.0), 3.0)

    commands = engine.handle(m.DeviceDrained(grant.device), 4.0)

    assert commands == [m.Evict(FunctionId("f"), grant.device)]


def test_a_minimum_of_copies_is_kept_elsewhere() -> None:
    engine = an_engine("lalb-o3")
    profile = Profile(load_s=1.0, service_s=1.0, occupation=40)
    commands = engine.handle(
        m.FunctionDeployed(Function(FunctionId("f"), "f", profiles={"*": profile}, min_copies=1)), 0.0
    )
    (load,) = [each for each in commands if isinstance(each, m.LoadCopy)]
    engine.handle(m.Loaded(FunctionId("f"), load.device, 1.0, 40), 1.0)

    commands = engine.handle(m.DeviceDrained(load.device), 2.0)

    assert [each.device for each in commands if isinstance(each, m.Evict)] == [load.device]
    assert [each.device for each in commands if isinstance(each, m.LoadCopy)] == [B if load.device == A else A]


@pytest.mark.parametrize("policy", ["lb", "lalb", "lalb-o3", "least-wait"])
def test_calls_wait_while_all_is_drained_and_go_on_when_a_device_is_taken_back(policy: str) -> None:
    engine = an_engine(policy, "f")
    engine.handle(m.DeviceDrained(A), 1.0)
    engine.handle(m.DeviceDrained(B), 1.0)
    assert not starts(engine.handle(m.Arrived(CallId("c"), FunctionId("f")), 2.0))

    (grant,) = starts(engine.handle(m.DeviceDrained(B, drain=False), 3.0))

    assert (grant.call, grant.device) == ("c", B)


@pytest.mark.parametrize("policy", ["lalb", "lalb-o3", "least-wait"])
def test_a_local_queue_goes_elsewhere(policy: str) -> None:
    engine = an_engine(policy, "f")
    (grant,) = starts(engine.handle(m.Arrived(CallId("c0"), FunctionId("f")), 1.0))
    engine.handle(m.Loaded(FunctionId("f"), grant.device, 1.0, 40), 2.0)
    other = B if grant.device == A else A
    engine.handle(m.DeviceDrained(other), 2.0)
    assert not starts(engine.handle(m.Arrived(CallId("c1"), FunctionId("f")), 2.1))
    engine.handle(m.DeviceDrained(other, drain=False), 2.2)

    commands = engine.handle(m.DeviceDrained(grant.device), 2.3)

    started = starts(commands)
    assert not started or started[0].device == other
    ended = engine.handle(m.Finished(CallId("c0"), grant.device, 1.0), 3.0)
    assert {each.device for each in starts([*commands, *ended])} <= {other}
    assert engine.knows(CallId("c1"))
