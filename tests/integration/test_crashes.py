"""Workers that end in the midst of calls: what had ended is answered, and what had not begun runs elsewhere."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tests.integration.conftest import HTTP, Platform
from tests.integration.test_node import Rig
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.errors import GrantRefused, WorkerCrashed
from gpufaas_core.messages import NodeRefused
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager.exchange import Exchange

SLOTS = 8
NOTED = """
    import os, signal, time

    {kind} handle(event, context):
        '''The body: what to do, and a file that says how often the call has begun.'''
        do, _, path = event.text.partition(" ")
        if path:
            with open(path, "a") as file:
                file.write("begun ")
        if do == "segfault":
            signal.raise_signal(signal.SIGSEGV)
        if do == "exit":
            os._exit(3)
        time.sleep(0.002)
        return "done"
"""


@pytest.fixture
async def rig(tmp_path: Path, warm_fork_servers: None) -> AsyncIterator[Rig]:  # noqa: ARG001
    rig = Rig(tmp_path)
    await rig.node.start()
    yield rig
    await rig.node.close()


async def ended(exchange: Exchange) -> str:
    try:
        async with asyncio.timeout(LIMIT_S):
            head, body, _ = await exchange.answer()
    except (WorkerCrashed, GrantRefused) as error:
        return type(error).__name__
    assert (head.status, body) == (200, b"done")
    return "done"


@pytest.mark.parametrize("do", ["segfault", "exit"])
async def test_a_loop_that_crashes_takes_along_only_what_ended_right_before(rig: Rig, tmp_path: Path, do: str) -> None:
    """The calls come together, so that one turn of the worker's loop runs them all."""
    function = await rig.function("noted", NOTED.format(kind="async def"), kind="http", slots=SLOTS)
    await rig.call(rig.grant(function, cold=True))
    exchanges: list[Exchange] = []
    for number in range(SLOTS):
        grant = rig.grant(function)
        body = f"{do if number == SLOTS - 2 else 'end'} {tmp_path / grant.call}"
        exchanges.append(rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body.encode()))

    said = [await ended(each) for each in exchanges]

    assert said[:5] == ["done"] * 5, "the sixth may wait for the one behind it"
    assert said[6:] == ["WorkerCrashed", "GrantRefused"]
    assert not (tmp_path / exchanges[7].grant.call).exists()
    (refused,) = rig.facts_of(NodeRefused)
    assert isinstance(refused, NodeRefused)
    assert refused.blameless


async def test_what_a_worker_that_dies_has_taken_nothing_of_counts_as_refused(rig: Rig) -> None:
    """Workers that die before they begin anything would else have their calls placed again and again."""
    function = await rig.function("noted", NOTED.format(kind="def"), kind="http", slots=2)
    await rig.call(rig.grant(function, cold=True))
    (worker,) = rig.node.workers()
    assert worker.pid
    os.kill(worker.pid, signal.SIGSTOP)
    states = [psutil.Process(each.id) for each in psutil.Process(worker.pid).threads()]
    await eventually(lambda: all(each.status() == psutil.STATUS_STOPPED for each in states), "each thread has stopped")
    calls = []
    for _ in range(2):
        grant = rig.grant(function)
        calls.append(rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b""))

    os.kill(worker.pid, signal.SIGKILL)

    assert [await ended(each) for each in calls] == ["GrantRefused"] * 2
    assert [each.blameless for each in rig.facts if isinstance(each, NodeRefused)] == [False] * 2


def test_calls_that_crash_worker_after_worker_cost_those_nothing_that_had_not_begun(
    platform: Platform, open_path: Path
) -> None:
    """More workers die than a call may be refused; and what had begun does not run again."""
    path = platform.deploy("noted", NOTED.format(kind="def").replace("time.sleep(0.002)", ""), HTTP)
    platform.call(path)
    calls = []
    for number in range(40):
        do, file = "segfault" if number < 6 else "end", open_path / str(number)
        calls.append((file, platform.begin(path, f"{do} {file}".encode())))

    answers = [(file, each.result()) for file, each in calls]

    assert {each.status_code for _, each in answers} <= {200, 502}, [each.text for _, each in answers]
    for file, answer in answers:
        said = file.read_text() if file.exists() else ""
        assert said == "begun " or (answer.status_code, said) == (502, ""), "it was about to say so"
