"""Parked workers on real processes: they are stopped, hold no memory of the device, and wake with the right answer."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_host_tier import DEVICE, Bundles, Lines, weights
from tests.waiting import eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.frames import CallHead
from gpufaas_core.messages import CopyFailed, Event, Evict, Grant, Loaded, Parked, Staged, Unparked, WorkerExited
from gpufaas_core.model import CallId, FunctionId, Need, NodeId, Part, copy_id
from gpufaas_core.units import MiB
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.proc import cpu_seconds, state_of
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.worker import Worker

MEMORY = 160 * MiB
HANDLER = """
    import json, os
    from pathlib import Path
    from gpufaas_functions.loading import load_weights

    FILE = Path(__file__).parent / "w.safetensors"

    def load(device):
        return load_weights(FILE)

    def handle(model, event, context):
        if event.text == "write":
            for each in model.values():
                each.add_(1)
        return json.dumps({"sum": sum(float(each.double().sum()) for each in model.values()), "pid": os.getpid()})
"""
SPINS = HANDLER.replace(
    "def load(device):",
    """def spin():
        import hashlib
        while True:
            hashlib.sha256(bytes(1 << 22))  # without the lock of the interpreter

    def load(device):
        __import__("threading").Thread(target=spin, daemon=True).start()""",
)
HOOKS = (
    HANDLER
    + """
    def park(model):
        print("parks", len(model))

    def wake(model, device):
        print("wakes on", device)

    def self_check(model):
        return {"answer": float(model["a"][0])}
