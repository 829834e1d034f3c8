"""The control loop of scaling: its measurements, and that it acts only on changes."""

import asyncio
from dataclasses import replace

import pytest
from tests.waiting import LIMIT_S

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core.model import (
    Device,
    DeviceId,
    DeviceStatus,
    EngineStatus,
    Function,
    FunctionId,
    PlannedCopy,
    PlanStatus,
    ResidentStatus,
    Seconds,
)
from gpufaas_core.scaling import ScalingRule
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.scaler import Scaler, Watched
from gpufaas_scheduler.service import HELD_S, SchedulerService

ECHO = FunctionId("echo.openfaas-fn@1")
RPS = ScalingRule(type="rps", target=10, target_proportion=1.0, down_window_s=0)


class Platform:
    """Counts that the test sets, and an engine that does as it is told."""

    def __init__(self, rule: ScalingRule = RPS, copies: int = 1) -> None:
        self.echo: Watched | None = Watched(ECHO, rule, 0, 0, 0)
        self.copies = copies
        self.desired: dict[FunctionId, int] = {}
        self.held: tuple[FunctionId, ...] = ()
        self.plan: PlanStatus | None = None
        self.told: list[tuple[FunctionId, int]] = []
        self.scaler = Scaler(self.watched, self.status, self.scale, every_s=0.001)

    def watched(self) -> dict[str, Watched]:
        return {} if self.echo is None else {"echo.openfaas-fn": self.echo}

    def status(self) -> EngineStatus:
        assert self.echo is not None
        held = (ResidentStatus(self.echo.function, 1, 0, False, False, 0.0),)
        devices = tuple(
            DeviceStatus(Device(DeviceId(f"n/cpu:{i}"), "cpu", 1), 0, False, held, 0, 0, 0, 0, 0, 0.0)
            for i in range(self.copies)
        )
        return EngineStatus("lalb", devices, {}, {}, self.desired, held=self.held, plan=self.plan)

    def scale(self, function: FunctionId, copies: int, hold_s: Seconds) -> None:
        assert hold_s == 0.0, "what the autoscaler says holds nothing"
        self.told.append((function, copies))
        self.desired[function] = copies

    def tick(self, now: float, **counts: float) -> list[tuple[FunctionId, int]]:
        assert self.echo is not None
        self.echo = replace(self.echo, **counts)
        self.told = []
        self.scaler.tick(now)
        return self.told


@pytest.mark.parametrize(
    ("named", "state", "scaled"),
    [
        ("echo.openfaas-fn", "resident", []),
        ("echo.openfaas-fn", "absent", []),
        ("echo.openfaas-fn", "away", [(ECHO, 3)]),
        ("other.openfaas-fn", "resident", [(ECHO, 3)]),
    ],
)
def test_a_function_that_the_plan_in_force_names_is_left_to_it_while_its_device_is_there(
    named: str, state: str, scaled: list[tuple[FunctionId, int]]
) -> None:
    platform = Platform()
    platform.plan = PlanStatus(3, (PlannedCopy(named, DeviceId("n/cpu:0"), state=state),))

    platform.tick(0.0)

    assert platform.tick(1.0, begun=25, finished=25) == scaled


def test_what_was_measured_before_a_plan_came_does_not_count_after_it_went() -> None:
    platform = Platform()
    platform.tick(0.0)
    platform.plan = PlanStatus(1, (PlannedCopy("echo.openfaas-fn", DeviceId("n/cpu:0"), state="resident"),))
    platform.tick(1.0, begun=50, finished=50)
    platform.plan = PlanStatus(2)

    assert platform.tick(2.0) == []


def test_completions_per_second_are_measured_over_some_seconds_and_said_once() -> None:
    platform = Platform()

    assert platform.tick(0.0) == []
    assert platform.tick(1.0, begun=25, finished=25) == [(ECHO, 3)]
    assert platform.tick(2.0, begun=50, finished=50) == []
    for second in range(3, 9):
        platform.tick(float(second))
    assert platform.desired == {ECHO: 1}


def test_cpu_time_becomes_millicores_and_a_worker_that_ended_does_not_count_backwards() -> None:
    platform = Platform(ScalingRule(type="cpu", target=500, target_proportion=1.0, down_window_s=0))
    platform.tick(0.0, cpu_s=10.0)

    assert platform.tick(1.0, cpu_s=11.0) == [(ECHO, 2)]
    assert platform.tick(2.0, cpu_s=2.0) == [(ECHO, 1)]


