"""The planner on the platform: the solver is a process; what it answers, and how it may fail."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from tests.solvers import install_solvers
from tests.waiting import eventually

from gpufaas_core.errors import BadPlan, InvalidSpec, PlanConflict, StorageFailed
from gpufaas_core.model import Device, DeviceId, Function, FunctionId, PlacementPlan, Replica, Seconds
from gpufaas_core.plans import Answer, PlanVersion, Snapshot
from gpufaas_planner.planner import Planner
from gpufaas_planner.shell import PlannerShell
from gpufaas_scheduler.solving import solver_named

A, B = DeviceId("n1/cuda:0"), DeviceId("n2/cuda:0")
PINNED = Replica("f.fn", B, share=30, pinned=True)


class Platform:
    """What the planner sees, and the plans of it and others."""

    def __init__(self, *replicas: Replica) -> None:
        functions = tuple(Function(FunctionId(f"{name}.fn@1"), digest="") for name in "fg")
        devices = tuple(Device(each, "gpu", 100) for each in (A, B))
        self.seen = Snapshot(functions, devices, {"f.fn": 10.0})
        self.versions = [PlanVersion(1, replicas, "alice")] if replicas else []
        self.refuses: Exception | None = None
        self.before_apply: Callable[[], object] = bool

    def snapshot(self, _now: Seconds, _profiled: bool) -> Snapshot:
        return self.seen

    def in_force(self) -> PlanVersion | None:
        return self.versions[-1] if self.versions else None

    async def apply(
        self, replicas: Sequence[Replica], *, by: str, why: str, expected: dict[str, float], base: int | None
    ) -> PlanVersion:
        self.before_apply()
        latest = len(self.versions)
        if self.refuses is not None:
            raise self.refuses
        if base != latest:
            raise PlanConflict(f"plan {latest} by {self.versions[-1].by} came in between")
        self.versions.append(PlanVersion(latest + 1, tuple(replicas), by, 0.0, why, expected))
        return self.versions[-1]


@asynccontextmanager
async def planning(solver: str, platform: Platform, limit_s: float = 60.0) -> AsyncIterator[PlannerShell]:
    shell = PlannerShell(solver, platform.snapshot, platform, limit_s=limit_s, look_every_s=0.01)
    task = asyncio.create_task(shell.run())
    try:
        yield shell
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def solving() -> list[psutil.Process]:
    """Return the processes of solvers."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if "gpufaas_scheduler.solving" in each.cmdline():
                found.append(each)
    return found


@pytest.fixture(autouse=True)
def solvers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_solvers(tmp_path, monkeypatch)


async def test_a_plan_is_applied_with_who_why_and_what_is_expected() -> None:
    platform = Platform(PINNED, Replica("g.fn", B))

    async with planning("spread", platform) as shell:
        await eventually(lambda: shell.status()["version"])
        status = shell.status()

    assert platform.versions[1:] == [
        PlanVersion(
            2, (PINNED, Replica("g.fn", A)), "planner spread", 0.0, "devices: n1/cuda:0 came, and 1 more",
            {"calls_per_s": 10.0},
        )
    ]  # fmt: skip
    assert status == {"solver": "spread", "why": "devices: n1/cuda:0 came, and 1 more", "version": 2}


async def test_an_answer_that_is_in_force_already_makes_no_version() -> None:
    platform = Platform(Replica("g.fn", B), Replica("f.fn", A))

    async with planning("spread", platform) as shell:
        await eventually(lambda: "why" in shell.status() and "solving_for_s" not in shell.status())

    assert len(platform.versions) == 1


@pytest.mark.parametrize(
    ("solver", "limit_s", "reason"),
    [
        ("hangs", 0.5, "plan hangs: no answer after 0.5 s"),
        ("dies", 60, "plan dies ended with -9: "),
        ("raises", 60, "plan raises ended with 1: ZeroDivisionError: of the solver"),
        ("cannot", 60, "no model has a profile"),
        ("babbles", 60, "solver babbles answered what is no plan: JSON is malformed: invalid character (byte 0)"),
        ("hoards", 60, "plan hoards ended with 1: MemoryError"),
        ("forgets_pins", 60, "solver forgets_pins changes what is pinned: f.fn on n2/cuda:0"),
    ],
)
async def test_a_solver_that_fails_leaves_the_plan_in_force_and_the_status_says_so(
    solver: str, limit_s: float, reason: str
) -> None:
    platform = Platform(PINNED)

    async with planning(solver, platform, limit_s) as shell:
        await eventually(lambda: "failures" in shell.status())
        status = shell.status()

    assert [each.version for each in platform.versions] == [1]
    assert (status["last_error"], status["failures"], status["version"]) == (reason, 1, 0)
    assert "solving_for_s" not in status
    assert status["failing_for_s"] + status["retry_in_s"] == pytest.approx(10)


