"""Emulated devices: real worker processes that take the time of a cost model, beside each other too."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.integration.conftest import Platform
from tests.integration.test_node import Bundles, Lines

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.cost import Cost
from gpufaas_core.errors import GrantRefused, InvalidSpec
from gpufaas_core.frames import CallHead
from gpufaas_core.messages import CopyFailed, Event, Finished, Grant, Loaded, Measured, SetLimit
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, NodeId, Part
from gpufaas_core.units import GiB, MiB
from gpufaas_gpu_manager.devices import open_devices
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
    "half": {"v100": Cost(GiB, 0.1, 0.4)},
    "loud": {"*": Cost(GiB, 0.1, 0.4, beside={"half": 1.5})},
    "greedy": {"v100": Cost(GiB, 0.1, 0.4, uses=100)},
}
LATE_S = 0.1
"""Until a process that sleeps is woken, on a machine with other work; benchmarks/emulated.py measures closely."""
EARLY_S = 0.02
"""Calls that are sent together begin so much after each other, and are beside each other for less."""
TRIES = 4
"""So often is measured what a busy machine may disturb."""


class Rig:
    """A node with one emulated device of 16 GiB, and a hand that grants grants."""

    def __init__(self, root: Path) -> None:
        self.facts: list[Event] = []
        self.said: list[str] = []
        self.bundles = Bundles(root)
        devices = open_devices(
            ["emulated:0=16GiB,kind=v100,profile=costs.json"], NodeId("n"), read_costs=lambda _: COSTS
        )
        self.node = Node(devices, self.bundles, Lines(), self.facts.append, self.said.append)
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
        async with asyncio.timeout(30):
            _, body, _ = await exchange.answer()
        return bytes(body)

    async def takes(self, calls: dict[FunctionId, object]) -> None:
        """Calls that are sent together take so long: once in `TRIES`."""
        for _ in range(TRIES):
            took = await self.took_s(*calls)
            if took == list(calls.values()):
                return
        assert took == list(calls.values())

    async def took_s(self, *functions: FunctionId) -> list[float]:
        """Return how long calls take that are sent together."""

        async def timed(function: FunctionId) -> float:
            began = time.monotonic()
            await self.call(function)
            return time.monotonic() - began

        return list(await asyncio.gather(*map(timed, functions)))


pytestmark = pytest.mark.usefixtures("warm_fork_servers")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    await rig.node.start()
    yield rig
    await rig.node.close()


def near(expected_s: float) -> object:
    return pytest.approx(expected_s + LATE_S / 2 - EARLY_S, abs=LATE_S / 2)


async def test_loads_and_calls_take_the_time_and_memory_of_the_profile_and_run_no_code_of_the_author(rig: Rig) -> None:
    big = await rig.function("big", Need())

    answer = json.loads(await rig.call(big, cold=True, memory=7 * GiB))

    assert answer == {"emulated": True, "function": "big.ns", "device": "n/emulated:0", "kind": "v100"}
    (loaded,) = [each for each in rig.facts if isinstance(each, Loaded)]
    assert 0.5 - EARLY_S < loaded.load_s < 1.5
    assert loaded.occupation == 6 * GiB
    await rig.takes({big: near(0.1)})
    assert [each.occupation for each in rig.facts if isinstance(each, Measured)] == [6 * GiB]
    served = [each.service_s for each in rig.facts if isinstance(each, Finished)]
    assert len(served) >= 2
    assert min(served) == near(0.1)
    assert rig.said == ["n/emulated:0 is emulated: calls take the time that costs.json says, and get no result"]


async def test_a_load_that_needs_more_than_is_reserved_runs_out_of_memory_as_on_a_real_device(rig: Rig) -> None:
    big = await rig.function("big", Need())

    with pytest.raises(GrantRefused, match=r"big.ns needs 6.0 GiB there at its limit of 1.0 GiB"):
        await rig.call(big, cold=True, memory=GiB)

    (failed,) = [each for each in rig.facts if isinstance(each, CopyFailed)]
    assert failed.out_of_memory


async def test_neighbours_share_the_compute_and_disturb_as_the_profile_says(rig: Rig) -> None:
    half, loud, greedy = [await rig.function(name) for name in ("half", "loud", "greedy")]
    await asyncio.gather(*(rig.call(each, cold=True) for each in (half, loud, greedy)))

    await rig.takes({half: near(0.4)})
    # Half and half is all there is; the one is disturbed until the other has ended.
    await rig.takes({half: near(0.4), loud: near(0.4 + (0.4 - 0.4 / 1.5))})
    # 150 % of a device: each at two thirds of its speed.
    await rig.takes({half: near(0.6), greedy: near(0.6)})


async def test_a_share_caps_a_copy_and_a_policy_may_change_it(rig: Rig) -> None:
    shared = await rig.function("greedy", Need(50, "share"))
    await rig.call(shared, cold=True)

    await rig.takes({shared: near(0.8)})
    call = asyncio.ensure_future(rig.took_s(shared))
    await asyncio.sleep(0.4)  # half of it
    rig.node.execute(SetLimit(shared, DEVICE, share=100))
    assert await call == [near(0.4 + 0.2)]


async def test_a_worker_that_is_killed_slows_nobody_any_more(rig: Rig) -> None:
    half, greedy = await rig.function("half"), await rig.function("greedy")
    await asyncio.gather(rig.call(half, cold=True), rig.call(greedy, cold=True))
    victim = next(each for each in rig.node.workers() if each.spec.name == "greedy")
    call = asyncio.ensure_future(rig.took_s(half))
    lost = asyncio.ensure_future(rig.call(greedy))

    await asyncio.sleep(0.3)  # two thirds of the speed: 0.2 of 0.4 are done
    victim.kill("for this test")

    assert await call == [near(0.3 + 0.2)]
    with pytest.raises(Exception, match="for this test"):
        await lost


async def test_what_cannot_be_emulated_is_refused_when_it_is_deployed(rig: Rig) -> None:
    with pytest.raises(InvalidSpec, match=r"costs.json has no costs of other on devices of kind v100: add occ"):
        await rig.function("other")
    with pytest.raises(InvalidSpec, match="half is a program of its own: emulated devices run handlers only"):
        await rig.function("half", Need(), "server")
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
    expected_s = pytest.approx(simulated.latency.mean, rel=0.3)
    for _ in range(TRIES):
        live = asyncio.run(replay(workload, Endpoint(platform.url))).report
        assert live.completed == len(CALLS)
        if live.latency.mean == expected_s:
            break

    assert live.latency.mean == expected_s
    (device,) = platform.status()["devices"]
    assert device["device"]["kind"] == "emulated-v100"
