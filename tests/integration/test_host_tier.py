"""The host tier of a node on real processes: weights in sealed memory files, which workers map."""

import asyncio
import fcntl
import json
import os
import signal
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.waiting import LIMIT_S, eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import Manifest, WeightsFile, WorkerSpec
from gpufaas_core.logs import Printed
from gpufaas_core.messages import Event, Grant, Loaded, Stage, Staged, Unstaged, WorkerExited
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, NodeId, Part
from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.memory_file import sealed_copy
from gpufaas_gpu_manager.memory_watch import used_by
from gpufaas_gpu_manager.node import Node

pytestmark = pytest.mark.usefixtures("warm_fork_servers")

DEVICE = DeviceId("n/cpu:0")
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
        total = sum(float(each.sum(dtype=__import__("torch").float64)) for each in model.values())
        return {"sum": total, "pid": os.getpid(), "maps": Path("/proc/self/maps").read_text()}
"""


class Bundles:
    """Bundles straight from source text and tensors."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: dict[str, Manifest] = {}

    def write(self, name: str, source: str, files: dict[str, bytes]) -> None:
        folder = self.root / name / "function"
        folder.mkdir(parents=True)
        (folder / "handler.py").write_text(textwrap.dedent(source))
        weights = []
        for each, data in files.items():
            (folder / each).write_bytes(data)
            weights.append(WeightsFile(f"function/{each}", sha256(data).hexdigest(), len(data)))
        self.manifests[name] = Manifest(kind="model", template="test", weights=tuple(weights))

    def install(self, digest: str) -> Path:
        return self.root / digest

    def compiled(self, digest: str) -> Path:
        return self.root / "compiled" / digest

    def manifest(self, digest: str) -> Manifest:
        return self.manifests[digest]


class Lines:
    def extend(self, function: str, instance: str, printed: Iterable[Printed]) -> None: ...


class Rig:
    """A node with one CPU device and a host tier, and a hand that grants grants."""

    def __init__(self, root: Path, budget: int, mode: str) -> None:
        self.bundles = Bundles(root)
        self.facts: list[Event] = []
        self.said: list[str] = []
        self.corrupt: list[str] = []
        self.tier = HostTier[str, int](budget)
        self.cache = HostCache(self.tier, self.said.append, lambda each: self.corrupt.append(each.path))
        self.node = Node(
            open_devices(["cpu:0=600MiB"], NodeId("n")), self.bundles, Lines(), self.facts.append,
            enforcement=Enforcement(mode), host_cache=self.cache,  # type: ignore[arg-type]
        )  # fmt: skip
        self.number = 0

    async def function(self, name: str, files: dict[str, bytes], source: str = HANDLER) -> FunctionId:
        self.bundles.write(name, source, files)
        function = FunctionId(f"{name}.ns@1")
        await self.node.functions.define(WorkerSpec(function, name, "ns", name, "model", Need()))
        return function

    async def call(self, function: FunctionId, body: str = "", memory: int = 300 * MiB) -> dict[str, Any]:
        cold = function not in {each.spec.function for each in self.node.workers()}
        self.number += 1
        call, digest = CallId(f"c{self.number}"), function.partition(".")[0]
        grant = Grant(1, self.number, (call,), function, digest, (Part(DEVICE, memory),), cold, copy=0)
        exchange = self.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), body.encode())
        async with asyncio.timeout(LIMIT_S):
            head, first, whole = await exchange.answer()
            while not whole and (piece := await exchange.chunk()) is not None:
                first += piece
        assert head.status == 200, first
        return {**json.loads(first), "phases": dict(exchange.phases), "tier": exchange.tier}

    async def evict(self, function: FunctionId) -> None:
        self.node.evict(function, DEVICE)
        await eventually(lambda: all(each.spec.function != function for each in self.node.workers()))

    async def staged(self, function: FunctionId) -> None:
        await eventually(lambda: any(isinstance(each, Staged) and each.function == function for each in self.facts))

    def loaded(self) -> list[str]:
        return [each.tier for each in self.facts if isinstance(each, Loaded)]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def rig(budget: int = 256 * MiB, mode: str = "rlimit") -> Rig:
        made.append(Rig(tmp_path / f"rig{len(made)}", budget, mode))
        made[-1].node.host.fork_server.start()
        return made[-1]

    yield rig
    for each in made:
        await each.node.close()