@pytest.mark.parametrize("error", [BadPlan("replica 1 cannot be"), StorageFailed("the disk is full")])
async def test_a_plan_that_is_refused_is_a_failed_attempt(error: Exception) -> None:
    platform = Platform()
    platform.refuses = error

    async with planning("spread", platform) as shell:
        await eventually(lambda: "failures" in shell.status())
        failed = shell.status()
        platform.refuses = None
        mended = await shell.asked("alice asked")

    assert failed["last_error"] == str(error)
    assert mended == {"solver": "spread", "why": "alice asked", "version": 1}


async def test_who_applied_meanwhile_wins_and_the_planner_plans_again_from_that() -> None:
    platform = Platform()
    theirs = PlanVersion(1, (PINNED,), "bob")

    def first() -> None:
        platform.before_apply = bool
        platform.versions.append(theirs)

    platform.before_apply = first
    async with planning("spread", platform) as shell:
        await eventually(lambda: shell.status()["version"])
        assert "failures" not in shell.status()

    assert platform.versions[0] == theirs
    assert platform.versions[1].replicas == (PINNED, Replica("g.fn", A))
    assert platform.versions[1].why == "plan 1 by bob came in between"


async def test_while_a_solver_hangs_nothing_waits_and_the_end_ends_it() -> None:
    async with planning("hangs", Platform()) as shell:
        await eventually(solving)
        (process,) = solving()
        shell.asked("alice asked")

        assert shell.status()["why"] != "alice asked"  # never two at a time

    assert not process.is_running()


async def test_who_asks_for_a_plan_hears_of_one_that_was_made_after_that() -> None:
    platform = Platform()
    first = iter([lambda: platform.versions.append(PlanVersion(1, (PINNED,), "bob"))])
    platform.before_apply = lambda: next(first, bool)()

    async with planning("spread", platform) as shell:
        said = await shell.asked("alice asked")

    assert (said["version"], said["why"]) == (2, "plan 1 by bob came in between")


async def test_without_a_solver_it_has_nothing_to_say() -> None:
    async with planning("", Platform()) as shell:
        assert await shell.asked("alice asked") == shell.status() == {}


def judged(answer: Answer, *in_force: Replica) -> Answer | None:
    return Planner("s", Platform().snapshot).judged(Snapshot(plan=PlacementPlan(1, in_force)), answer)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer((replace(PINNED, share=40),)), "changes what is pinned: f.fn on n2/cuda:0"),
        (Answer((replace(PINNED, pinned=False),)), "changes what is pinned: f.fn on n2/cuda:0"),
        (Answer((PINNED, Replica("g.fn", A, pinned=True))), "pins what is not: g.fn on n1/cuda:0"),
    ],
)
def test_pins_are_peoples(answer: Answer, reason: str) -> None:
    with pytest.raises(BadPlan, match=reason):
        judged(answer, PINNED)


def test_the_order_of_replicas_makes_no_other_plan() -> None:
    other = Replica("g.fn", A)
    assert judged(Answer((PINNED, other)), other, PINNED) is None
    assert judged(Answer(())) is None
    assert judged(Answer((other,))) == Answer((other,))


def test_an_unknown_solver_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solver_named("spread") == "spread"
    with pytest.raises(InvalidSpec, match="no solver is called 'spraed': choose one of babbles, cannot, dies"):
        solver_named("spraed")
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(InvalidSpec, match=r"none is installed \(entry points gpufaas.solvers\)"):
        solver_named("spread")


def test_a_snapshot_is_json() -> None:
    seen = replace(Platform().seen, plan=PlacementPlan(3, (PINNED,)))
    encoded = msgspec.json.encode(seen)

    assert msgspec.json.decode(encoded, type=Snapshot) == seen
    assert json.loads(encoded)["plan"]["replicas"] == [
        {"function": "f.fn", "device": "n2/cuda:0", "share": 30, "pinned": True}
    ]