"""
)


class Rig:
    """A node with one CPU device that has room for one model, and a hand that plays the scheduler."""

    def __init__(self, root: Path, budget: int, park: bool = True) -> None:
        self.bundles = Bundles(root)
        self.facts: list[Event] = []
        self.cache = HostCache(HostTier[str](budget))
        self.node = Node(
            open_devices(["cpu:0=220MiB"], NodeId("n")), self.bundles, Lines(), self.facts.append,
            settings=NodeSettings(park=park), enforcement=Enforcement("rlimit"), host_cache=self.cache,
        )  # fmt: skip
        self.number = 0

    async def function(self, name: str, files: dict[str, bytes], source: str = HANDLER, slots: int = 1) -> FunctionId:
        self.bundles.write(name, source, files)
        function = FunctionId(f"{name}.ns@1")
        await self.node.functions.define(WorkerSpec(function, name, "ns", name, "model", Need(slots=slots)))
        return function

    async def call(
        self, function: FunctionId, body: str = "", *, victims: tuple[FunctionId, ...] = (), copy: int = 0
    ) -> dict[str, Any]:
        """On a miss, *victims* are parked."""
        device = self.node._devices[DEVICE]
        cold = copy_id(function, copy) not in device.workers
        names = tuple(copy_id(each, 0) for each in victims)
        self.number += 1
        grant = Grant(
            1, self.number, (CallId(f"c{self.number}"),), function, function.partition(".")[0], (Part(DEVICE, MEMORY),),
            cold, names, copy=copy, parked=names,
        )  # fmt: skip
        exchange = self.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body.encode())
        async with asyncio.timeout(30):
            head, first, whole = await exchange.answer()
            while not whole and (piece := await exchange.chunk()) is not None:
                first += piece
        assert head.status == 200, first

        return {**json.loads(first), "phases": dict(exchange.phases), "tier": exchange.tier}

    async def staged(self, function: FunctionId) -> None:
        await eventually(lambda: any(isinstance(each, Staged) and each.function == function for each in self.facts))

    def parked(self) -> list[FunctionId]:
        return [each.function for each in self.node.snapshot().devices[0].parked]

    def worker(self, function: FunctionId) -> Worker:
        return next(each for each in self.node.workers() if each.spec.function == function)

    def said(self, kind: type[Event]) -> list[Any]:
        return [each for each in self.facts if isinstance(each, kind)]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def rig(budget: int = 700 * MiB, *, park: bool = True) -> Rig:
        made.append(Rig(tmp_path / f"rig{len(made)}", budget, park))
        made[-1].node.host.zygote.start()
        return made[-1]

    yield rig
    for each in made:
        await each.node.close()


async def two(rig: Rig, tmp_path: Path, source: str = HANDLER) -> tuple[FunctionId, FunctionId]:
    """Return functions whose weights are staged; the first one is parked, for the second one."""
    one = await rig.function("one", weights(tmp_path), source)
    other = await rig.function("other", weights(tmp_path, value=2.0))
    await rig.call(one)
    await rig.staged(one)
    await rig.call(other, victims=(one,))
    return one, other


async def test_a_victim_is_parked_and_wakes_with_the_right_answer(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make()
    one, other = await two(rig, tmp_path)
    assert rig.parked() == [one]
    assert rig.said(Parked) == [Parked(one, DEVICE, 0, 0)]
    parked = rig.worker(one)
    assert rig.node.reserved(DEVICE) == MEMORY, "only that of the other one"
    await eventually(lambda: 0 < rig.cache.status().parked_bytes < 100 * MiB)

    woken = await rig.call(one, victims=(other,))

    assert woken["tier"] == "parked"
    assert woken["sum"] == 2 * MiB
    assert woken["pid"] == parked.pid
    assert list(woken["phases"]) == ["room", "wake", "transfer", "check"]
    assert rig.said(Loaded)[-1].tier == "parked"
    assert (rig.node.host.parks.woken, rig.node.host.parks.failed) == (1, 0)
    assert rig.parked() == [other]
    assert (await rig.call(one))["sum"] == 2 * MiB, "the next call is a hit"
    again = await rig.call(other, victims=(one,))
    assert (again["tier"], again["sum"]) == ("parked", 4 * MiB)


async def test_a_parked_worker_uses_no_cpu_although_a_thread_of_it_spins(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make()
    one, other = await two(rig, tmp_path, SPINS)
    pid = rig.worker(one).pid
    assert pid is not None
    await eventually(lambda: state_of(pid) == "T")
    used = cpu_seconds(pid)
    await asyncio.sleep(0.3)

    assert cpu_seconds(pid) == used
    woken = await rig.call(one, victims=(other,))
    assert (woken["tier"], woken["sum"]) == ("parked", 2 * MiB)


async def test_a_model_that_is_not_as_it_was_is_loaded_anew_within_the_same_start(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make()
    one = await rig.function("one", weights(tmp_path))
    other = await rig.function("other", weights(tmp_path, value=2.0))
    assert (await rig.call(one, "write"))["sum"] == 4 * MiB
    await rig.staged(one)
    await rig.call(other, victims=(one,))
    pid = rig.worker(one).pid

    woken = await rig.call(one, victims=(other,))

    assert woken["tier"] == "host"
    assert woken["sum"] == 2 * MiB, "as the weights say"
    assert woken["pid"] != pid
    assert rig.node.host.parks.failed == 1
    assert [each.tier for each in rig.said(Loaded)] == ["disk", "disk", "host"]
    assert not rig.said(CopyFailed) + rig.said(WorkerExited)
    await rig.call(other, victims=(one,))
    assert [each.reason for each in rig.said(Unparked)] == ["it did not wake as it was when it was parked before"]


async def test_hooks_and_the_own_check_of_a_handler_are_used(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make()
    one, other = await two(rig, tmp_path, HOOKS)
    worker = rig.worker(one)
    woken = await rig.call(one, victims=(other,))

    assert (woken["tier"], woken["pid"]) == ("parked", worker.pid)
    assert "parks 2" in worker.output.tail()
    assert "wakes on cpu" in worker.output.tail()
    assert (await rig.call(one, "write"))["sum"] == 4 * MiB
    await rig.call(other, victims=(one,))
    assert (await rig.call(one, victims=(other,)))["tier"] == "host", "its check gave 2, and not 1"


async def test_a_parked_worker_that_is_killed_is_forgotten_and_loaded_anew(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make()
    one, other = await two(rig, tmp_path)
    pid = rig.worker(one).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: bool(rig.said(Unparked)))

    assert rig.parked() == []
    assert rig.cache.status().parked == 0
    assert not rig.said(WorkerExited)
    assert (await rig.call(one, victims=(other,)))["tier"] == "host"


async def test_one_that_dies_while_it_wakes_is_loaded_anew_within_the_same_start(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make()
    one, other = await two(rig, tmp_path)
    worker = rig.worker(one)
    assert worker.pid is not None
    asking = asyncio.create_task(rig.call(one, victims=(other,)))
    await asyncio.sleep(0)
    os.kill(worker.pid, signal.SIGKILL)
    woken = await asking

    assert (woken["tier"], woken["sum"]) in (("host", 2 * MiB), ("parked", 2 * MiB))
    assert not rig.said(CopyFailed)


async def test_a_parked_worker_ends_when_the_scheduler_says_so_or_the_node_stops(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make()
    one, other = await two(rig, tmp_path)
    rig.node.execute(Evict(one, DEVICE))
    await eventually(lambda: all(each.spec.function != one for each in rig.node.workers()))
    assert (rig.parked(), rig.said(Unparked)) == ([], [])

    await rig.call(one, victims=(other,))
    assert rig.parked() == [other]
    pid = rig.worker(other).pid
    assert pid is not None
    await rig.node.close()
    assert state_of(pid) in ("", "Z"), "no stopped process is left behind"


async def test_the_memory_of_parked_workers_is_within_the_budget_of_the_host_tier(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    """Room for one of them at a time, beside the weights."""
    rig = make(180 * MiB)
    one, other = await two(rig, tmp_path)
    third = await rig.function("third", weights(tmp_path, value=3.0))
    most = 0
    for function, victim in ((third, other), (one, third), (other, one), (third, other)):
        await rig.call(function, victims=(victim,))
        status = rig.cache.status()
        most = max(most, status.parked)
        assert status.used <= status.budget
        await eventually(lambda: rig.cache.status().parked_bytes < 100 * MiB)

    assert most >= 1
    assert rig.said(Unparked), "some had to end"
    living = {each.spec.function for each in rig.node.workers() if each.state.name != "ENDING"}
    assert set(rig.parked()) | {third} == living


async def test_parked_workers_give_way_to_weights(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make(190 * MiB)
    one, other = await two(rig, tmp_path)
    await eventually(lambda: 0 < rig.cache.status().parked_bytes < 100 * MiB)
    await rig.function("large", weights(tmp_path, 160 * MiB, 0.5))
    folder = rig.bundles.install("large")
    (file,) = rig.bundles.manifest("large").weights
    rig.cache.asked((file,), folder, time.monotonic())

    await eventually(lambda: rig.parked() == [])
    assert [(each.function, each.reason) for each in rig.said(Unparked)] == [(one, "its node needs the memory")]
    assert {each.spec.function for each in rig.node.workers() if not each.ends} == {other}, "large never started"


async def test_nothing_is_parked_without_the_setting(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make(park=False)
    one, _ = await two(rig, tmp_path)

    assert rig.parked() == []
    assert [each.reason for each in rig.said(Unparked)] == ["this node does not park"]
    assert not rig.node.devices()[0].parks
    await eventually(lambda: all(each.spec.function != one for each in rig.node.workers()))