def test_an_idle_function_goes_to_zero_and_is_left_there() -> None:
    platform = Platform(ScalingRule(zero=True, zero_duration_s=60))
    platform.tick(0.0)
    platform.tick(10.0, begun=1, finished=1)

    assert platform.tick(69.0) == []
    assert platform.tick(70.0) == [(ECHO, 0)]
    assert platform.tick(71.0) == []


def test_a_function_that_woke_up_by_a_call_is_watched_again() -> None:
    platform = Platform(ScalingRule(zero=True, zero_duration_s=60, min=2))
    platform.tick(0.0)
    platform.tick(60.0)
    assert platform.desired == {ECHO: 0}

    platform.desired = {}  # the engine, at the call
    assert platform.tick(61.0, begun=1, inflight=1) == [(ECHO, 2)]


def test_an_update_keeps_what_was_measured() -> None:
    platform = Platform()
    platform.tick(0.0)
    platform.tick(1.0, begun=25, finished=25)
    new = FunctionId("echo.openfaas-fn@2")

    assert platform.tick(2.0, begun=50, finished=50, function=new) == [(new, 3)]


def test_a_number_that_was_set_holds_until_the_load_asks_for_more_or_its_time_is_over() -> None:
    platform = Platform()
    platform.tick(0.0)
    platform.tick(1.0, begun=25, finished=25)
    platform.desired, platform.held = {ECHO: 4}, (ECHO,)

    assert platform.tick(2.0, begun=30, finished=30) == [], "30 calls in 2 s need two copies"
    assert platform.tick(3.0, begun=150, finished=150) == [(ECHO, 5)]
    platform.desired, platform.held = {ECHO: 4}, (ECHO,)
    assert [platform.tick(float(second)) for second in range(9, 99)] == [[]] * 90
    platform.held = ()
    assert platform.tick(130.0) == [(ECHO, 1)]


def test_a_zero_that_was_set_holds_though_calls_run_that_came_before() -> None:
    platform = Platform(ScalingRule(min=2))
    platform.tick(0.0, begun=1)
    platform.desired, platform.held = {ECHO: 0}, (ECHO,)

    assert platform.tick(1.0, begun=9, inflight=9) == []


async def test_the_service_holds_what_it_was_told_and_not_what_the_autoscaler_says() -> None:
    service = SchedulerService(Engine(policy=make_policy("lb"), replacement=Lru()))
    service.deploy(Function(ECHO, "digest"))

    service.scale(ECHO, 3)
    now, later = service.status(), service.engine.status(service.driver.now() + HELD_S)
    service.scale(ECHO, 4)
    service.scale(ECHO, 5, 0.0)
    scaled = service.status()

    assert (now.desired, now.held) == ({ECHO: 3}, (ECHO,))
    assert (later.desired, later.held) == ({ECHO: 3}, ())
    assert (scaled.desired, scaled.held) == ({ECHO: 5}, ())


def test_of_a_function_that_is_scaled_by_alerts_the_load_changes_nothing() -> None:
    platform = Platform(ScalingRule(type="alert", max=5))
    platform.tick(0.0)
    platform.desired = {ECHO: 3}

    assert platform.tick(1.0, begun=900, finished=900) == []
    assert platform.tick(99.0) == []


def test_a_removed_function_is_forgotten() -> None:
    platform = Platform()
    platform.tick(0.0)

    echo, platform.echo = platform.echo, None
    platform.scaler.tick(1.0)
    platform.echo = echo

    assert platform.tick(2.0, begun=900, finished=900) == [], "what came before it was there again is no load of it"


async def test_it_runs_until_it_is_told_to_stop() -> None:
    platform = Platform(ScalingRule(min=2))
    stopped = asyncio.Event()

    def scale(function: FunctionId, copies: int, hold_s: Seconds) -> None:
        platform.scale(function, copies, hold_s)
        stopped.set()

    scaler = Scaler(platform.watched, platform.status, scale, every_s=0.001)
    platform.echo = Watched(ECHO, ScalingRule(min=2), 1, 0, 1)

    await asyncio.wait_for(scaler.run(stopped), LIMIT_S)

    assert platform.told == [(ECHO, 2)]