@pytest.fixture
async def rig(make: Callable[..., Rig]) -> Rig:
    return make()


def weights(tmp_path: Path, size: int = 8 * MiB, value: float = 1.0) -> dict[str, bytes]:
    save_file({"a": torch.full((size // 8,), value), "b": torch.full((size // 8,), value)}, tmp_path / "made")
    return {"w.safetensors": (tmp_path / "made").read_bytes()}


def kept(facts: list[Event]) -> list[tuple[str, str]]:
    return [(type(each).__name__, each.function) for each in facts if isinstance(each, Staged | Unstaged)]


async def test_the_second_start_is_from_host_memory(rig: Rig, tmp_path: Path) -> None:
    """And reads nothing from the disk: the file there has become useless."""
    function = await rig.function("f", weights(tmp_path))
    first = await rig.call(function)
    await rig.staged(function)
    await rig.evict(function)
    os.truncate(rig.bundles.root / "f" / "function" / "w.safetensors", 0)
    second = await rig.call(function)
    warm = await rig.call(function)

    assert (first["tier"], second["tier"]) == ("disk", "host")
    assert rig.loaded() == ["disk", "host"]
    assert [each.tier for each in rig.node.snapshot().devices[0].residents] == ["host"]
    assert first["sum"] == second["sum"] == warm["sum"] == 2 * MiB
    assert "/memfd:gpufaas-weights" in second["maps"]
    assert "w.safetensors" not in second["maps"]
    assert list(second["phases"]) == ["room", "process", "read", "init"]
    assert kept(rig.facts) == [("Staged", function)]
    assert rig.node.snapshot().staged[0].function == function


async def test_functions_with_the_same_weights_share_them(rig: Rig, tmp_path: Path) -> None:
    same = weights(tmp_path)
    first, second = await rig.function("f", same), await rig.function("g", same)
    await rig.call(first)
    await rig.staged(second)
    assert (await rig.call(second, memory=200 * MiB))["tier"] == "host"
    assert rig.tier.used == len(same["w.safetensors"])
    await rig.node.functions.forget(first)
    assert rig.cache.status().files == 1
    await rig.node.functions.forget(second)
    assert rig.tier.used == len(same["w.safetensors"]), "a worker has them mapped"
    await rig.evict(second)
    await eventually(lambda: not rig.tier.used)
    assert rig.cache.status().files == 0


async def test_what_an_author_writes_is_its_own(rig: Rig, tmp_path: Path) -> None:
    same = weights(tmp_path)
    first, second = await rig.function("f", same), await rig.function("g", same)
    await rig.call(first)
    await rig.staged(first)
    await rig.evict(first)
    assert (await rig.call(first, "write", 200 * MiB))["sum"] == 4 * MiB
    assert (await rig.call(first, memory=200 * MiB))["sum"] == 4 * MiB
    assert (await rig.call(second, memory=200 * MiB))["sum"] == 2 * MiB
    rig.node.evict(second, DEVICE)
    await rig.evict(first)
    assert (await rig.call(first))["sum"] == 2 * MiB


async def test_weights_survive_the_crash_of_a_worker(rig: Rig, tmp_path: Path) -> None:
    function = await rig.function("f", weights(tmp_path))
    await rig.call(function)
    await rig.staged(function)
    await rig.evict(function)
    os.kill((await rig.call(function))["pid"], signal.SIGKILL)
    await eventually(lambda: any(isinstance(each, WorkerExited) for each in rig.facts))
    assert (await rig.call(function))["tier"] == "host"
    await rig.evict(function)
    assert not any(kept.mapped for kept in rig.tier._kept.values())


async def test_weights_that_are_dropped_stay_with_the_worker_that_has_them(rig: Rig, tmp_path: Path) -> None:
    function = await rig.function("f", weights(tmp_path))
    await rig.call(function)
    await rig.staged(function)
    await rig.evict(function)
    before = await rig.call(function)
    rig.cache.forget([each.sha256 for each in rig.bundles.manifest("f").weights])
    after = await rig.call(function)
    assert before["sum"] == after["sum"]
    assert rig.tier.used > 8 * MiB
    await rig.evict(function)
    assert rig.tier.used == 0
    assert (await rig.call(function))["tier"] == "disk"


async def test_weights_give_way_to_those_that_are_worth_more(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make(12 * MiB)
    first = await rig.function("f", weights(tmp_path))
    second = await rig.function("g", weights(tmp_path, value=3.0))
    await rig.call(first)
    await rig.staged(first)
    await rig.evict(first)
    await rig.call(second)
    await rig.evict(second)
    await rig.call(second)
    await rig.staged(second)
    assert kept(rig.facts) == [("Staged", first), ("Unstaged", first), ("Staged", second)]


@pytest.mark.parametrize("mode", ["watcher", "rlimit"])
async def test_weights_in_host_memory_are_charged_once(make: Callable[..., Rig], tmp_path: Path, mode: str) -> None:
    """The copy is charged as one from the disk is; what counts against its limit is what it has changed."""
    rig = make(mode=mode)
    size = 64 * MiB
    function = await rig.function("f", weights(tmp_path, size))
    disk = await rig.call(function)
    await rig.staged(function)
    await rig.evict(function)
    host = await rig.call(function)
    # Pages may be mapped, and seen beside the rest, before a load is over or after it.
    assert all(size < each.occupation < 1.25 * size for each in rig.facts if isinstance(each, Loaded))
    assert rig.loaded() == ["disk", "host"]
    (worker,) = rig.node.workers()
    assert worker.limits is not None
    assert worker.limits.used(host["pid"]) < 40 * MiB
    assert used_by(host["pid"]) > size, "it would be counted as shared memory"
    await rig.call(function, "write")
    assert worker.limits.used(host["pid"]) > size
    assert disk["sum"] == host["sum"]


async def test_a_memory_file_of_the_authors_own_counts(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make(mode="watcher")
    source = HANDLER.replace(
        "return load_weights(FILE)",
        "load_weights(FILE); fd = os.memfd_create('gpufaas-weights'); os.write(fd, bytes(48 << 20)); "
        "return load_weights(FILE)",
    )
    function = await rig.function("f", weights(tmp_path), source)
    await rig.call(function)
    await rig.staged(function)
    await rig.evict(function)
    answer = await rig.call(function)
    (worker,) = rig.node.workers()
    assert worker.limits is not None
    assert worker.limits.used(answer["pid"]) > 48 * MiB


DIRECT = {
    "load_file": "from safetensors.torch import load_file\n    return load_file(FILE)",
    "safe_open": "from safetensors import safe_open\n"
    "    with safe_open(FILE, 'pt') as file:\n        return {name: file.get_tensor(name) for name in file.keys()}",
    "load_module": "import torch\n    from gpufaas_functions.loading import load_module\n"
    "    class M(torch.nn.Module):\n        def __init__(self):\n            super().__init__()\n"
    "            self.a = torch.nn.Parameter(torch.empty(1 << 20))\n"
    "            self.b = torch.nn.Parameter(torch.empty(1 << 20))\n"
    "    return load_module(M, FILE).state_dict()",
}


@pytest.mark.parametrize("how", DIRECT)
async def test_readers_that_an_author_calls_directly_start_from_host_memory(rig: Rig, tmp_path: Path, how: str) -> None:
    source = textwrap.dedent(HANDLER).replace("return load_weights(FILE)", DIRECT[how])
    function = await rig.function("f", weights(tmp_path), source)
    disk = await rig.call(function)
    await rig.staged(function)
    await rig.evict(function)
    host = await rig.call(function)
    assert (host["tier"], host["sum"]) == ("host", disk["sum"])
    assert "w.safetensors" not in host["maps"]


async def test_a_pickle_that_torch_maps_starts_from_host_memory(rig: Rig, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(MiB)}, tmp_path / "w.pt")
    source = textwrap.dedent(HANDLER).replace(
        "return load_weights(FILE)", "import torch\n    return torch.load(FILE.with_name('w.pt'), mmap=True)"
    )
    function = await rig.function("f", {"w.pt": (tmp_path / "w.pt").read_bytes()}, source)
    await rig.call(function)
    await rig.staged(function)
    await rig.evict(function)
    host = await rig.call(function)
    assert (host["tier"], host["sum"]) == ("host", MiB)
    assert "w.pt" not in host["maps"]


async def test_a_start_whose_author_reads_the_disk_says_disk(rig: Rig, tmp_path: Path) -> None:
    source = textwrap.dedent(HANDLER).replace(
        "return load_weights(FILE)",
        "from safetensors.torch import load\n    return load(FILE.read_bytes())",
    )
    function = await rig.function("f", weights(tmp_path), source)
    await rig.call(function)
    await rig.staged(function)
    await rig.evict(function)
    assert (await rig.call(function))["tier"] == "disk"


# --- bad input ---


async def test_weights_that_are_not_those_of_the_manifest_are_not_kept(rig: Rig, tmp_path: Path) -> None:
    function = await rig.function("f", weights(tmp_path))
    file = rig.bundles.root / "f" / "function" / "w.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    await rig.call(function)
    await eventually(lambda: rig.corrupt and not rig.tier.used)
    assert rig.corrupt == ["function/w.safetensors"]
    assert "has sha256" in rig.said[0]
    assert "starts read them from the disk" in rig.said[0]
    await rig.evict(function)
    assert (await rig.call(function))["tier"] == "disk"


async def test_weights_of_another_size_are_not_kept(rig: Rig, tmp_path: Path) -> None:
    function = await rig.function("f", weights(tmp_path))
    (said,) = rig.bundles.manifest("f").weights
    rig.bundles.manifests["f"] = Manifest(
        kind="model", template="test", weights=(WeightsFile(said.path, said.sha256, said.bytes + 1),)
    )
    await rig.call(function)
    await eventually(lambda: rig.said and not rig.tier.used)
    assert f"has {said.bytes} bytes, and its manifest says {said.bytes + 1}" in rig.said[0]


async def test_a_host_tier_smaller_than_one_model_says_so_once(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make(4 * MiB)
    function = await rig.function("f", weights(tmp_path))
    for _ in range(3):
        assert (await rig.call(function))["tier"] == "disk"
        await rig.evict(function)
    assert rig.said == [
        "weights are not kept in host memory: function/w.safetensors has 8 MiB, more than --host-cache 4 MiB: starts "
        "read them from the disk"
    ]
    assert rig.cache.status().note in rig.said[0]


async def test_without_memory_files_starts_go_on_from_the_disk(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", forbidden)
    function = await rig.function("f", weights(tmp_path))
    for _ in range(3):
        assert (await rig.call(function))["tier"] == "disk"
        await rig.evict(function)
    # Joins what the starts have begun, or tries once more.
    assert not await rig.cache.stage(*rig.bundles.manifest("f").weights, rig.bundles.install("f"))
    assert len(rig.said) == 1
    assert "Operation not permitted" in rig.said[0]


async def test_a_host_tier_of_nothing_is_off(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make(0)
    function = await rig.function("f", weights(tmp_path))
    await rig.call(function)
    await rig.evict(function)
    assert (await rig.call(function))["tier"] == "disk"
    assert (rig.said, kept(rig.facts)) == ([], [])


# --- commands of the scheduler ---


async def test_a_stage_brings_weights_ahead_of_the_first_start(rig: Rig, tmp_path: Path) -> None:
    function = await rig.function("f", weights(tmp_path))
    rig.node.execute(Stage(function, NodeId("n")))
    assert rig.node.snapshot().staged[0].staging
    await rig.staged(function)
    assert (await rig.call(function))["tier"] == "host"
    assert kept(rig.facts) == [("Staged", function)]


async def test_a_stage_that_cannot_be_done_is_answered(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make(4 * MiB)
    function = await rig.function("f", weights(tmp_path))
    for each in (function, FunctionId("unknown")):
        rig.node.execute(Stage(each, NodeId("n")))
    await eventually(lambda: len(kept(rig.facts)) == 2)
    reasons = {each.function: each.reason for each in rig.facts if isinstance(each, Unstaged)}
    assert "more than --host-cache" in reasons[function]
    assert reasons[FunctionId("unknown")] == "it is not known here"


async def test_devices_say_how_much_their_node_has(make: Callable[..., Rig]) -> None:
    rig = make(5 * MiB)
    assert [each.host_memory for each in rig.node.devices()] == [5 * MiB]
    assert rig.node.snapshot().devices[0].device.host_memory == 5 * MiB


# --- the files ---


def test_a_memory_file_cannot_be_changed(tmp_path: Path) -> None:
    data = os.urandom(5 * MiB + 17)
    (tmp_path / "file").write_bytes(data)
    copy = sealed_copy(tmp_path / "file", len(data), sha256(data).hexdigest())
    try:
        assert os.pread(copy, len(data) + 1, 0) == data
        with pytest.raises(PermissionError):
            os.pwrite(copy, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(copy, 1)
        with pytest.raises(PermissionError):
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    finally:
        os.close(copy)
