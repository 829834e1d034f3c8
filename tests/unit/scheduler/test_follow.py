"""A device whose call ends takes the next one of its function without asking the policy, where that alters nothing."""

import random
from heapq import heappop, heappush

import pytest
from tests.unit.scheduler.world import state_of

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

POLICIES = ["lb", "lalb", "lalb-o3", "lalb-o3:o3_limit=1", "least-wait", "least-wait:wait_bound_s=2"]


class Cluster:
    """Two devices with room for two of three models each, and calls that come in bursts of mostly one function."""

    def __init__(self, policy: str, seed: int, *, asks: bool) -> None:
        """:param asks: the policy is asked each time"""
        self.engine = Engine(policy=make_policy(policy), replacement=Lru(), learn=True)
        self.runs = 0
        plan = self.engine.policy.plan
        self.engine.policy.plan = lambda view: (self._count(), plan(view))[1]  # type: ignore[method-assign]
        self.world = state_of(self.engine)
        if asks:
            self.world.follows = None
        self.rng = random.Random(seed)
        self.said: list[m.Command] = []
        self.ends: list[tuple[float, int, CallId, DeviceId]] = []
        self.now = 0.0
        self.timer_at: float | None = None
        """As `EngineDriver` has it."""
        for name in "abc":
            self.tell(m.FunctionDeployed(Function(FunctionId(name), "", profiles={"*": Profile(0.4, 0.1, 40)})))
        for name in "01":
            self.tell(m.DeviceJoined(Device(DeviceId(f"n/{name}"), "gpu", 100)))

    def _count(self) -> None:
        self.runs += 1

    def tell(self, event: m.Event) -> None:
        commands = self.engine.handle(event, self.now)
        if self.timer_at is None or self.engine.may_wake_before(self.timer_at):
            wake_at = self.engine.wake_at
            if wake_at is not None and (self.timer_at is None or wake_at < self.timer_at):
                self.timer_at = wake_at
        if (at := self.engine.wake_at) is not None:
            assert self.timer_at is not None
            assert self.timer_at <= at
        for each in commands:
            self.said.append(each)
            if isinstance(each, m.StartCall):
                grant = each.grant
                load_s = 0.4 if grant.cold else 0.0
                if grant.cold:
                    heappush(self.ends, (self.now + load_s, -grant.number, CallId(f"{grant.function}"), grant.device))
                took_s = load_s + 0.1 * self.rng.uniform(0.5, 2.0)
                heappush(self.ends, (self.now + took_s, grant.number, grant.call, grant.device))
            elif isinstance(each, m.LoadCopy):
                heappush(self.ends, (self.now + 0.4, -each.number, CallId(f"{each.function}"), each.device))

    def play(self, calls: int) -> None:
        came, next_at, mostly = 0, 0.0, "a"
        while came < calls or self.ends:
            wake_at = self.engine.wake_at
            at, _, call, device = self.ends[0] if self.ends else (1e9, 0, CallId(""), DeviceId(""))
            if came < calls and next_at <= at:
                self.now, came = max(self.now, next_at), came + 1
                function = mostly if self.rng.random() < 0.98 else self.rng.choice("abc")
                self.tell(m.Arrived(CallId(f"call {came}"), FunctionId(function), self.now + self.rng.choice((2, 60))))
                next_at += self.rng.expovariate(18.0)
                if came % 40 == 0:
                    mostly, next_at = self.rng.choice("abc"), next_at + self.rng.random()
            elif wake_at is not None and wake_at < at:
                self.now, self.timer_at = wake_at, None
                self.tell(m.Woken())
            else:
                self.now, number, call, device = heappop(self.ends)
                if self.timer_at is not None and self.timer_at <= self.now:
                    self.timer_at = None
                if number < 0:
                    copy = self.world.devices[device].copies[FunctionId(call)]
                    self.tell(m.Loaded(FunctionId(call), device, 0.4, 10, int(copy.partition("#")[2])))
                else:
                    self.tell(m.Finished(call, device, 0.1))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_commands_are_those_of_a_policy_that_is_always_asked(policy: str) -> None:
    for seed in range(4):
        asked, follows = Cluster(policy, seed, asks=True), Cluster(policy, seed, asks=False)
        for each in (asked, follows):
            each.play(400)
        assert follows.said == asked.said
        if policy != "lb":
            assert follows.runs < 0.9 * asked.runs, "and it is asked less"


def test_a_policy_that_does_not_say_so_is_asked() -> None:
    cluster = Cluster("lb", 1, asks=False)
    assert cluster.world.follows is None
