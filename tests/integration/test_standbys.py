"""Standbys on real processes: a start takes one that is there, and whatever happens to one costs a fork at most."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.test_node import DEVICE, Rig
from tests.waiting import LIMIT_S, eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import CopyFailed, Loaded, Measured, WorkerExited
from gpufaas_core.model import FunctionId, NodeId, copy_id
from gpufaas_core.units import MiB
from gpufaas_gpu_manager import standbys
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.settings import NodeSettings

SAYS = """
    import os, sys, resource
    seen = []
    def load(device):
        return bytearray(20 << 20)
    def handle(model, event, context):
        seen.append(event.text)
        print("printed by", event.text)
        limit = resource.getrlimit(resource.RLIMIT_DATA)
        return {"pid": os.getpid(), "seen": seen, "limit": limit, "session": os.getsid(0),
                "name": open("/proc/self/comm").read().strip(), "fds": len(os.listdir("/proc/self/fd")),
                "cgroup": open("/proc/self/cgroup").read(), "variable": os.environ.get("OPENFAAS_NAME")}
"""
TAKES = """
    def load(device):
        return None
    def handle(model, event, context):
        return str(len(bytearray(300 << 20)))
"""


def node_of(rig: Rig, size: int, mode: str = "auto") -> Node:
    return Node(
        open_devices(["cpu:0=200MiB"], NodeId("n")), rig.bundles, rig.logs, rig.facts.append,
        settings=NodeSettings(standby=size), enforcement=Enforcement(mode),  # type: ignore[arg-type]
        host_cache=HostCache(HostTier(0)),
    )  # fmt: skip


@pytest.fixture(params=["auto", "watcher"])
async def rig(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    warm_fork_servers: object,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Rig]:
    monkeypatch.setattr(standbys, "_FAILED_S", 0.05)
    monkeypatch.setattr(standbys, "_TAKEN_S", LIMIT_S)  # one that is slow is taken, too
    rig = Rig(tmp_path)
    rig.node = node_of(rig, 1, request.param)
    await rig.node.start()
    await standing(rig)
    yield rig
    await rig.node.close()


async def standing(rig: Rig) -> int:
    """Return the process id of the standby, once there is one that waits."""
    pool = rig.node.host.standbys

    def named() -> bool:
        return bool(pool.pids) and psutil.pid_exists(pool.pids[0]) and psutil.Process(pool.pids[0]).name() == "standby"

    await eventually(named)
    return pool.pids[0]


async def start(rig: Rig, function: FunctionId) -> dict[str, object]:
    import json

    status, body = await rig.call(rig.grant(function, cold=True), b"x")
    assert status == 200, body
    found: dict[str, object] = json.loads(body)
    return found


async def end(rig: Rig, function: FunctionId) -> None:
    rig.node.evict(function, DEVICE)
    await eventually(lambda: not rig.node.workers())


async def test_a_start_takes_the_standby_and_another_takes_its_place(rig: Rig) -> None:
    one, two = await rig.function("one", SAYS), await rig.function("two", SAYS)
    pids = []
    for function in (one, two, one):
        waits = await standing(rig)
        said = await start(rig, function)
        assert said["pid"] == said["session"] == waits
        assert said["seen"] == ["x"], "nothing of another function, or of an earlier worker, is in it"
        assert said["variable"] == function.partition(".")[0]
        pids.append(waits)
        await end(rig, function)
        assert not psutil.pid_exists(waits), "it is never used again"

    assert len(set(pids)) == 3
    assert rig.node.host.standbys.taken == 3
    await eventually(lambda: rig.logs.lines.count("printed by x") == 3)


async def test_a_worker_that_loads_before_its_process_is_known_is_limited(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit could not be changed: it ran out of memory that the scheduler had given it."""
    accepts = standbys.Standby.accepts

    async def late(*args: Any) -> bool:
        accepted = await accepts(*args)
        (worker,) = rig.node.workers()
        await eventually(lambda: worker._early or worker.ready_head)
        return accepted

    monkeypatch.setattr(standbys.Standby, "accepts", late)
    function = await rig.function("says", SAYS)
    started = asyncio.create_task(start(rig, function))
    await eventually(lambda: rig.facts_of(Loaded))
    (worker,) = rig.node.workers()
    assert worker.pid is not None
    before = resource.prlimit(worker.pid, resource.RLIMIT_DATA)
    rig.node.resize(function, DEVICE, worker.memory + 10 * MiB)
    assert resource.prlimit(worker.pid, resource.RLIMIT_DATA) > before
    await started


