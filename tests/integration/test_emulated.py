"""
Emulated devices: real worker processes that take the time of a cost model. How much, beside each other too, is in
tests/unit/gpu_manager/test_emulation.py, by a clock that no machine disturbs.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.integration.conftest import Platform
from tests.integration.test_node import Bundles, Lines
from tests.waiting import LIMIT_S, eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.cost import Cost
from gpufaas_core.errors import GrantRefused, InvalidSpec
from gpufaas_core.messages import CopyFailed, Event, Finished, Grant, Loaded, Measured, SetLimit
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, NodeId, Part
from gpufaas_core.units import GiB, MiB
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.replay import Endpoint, replay
from gpufaas_simulator.run import simulate

DEVICE = DeviceId("n/emulated:0")
MODEL = """
    def load(device):
        raise AssertionError("never run")

    def handle(model, event, context):
        return "no"
"""
SPATIAL = Need(50, "spatial")
COSTS = {
    "big": {"v100": Cost(6 * GiB, 0.5, 0.1)},
    "shared": {"v100": Cost(GiB, 0.1, 1.0, uses=100)},
    "quiet": {"v100": Cost(GiB, 0.1, 0.1, beside={"loud": 10_000.0})},
    "loud": {"v100": Cost(GiB, 0.1, 1000.0)},
}


class Rig:
    """A node with one emulated device of 16 GiB, and a hand that grants grants."""

    def __init__(self, root: Path) -> None:
        self.facts: list[Event] = []
        self.said: list[str] = []
        self.bundles = Bundles(root)
        devices = open_devices(
            ["emulated:0=16GiB,kind=v100,profile=costs.json"], NodeId("n"), read_costs=lambda _: COSTS
        )
        emulation = devices[0].emulation
        assert emulation is not None
        self.running = emulation.running
        self.node = Node(
            devices, self.bundles, Lines(), self.facts.append, self.said.append, host_cache=HostCache(HostTier(0))
        )
        self._number = 0

    async def function(self, name: str, need: Need = SPATIAL, kind: str = "model") -> FunctionId:
        self.bundles.write(name, MODEL, kind)
        function = FunctionId(f"{name}.ns@1")
        await self.node.functions.define(WorkerSpec(function, name, "ns", name, kind, need))  # type: ignore[arg-type]
        return function

    async def call(self, function: FunctionId, *, cold: bool = False, memory: int = 2 * GiB) -> bytes:
        self._number += 1
        parts = (Part(DEVICE, memory),)
        grant = Grant(1, self._number, (CallId(f"c{self._number}"),), function, function.partition(".")[0], parts, cold)
        exchange = self.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"")
        async with asyncio.timeout(LIMIT_S):
            _, body, _ = await exchange.answer()
        return bytes(body)


pytestmark = pytest.mark.usefixtures("warm_fork_servers")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    await rig.node.start()
    yield rig
    await rig.node.close()


async def test_loads_and_calls_take_the_time_and_memory_of_the_profile_and_run_no_code_of_the_author(rig: Rig) -> None:
    big = await rig.function("big", Need())

    answer = json.loads(await rig.call(big, cold=True, memory=7 * GiB))

    assert answer == {"emulated": True, "function": "big.ns", "device": "n/emulated:0", "kind": "v100"}
    (loaded,) = [each for each in rig.facts if isinstance(each, Loaded)]
    assert loaded.load_s >= 0.5
    assert loaded.occupation == 6 * GiB
    await rig.call(big)
    assert [each.occupation for each in rig.facts if isinstance(each, Measured)] == [6 * GiB]
    served = [each.service_s for each in rig.facts if isinstance(each, Finished)]
    assert len(served) == 2
    assert min(served) > 0.099
    assert rig.said == ["n/emulated:0 is emulated: calls take the time that costs.json says, and get no result"]


async def test_a_load_that_needs_more_than_is_reserved_runs_out_of_memory_as_on_a_real_device(rig: Rig) -> None:
    big = await rig.function("big", Need())

    with pytest.raises(GrantRefused, match=r"big.ns needs 6.0 GiB there at its limit of 1.0 GiB"):
        await rig.call(big, cold=True, memory=GiB)

    (failed,) = [each for each in rig.facts if isinstance(each, CopyFailed)]
    assert failed.out_of_memory


async def test_a_policy_may_change_the_share_of_a_call_that_runs(rig: Rig) -> None:
    shared = await rig.function("shared", Need(1, "share"))
    call = asyncio.ensure_future(rig.call(shared, cold=True))
    await eventually(lambda: rig.running)

    rig.node.execute(SetLimit(shared, DEVICE, share=100))

    assert await call, "by its own share it would take 100 s"


async def test_a_worker_that_is_killed_slows_nobody_any_more(rig: Rig) -> None:
    quiet, loud = await rig.function("quiet"), await rig.function("loud")
    lost = asyncio.ensure_future(rig.call(loud, cold=True))
    await eventually(lambda: len(rig.running) == 1)
    call = asyncio.ensure_future(rig.call(quiet, cold=True))
    await eventually(lambda: len(rig.running) == 2)

    next(each for each in rig.node.workers() if each.spec.name == "loud").kill("for this test")

    assert await call, "beside the other one it would take 1000 s"
    with pytest.raises(Exception, match="for this test"):
        await lost


async def test_what_cannot_be_emulated_is_refused_when_it_is_deployed(rig: Rig) -> None:
    with pytest.raises(InvalidSpec, match=r"costs.json has no costs of other on devices of kind v100: add occ"):
        await rig.function("other")
    with pytest.raises(InvalidSpec, match="loud is a program of its own: emulated devices run handlers only"):
        await rig.function("loud", Need(), "server")
    assert rig.node.devices()[0].kind == "emulated-v100"
    assert rig.node.devices()[0].memory == 16 * 1024 * MiB


PROFILE = """{"devices": [{"id": "local/emulated:0", "memory_mb": 17179, "kind": "v100"}], "functions": {
  "quick": {"occupation_mb": 1000, "load_s": 0.1, "infer_s": 0.2, "sharing": "spatial", "compute": 50,
            "beside": {"slow": 1.4}},
  "slow": {"occupation_mb": 1000, "load_s": 0.1, "infer_s": 0.4, "sharing": "spatial", "compute": 50, "uses": 80}
}, "arrivals": [%s]}"""
CALLS = [(0.3 * at, ("slow", "quick", "quick")[at % 3]) for at in range(14)]


@pytest.mark.slow
def test_a_platform_serves_them_as_the_simulator_says(make_platform: Callable[..., Platform], tmp_path: Path) -> None:
    """The figures, with evictions and two devices: benchmarks/emulated.py."""
    file = tmp_path / "costs.json"
    file.write_text(PROFILE % ", ".join(f'[{at}, "{name}"]' for at, name in CALLS))
    platform = make_platform("--device", f"emulated:0=16GiB,kind=v100,profile={file}").start()
    for name in ("quick", "slow"):
        path = platform.deploy(name, MODEL, sharing="spatial", compute="50", memory="1200MB")
        answer = platform.call(path)
        assert answer.json()["emulated"], answer.text
        assert answer.headers["x-gpufaas-device"] == "local/emulated:0"
    workload = read_workload(file)

    _, simulated = simulate(workload)
    assert simulated.completed == len(CALLS)
    assert simulated.latency.mean > 0.3, "they slow each other, or wait"
    endpoint = Endpoint(platform.url, authorization=platform.login.header())
    live = asyncio.run(replay(workload, endpoint)).report
    assert live.completed == len(CALLS)
    # A busy machine makes it longer; benchmarks/emulated.py measures closely.
    assert 0.8 * simulated.latency.mean < live.latency.mean < 5 * simulated.latency.mean
    (device,) = platform.status()["devices"]
    assert device["device"]["kind"] == "emulated-v100"
