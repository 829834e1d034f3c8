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
from tests.integration.conftest import Platform
from tests.integration.test_host_tier import DEVICE, Bundles, Lines, weights
from tests.waiting import LIMIT_S, eventually, until

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.messages import (
    CopyFailed,
    Event,
    EvictCopy,
    Grant,
    LoadCopy,
    Loaded,
    Parked,
    Staged,
    Unparked,
    WorkerExited,
)
from gpufaas_core.model import CallId, FunctionId, Need, NodeId, Part, copy_id
from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.parked import ParkedWorkers
from gpufaas_gpu_manager.proc import state_of
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

    def __init__(self, root: Path, budget: int) -> None:
        self.bundles = Bundles(root)
        self.facts: list[Event] = []
        self.cache = HostCache(HostTier[str, int](budget))
        self.node = Node(
            open_devices(["cpu:0=220MiB"], NodeId("n")), self.bundles, Lines(), self.facts.append,
            settings=NodeSettings(park="on"), enforcement=Enforcement("rlimit"), host_cache=self.cache,
        )  # fmt: skip
        self.number = 0

    async def function(self, name: str, files: dict[str, bytes], source: str = HANDLER, slots: int = 1) -> FunctionId:
        self.bundles.write(name, source, files)
        function = FunctionId(f"{name}.ns@1")
        await self.node.functions.define(WorkerSpec(function, name, "ns", name, "model", Need(slots=slots)))
        return function

    async def call(
        self, function: FunctionId, body: str = "", *, victims: tuple[FunctionId, ...] = ()
    ) -> dict[str, Any]:
        return await self.answer(self.begin(function, body, victims=victims))

    def begin(self, function: FunctionId, body: str = "", *, victims: tuple[FunctionId, ...] = ()) -> Exchange:
        """On a miss, *victims* are parked."""
        device = self.node._devices[DEVICE]
        cold = copy_id(function, 0) not in device.workers
        names = tuple(copy_id(each, 0) for each in victims)
        self.number += 1
        grant = Grant(
            1, self.number, (CallId(f"c{self.number}"),), function, function.partition(".")[0], (Part(DEVICE, MEMORY),),
            cold, names, parked=names,
        )  # fmt: skip
        return self.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body.encode())

    async def answer(self, exchange: Exchange) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
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

    def rig(budget: int = 700 * MiB) -> Rig:
        made.append(Rig(tmp_path / f"rig{len(made)}", budget))
        made[-1].node.host.fork_server.start()
        return made[-1]

    yield rig
    for each in made:
        await each.node.close()


async def two(rig: Rig, tmp_path: Path, source: str = HANDLER) -> tuple[FunctionId, FunctionId]:
    """Return functions whose weights are staged both; the first one is parked, for the second one."""
    one = await rig.function("one", weights(tmp_path), source)
    other = await rig.function("other", weights(tmp_path, value=2.0))
    await rig.call(one)
    await rig.staged(one)
    await rig.call(other, victims=(one,))
    await rig.staged(other)
    return one, other


async def test_a_victim_is_parked_and_wakes_with_the_right_answer(make: Callable[..., Rig], tmp_path: Path) -> None:
    """Its process is stopped meanwhile, with a thread of it that computes all the time."""
    rig = make()
    one, other = await two(rig, tmp_path, SPINS)
    assert rig.parked() == [one]
    assert rig.said(Parked) == [Parked(one, DEVICE, 0, 0)]
    parked = rig.worker(one)
    assert rig.node.reserved(DEVICE) == MEMORY, "only that of the other one"
    await eventually(lambda: 0 < rig.cache.status().parked_bytes < 100 * MiB)
    threads = [int(each) for each in os.listdir(f"/proc/{parked.pid}/task")]
    assert len(threads) > 1
    await eventually(lambda: {state_of(each) for each in threads} == {"T"})

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


