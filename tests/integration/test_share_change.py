"""A share that a worker has for good changes by a standby, a switch and a drain: here the cores that it is bound to."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.integration.test_node import DEVICE, Rig
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.errors import GrantRefused, WorkerCrashed
from gpufaas_core.messages import Abort, CopyFailed, Finished, Grant, NodeRefused, SetLimit, ShareKept, WorkerExited
from gpufaas_core.model import FunctionId, Need
from gpufaas_core.units import MiB
from gpufaas_gpu_manager.worker import Worker

CORES = """
    import os, pathlib, time
    def load(device):
        if os.environ.get("FAILS") and len(os.sched_getaffinity(0)) > 1:
            raise ValueError("not with two")
    def handle(model, event, context):
        wait = pathlib.Path(event.text or "/")
        if event.text:
            wait.with_suffix(".began").touch()
        while not wait.exists():
            time.sleep(0.005)
        return str(len(os.sched_getaffinity(0)))
"""
pytestmark = [
    pytest.mark.usefixtures("warm_fork_servers"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core: there are no shares of it"),
]


async def with_half(rig: Rig, memory: int = 100 * MiB, **env: str) -> FunctionId:
    """Load a function that has one of the two cores."""
    await rig.node.start()
    function = await rig.function("cores", CORES)
    rig.node.functions.expect(replace(rig.node.functions.specs[function], need=Need(50, "share"), env=env))
    assert await rig.call(rig.grant(function, cold=True, memory=memory)) == (200, b"1")
    return function


async def begun(rig: Rig, grant: Grant, gate: Path) -> "asyncio.Future[tuple[int, bytes]]":
    """Return a call that runs until there is *gate*."""
    running = asyncio.ensure_future(rig.call(grant, str(gate).encode()))
    await eventually(gate.with_suffix(".began").exists)
    return running


async def replaced_during_a_call(rig: Rig, tmp_path: Path) -> "tuple[Worker, Grant, asyncio.Future[tuple[int, bytes]]]":
    """Return a worker that another one with another share has replaced, and its call, which does not end by itself."""
    function = await with_half(rig)
    old = rig.node.workers()[0]
    grant = rig.grant(function)
    running = await begun(rig, grant, tmp_path / "never")
    rig.node.execute(SetLimit(function, DEVICE, share=100))
    await eventually(lambda: rig.node.workers()[-1].takes_calls)
    await eventually(lambda: old.replaced)
    return old, grant, running


def workers(rig: Rig) -> int:
    return len([each for each in rig.node.workers() if not each.ends])


@pytest.fixture
def rig_of(tmp_path: Path) -> Callable[[str], Rig]:
    return lambda memory: Rig(tmp_path, f"{memory},cores=2", shares_by="affinity")


async def test_the_old_worker_serves_until_the_standby_is_ready_and_ends_after_its_last_call(
    rig_of: Callable[[str], Rig], tmp_path: Path
) -> None:
    rig = rig_of("400MiB")
    function = await with_half(rig)
    gate = tmp_path / "gate"
    running = await begun(rig, rig.grant(function), gate)

    rig.node.execute(SetLimit(function, DEVICE, share=100))
    assert workers(rig) == 2
    await eventually(lambda: rig.node.workers()[-1].takes_calls)

    assert await rig.call(rig.grant(function)) == (200, b"2")
    snapshot = rig.node.snapshot().devices[0]
    assert [each.begun for each in snapshot.running] == [True], "the call on the old worker is not forgotten"
    assert len(snapshot.residents) == 1
    gate.touch()
    assert await running == (200, b"1")
    await eventually(lambda: rig.node.reserved(DEVICE) == 100 * MiB)
    assert len(rig.node.workers()) == 1
    assert not rig.facts_of(WorkerExited)
    assert len(rig.facts_of(Finished)) == 3
    await rig.node.close()


async def test_without_memory_for_both_the_old_one_ends_first_and_calls_wait(rig_of: Callable[[str], Rig]) -> None:
    rig = rig_of("150MiB")
    function = await with_half(rig)

    rig.node.execute(SetLimit(function, DEVICE, share=100))
    rig.node.execute(SetLimit(function, DEVICE, share=100))

    assert await rig.call(rig.grant(function)) == (200, b"2")
    assert len(rig.node.workers()) == 1
    rig.node.evict(function, DEVICE)
    await eventually(lambda: rig.node.reserved(DEVICE) == 0)
    await rig.node.close()


async def test_a_standby_that_does_not_load_changes_nothing(rig_of: Callable[[str], Rig]) -> None:
    rig = rig_of("400MiB")
    function = await with_half(rig, FAILS="1")

    rig.node.execute(SetLimit(function, DEVICE, share=100))
    await eventually(lambda: rig.facts_of(ShareKept))

    assert len(rig.node.workers()) == 1
    assert await rig.call(rig.grant(function)) == (200, b"1")
    assert not rig.facts_of(CopyFailed)
    (kept,) = rig.facts_of(ShareKept)
    assert isinstance(kept, ShareKept)
    assert (kept.function, kept.copy, kept.share) == (function, 0, 50)
    assert "ValueError: not with two" in kept.reason
    assert rig.node.reserved(DEVICE) == 100 * MiB
    await rig.node.close()


async def test_when_the_old_worker_dies_its_call_is_over_and_the_copy_lives(
    rig_of: Callable[[str], Rig], tmp_path: Path
) -> None:
    rig = rig_of("400MiB")
    old, grant, running = await replaced_during_a_call(rig, tmp_path)

    old.kill("for this test")

    with pytest.raises(Exception, match="for this test"):
        await running
    assert [each.ok for each in rig.facts_of(Finished) if each.call == grant.call] == [False]  # type: ignore[attr-defined]
    assert not rig.facts_of(WorkerExited)
    assert await rig.call(rig.grant(grant.function)) == (200, b"2")
    await rig.node.close()


async def test_when_the_old_worker_crashes_its_call_fails(rig_of: Callable[[str], Rig], tmp_path: Path) -> None:
    rig = rig_of("400MiB")
    old, grant, running = await replaced_during_a_call(rig, tmp_path)

    os.kill(old.pid or 0, signal.SIGKILL)

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(WorkerCrashed, match="SIGKILL"):
            await running
    assert [each.ok for each in rig.facts_of(Finished) if each.call == grant.call] == [False]  # type: ignore[attr-defined]
    assert await rig.call(rig.grant(grant.function)) == (200, b"2")
    await rig.node.close()


async def test_when_the_old_worker_dies_a_call_that_the_policy_has_stopped_is_placed_again(
    rig_of: Callable[[str], Rig], tmp_path: Path
) -> None:
    rig = rig_of("400MiB")
    old, grant, running = await replaced_during_a_call(rig, tmp_path)
    rig.node.execute(Abort(grant.call, DEVICE, True, "the policy stopped the call", grant.number))

    old.kill("for this test")

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(GrantRefused):
            await running
    assert [each.call for each in rig.facts_of(NodeRefused)] == [grant.call]  # type: ignore[attr-defined]
    assert not [each for each in rig.facts_of(Finished) if each.call == grant.call]  # type: ignore[attr-defined]
    await rig.node.close()