async def test_a_worker_that_was_a_standby_is_limited_as_one_that_was_forked(rig: Rig) -> None:
    function = await rig.function("says", SAYS)
    standby = await start(rig, function)
    await eventually(lambda: len(rig.facts_of(Measured)) == 1)
    await end(rig, function)
    rig.node.host.standbys.close()
    forked = await start(rig, function)
    await eventually(lambda: len(rig.facts_of(Measured)) == 2)
    await end(rig, function)

    name = lambda said: [line.rpartition("/")[2] for line in str(said["cgroup"]).splitlines()]  # noqa: E731
    groups = [[each.partition("-")[0] for each in name(said)] for said in (standby, forked)]
    if rig.node.enforcement.name.startswith("cgroup"):
        assert "standby" in groups[0]
    assert [each.replace("standby", "worker") for each in groups[0]] == groups[1]
    assert standby["fds"] == forked["fds"]
    assert standby["name"] == forked["name"]
    soft, hard = standby["limit"], forked["limit"]
    for ours, theirs in zip(soft, hard, strict=True):  # type: ignore[call-overload]
        assert abs(ours - theirs) < 4 * MiB
    measured = [each.occupation for each in rig.facts_of(Measured) if isinstance(each, Measured)]
    assert abs(measured[0] - measured[1]) < 6 * MiB, "what a standby took before is in neither twice"


async def test_a_worker_that_was_a_standby_cannot_have_more_than_its_reservation(rig: Rig) -> None:
    function = await rig.function("takes", TAKES)
    await standing(rig)

    with pytest.raises(GpufaasError, match="out of memory"):
        await rig.call(rig.grant(function, cold=True))

    assert rig.node.host.standbys.taken == 1


async def test_no_standby_is_charged_to_a_device_and_its_memory_is_said(rig: Rig) -> None:
    await standing(rig)
    await eventually(lambda: rig.node.host.standbys.status()["memory"] > 1 * MiB)  # it has just been forked

    said = rig.node.host.standbys.status()

    assert rig.node.reserved(DEVICE) == 0
    assert said["ready"] == 1
    assert 1 * MiB < said["memory"] < 40 * MiB


async def test_a_standby_that_is_killed_is_replaced_and_nobody_notices(rig: Rig) -> None:
    function = await rig.function("says", SAYS)
    killed = await standing(rig)

    os.kill(killed, signal.SIGKILL)
    said = await start(rig, function)

    assert said["pid"] != killed
    await end(rig, function)
    assert await standing(rig) != killed
    assert not rig.facts_of(CopyFailed) + rig.facts_of(WorkerExited)


async def test_a_standby_that_is_stopped_costs_a_moment_and_no_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "_TAKEN_S", 0.05)
    function = await rig.function("says", SAYS)
    stopped = await standing(rig)
    os.kill(stopped, signal.SIGSTOP)

    said = await start(rig, function)

    assert said["pid"] != stopped
    await eventually(lambda: not psutil.pid_exists(stopped))
    assert rig.node.host.standbys.missed == 1


async def test_standbys_end_with_their_fork_server_and_the_next_one_has_new_ones(rig: Rig) -> None:
    function = await rig.function("says", SAYS)
    before = await standing(rig)
    server = rig.node.host.fork_server.pid
    assert server is not None

    os.kill(server, signal.SIGKILL)
    await eventually(lambda: not psutil.pid_exists(before))

    assert await standing(rig) != before
    assert (await start(rig, function))["seen"] == ["x"]


async def test_the_standby_of_a_fork_server_that_is_stuck_is_not_used(rig: Rig) -> None:
    function = await rig.function("says", SAYS)
    before = await standing(rig)
    server = rig.node.host.fork_server.pid
    assert server is not None

    os.kill(server, signal.SIGSTOP)
    await eventually(lambda: rig.node.host.fork_server.pid != server)

    await eventually(lambda: not psutil.pid_exists(before) or psutil.Process(before).status() == "zombie")
    assert (await start(rig, function))["pid"] != before


async def test_a_worker_that_waits_for_memory_has_a_process_when_that_is_there(rig: Rig) -> None:
    """Both standby and fork beside the eviction: two functions that take turns on a device that has room for one."""
    functions = [await rig.function(name, SAYS) for name in ("one", "two")]
    rig.node.host.standbys._later = lambda _: None  # type: ignore[method-assign] # it is not refilled for other reasons
    rig.node.host.standbys._timers.cancel("fill")
    await start(rig, functions[0])
    assert rig.node.host.standbys.pids == []

    grant = rig.grant(functions[1], cold=True, victims=(copy_id(functions[0], 0),))
    answer = asyncio.ensure_future(rig.call(grant, b"x"))

    assert (await answer)[0] == 200
    assert (rig.node.host.standbys.taken, rig.node.host.standbys.missed) == (2, 0)


async def test_standbys_end_with_the_node(tmp_path: Path, warm_fork_servers: object) -> None:  # noqa: ARG001
    rig = Rig(tmp_path)
    rig.node = node_of(rig, 3)
    await rig.node.start()
    await eventually(lambda: len(rig.node.host.standbys.pids) == 3)
    pids = rig.node.host.standbys.pids

    await rig.node.close()

    assert not any(map(psutil.pid_exists, pids))