async def test_a_model_that_is_not_as_it_was_is_loaded_anew_within_the_same_start(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    """By samples of its tensors, and by the handler's own check, which has hooks as well."""
    rig = make()
    one, other = await two(rig, tmp_path, HOOKS)
    worker = rig.worker(one)
    woken = await rig.call(one, victims=(other,))
    assert (woken["tier"], woken["pid"]) == ("parked", worker.pid)
    await eventually(lambda: "parks 2" in worker.output.tail() and "wakes on cpu" in worker.output.tail())

    await rig.call(one, "write")
    other_pid = rig.worker(other).pid
    assert (await rig.call(other, "write", victims=(one,)))["sum"] == 6 * MiB
    again = await rig.call(one, victims=(other,))
    assert (again["tier"], again["sum"]) == ("host", 2 * MiB), "its check gave 2, and not 1"
    again = await rig.call(other, victims=(one,))
    assert (again["tier"], again["sum"]) == ("host", 4 * MiB)
    assert again["pid"] != other_pid
    assert rig.node.host.parks.failed == 2
    assert not rig.said(CopyFailed) + rig.said(WorkerExited)
    assert [each.reason for each in rig.said(Unparked)] == ["it did not wake as it was when it was parked before"]


async def test_parked_workers_that_die_are_forgotten_or_loaded_anew_and_none_is_left_behind(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make()
    one, other = await two(rig, tmp_path)
    os.kill(rig.worker(one).pid or 0, signal.SIGKILL)
    await eventually(lambda: bool(rig.said(Unparked)))
    assert (rig.parked(), rig.cache.status().parked) == ([], 0)
    assert (await rig.call(one, victims=(other,)))["tier"] == "host"

    dying = rig.worker(other)
    asking = rig.begin(other, victims=(one,))
    os.kill(dying.pid or 0, signal.SIGKILL)
    woken = await rig.answer(asking)
    assert (woken["tier"], woken["sum"]) == ("host", 4 * MiB), "within the same start"
    assert not rig.said(CopyFailed) + rig.said(WorkerExited)

    before = len(rig.said(Unparked))
    rig.node.execute(EvictCopy(one, DEVICE))
    await eventually(lambda: all(each.spec.function != one for each in rig.node.workers()))
    assert rig.parked() == []
    assert [each.reason for each in rig.said(Unparked)[before:]] == ["it was evicted"]
    third = await rig.function("third", weights(tmp_path))
    rig.node.host.parks.forget(other)  # its wake has failed
    await rig.call(third, victims=(other,))
    pid = rig.worker(other).pid
    assert rig.parked() == [other]
    await rig.node.close()
    assert state_of(pid or 0) in ("", "Z"), "no stopped process is left behind"


async def test_a_load_that_its_node_refuses_leaves_nothing_that_the_scheduler_does_not_know_of(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    """It says that its victims are gone, and what it should wake: so much is true whether it can load or not."""
    rig = make()
    one, other = await two(rig, tmp_path)
    del rig.node.functions.specs[one]

    rig.node.execute(LoadCopy(1, 99, one, "one", (Part(DEVICE, MEMORY),), (copy_id(other, 0),)))

    assert [each.copy for each in rig.said(CopyFailed)] == [0]
    assert rig.node.snapshot().devices[0].residents == ()
    assert rig.parked() == []


async def test_parked_workers_are_within_the_budget_of_the_host_tier_and_give_way_to_weights(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    rig, ended = make(178 * MiB), tmp_path / "ended"
    leaves = f"""
    import atexit
    atexit.register(Path({str(ended)!r}).touch)
"""
    one, other = await two(rig, tmp_path, HANDLER + leaves)
    assert rig.parked() == [one]
    assert rig.cache.status().used <= rig.cache.status().budget
    third = await rig.function("third", weights(tmp_path, value=3.0))
    await rig.call(third, victims=(other,))
    assert rig.cache.status().used <= rig.cache.status().budget
    assert rig.parked() in ([one], [other], [one, other])
    await eventually(lambda: 0 < rig.cache.status().parked_bytes < 100 * MiB)

    await rig.function("large", weights(tmp_path, 150 * MiB, 0.5))
    rig.cache.asked(rig.bundles.manifest("large").weights, rig.bundles.install("large"), time.monotonic())
    await eventually(lambda: rig.parked() == [])
    assert "its node needs the memory" in [each.reason for each in rig.said(Unparked)]
    assert {each.spec.function for each in rig.node.workers() if not each.ends} == {third}
    await eventually(ended.exists, "a parked one goes on for its end")


def test_nothing_is_parked_without_the_setting_or_without_memory_for_it() -> None:
    for budget, park in ((0, True), (MEMORY, False)):
        parks = ParkedWorkers(HostCache(HostTier[str, int](budget)), park)
        assert not parks.enabled
        assert parks.take(object()) == "this node does not park"  # type: ignore[arg-type]


# --- gpufaas serve ---

ANSWERS = """
    import os

    def load(device):
        return {"calls": 0}

    def handle(model, event, context):
        model["calls"] += 1
        return f"{os.getpid()} {model['calls']}"

    def park(model):
        pass

    def wake(model, device):
        pass
"""


def test_serve_parks_what_it_evicts_and_says_so(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=300MiB", "--host-cache", "200MiB", "--park", "auto").start()
    one, other = (platform.deploy(name, ANSWERS, memory="200Mi") for name in ("one", "other"))
    first = platform.call(one)
    evicts = platform.call(other)
    assert (first.status_code, evicts.status_code) == (200, 200), evicts.text
    (worker,) = (each for each in platform.workers() if str(each.pid) == first.text.split()[0])
    until(lambda: worker.status() == "stopped", "it is parked")

    explained = platform.http.get(f"/system/explain/{evicts.headers['x-call-id']}").json()
    assert (explained["victims"], len(explained["parked"])) == ([], 1)
    assert platform.http.get("/system/function/one").json()["gpufaas"]["parked"] == ["local/cpu:0"]
    metrics = platform.http.get("/metrics").text
    assert "gpufaas_node_parked 1.0" in metrics
    assert "gpufaas_node_host_cache_bytes 2.097152e+08" in metrics

    woken = platform.call(one)
    assert woken.headers["x-gpufaas-start"] == "parked"
    assert woken.text == f"{worker.pid} 2", "its process and its memory are as they were"
    assert 'gpufaas_node_wakes_total{outcome="ok"} 1.0' in platform.http.get("/metrics").text

    (parked,) = (each for each in platform.workers() if each.pid != worker.pid)
    until(lambda: parked.status() == "stopped", "the other one is parked in its place")
    parked.kill()
    anew = platform.call(other)
    assert (anew.status_code, anew.text.split()[1]) == (200, "1"), "what died is loaded anew"
    assert platform.stop() == 0
