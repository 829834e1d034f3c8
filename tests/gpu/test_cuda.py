"""
CUDA devices, on a real GPU: the same claims as on CPU devices, with the driver's own account of memory.

Skipped where there is none; `make test` passes without. On a machine with one: ``pytest tests/gpu -ra``.
"""

import asyncio
import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx
import pytest

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.messages import Event, Grant, Loaded
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, NodeId, Part
from gpufaas_core.units import GiB
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager import mps
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.isolation import levels
from gpufaas_gpu_manager.isolation.ids import UID_RANGE, Uids, uid_range
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.nvml import Nvml
from gpufaas_gpu_manager.settings import NodeSettings


def _gpus() -> int:
    try:
        return Nvml().count()
    except InvalidSpec:
        return 0


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_gpus() == 0, reason="no NVIDIA GPU here (NVML finds none)")]

DEVICE = DeviceId("n/cuda:0")
ONE_GIB_MODEL = """
import torch

def load(device):
    return torch.ones(256, 1024, 1024, device=device)

def handle(model, event, context):
    return {"device": str(model.device), "sum": model[0, 0].sum().item()}
"""


class Bundles:
    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str) -> None:
        (self._root / name / "function").mkdir(parents=True)
        (self._root / name / "function" / "handler.py").write_text(ONE_GIB_MODEL)

    def install(self, digest: str) -> Path:
        return self._root / digest

    def compiled(self, digest: str) -> Path:
        return self._root / "compiled" / digest

    def manifest(self, digest: str) -> Manifest:  # noqa: ARG002 - the port's
        return Manifest(kind="model", template="test")


class Silent:
    def extend(self, function: str, instance: str, texts: Iterable[str]) -> None:
        """Not used."""


@pytest.fixture(params=["none", "best"])
async def node(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Node, Bundles, list[Event]]]:
    """Under best a worker sees the device nodes of its GPU only."""
    bundles, facts, walls = Bundles(tmp_path), list[Event](), levels.walls(request.param)
    uids = Uids(tmp_path / "uids", uid_range(UID_RANGE)) if walls.uids else None
    devices = open_devices(["cuda:0=4GiB"], NodeId("n"), isolation=request.param)
    node = Node(
        devices,
        bundles,
        Silent(),
        facts.append,
        settings=NodeSettings(isolation=walls, uids=uids),
        host_cache=HostCache(HostTier(0)),
    )
    await node.start()
    yield node, bundles, facts
    await node.close()


async def call(node: Node, grant: Grant) -> tuple[int, bytes]:
    async with asyncio.timeout(120):
        head, body, _ = await node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), b"").answer()
    return head.status, body


async def test_a_model_runs_on_the_gpu_and_its_occupation_is_measured(
    node: tuple[Node, Bundles, list[Event]],
) -> None:
    manager, bundles, facts = node
    bundles.write("one")
    function = FunctionId("one.ns@1")
    await manager.define(WorkerSpec(function, "one", "ns", "one", "model", Need()))

    answer = await call(manager, Grant(1, 1, (CallId("c1"),), function, "one", (Part(DEVICE, 3 * GiB),), True))

    assert answer == (200, b'{"device":"cuda:0","sum":1024.0}')
    loaded = next(fact for fact in facts if isinstance(fact, Loaded))
    assert 1 * GiB <= loaded.occupation <= 3 * GiB


async def test_an_evicted_model_gives_its_memory_back_to_the_driver(node: tuple[Node, Bundles, list[Event]]) -> None:
    manager, bundles, _ = node
    nvml = Nvml()
    functions = []
    for name in ("one", "two"):
        bundles.write(name)
        functions.append(FunctionId(f"{name}.ns@1"))
        await manager.define(WorkerSpec(functions[-1], name, "ns", name, "model", Need()))
    await call(manager, Grant(1, 1, (CallId("c1"),), functions[0], "one", (Part(DEVICE, 3 * GiB),), True))
    first = manager.workers()[0].pid
    assert first is not None

    answer = await call(
        manager,
        Grant(1, 2, (CallId("c2"),), functions[1], "two", (Part(DEVICE, 3 * GiB),), True, victims=(functions[0],)),
    )

    assert answer[0] == 200
    assert not nvml.used_by(0, [first])
    assert manager.reserved(DEVICE) == 3 * GiB


MAKES_A_CONTEXT = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
print(cuda.cuInit(0) or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of two uids")
@pytest.mark.skipif(shutil.which(mps.PROGRAM) is None, reason=f"{mps.PROGRAM} is not installed")
def test_an_mps_daemon_serves_clients_of_one_uid_at_once_and_lets_those_of_another_wait_until_they_have_ended() -> None:
    """By NVIDIA's manual. If it fails, workers with uids of their own may have MPS, as far as uids go."""
    daemon, clients = mps.Mps(Nvml().describe(0)[2]), list[subprocess.Popen[bytes]]()
    daemon._home.chmod(0o711)
    for each in daemon._directories.values():  # a client of another uid has a server of its uid, which writes there
        os.chmod(each, 0o1777)

    def started(uid: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, **daemon.env(Need(50, "spatial"), 0, GiB)}
        made = subprocess.Popen(
            ["/usr/bin/python3", "-ISc", MAKES_A_CONTEXT], env=env, user=uid, group=uid, extra_groups=[], cwd="/",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        clients.append(made)
        return made

    def answer(client: subprocess.Popen[bytes], within_s: float) -> bytes:
        assert client.stdout is not None
        return client.stdout.readline() if select.select([client.stdout], [], [], within_s)[0] else b"it waits"

    try:
        assert [answer(started(uid), 60) for uid in (64_001, 64_001)] == [b"0\n", b"0\n"]
        other = started(64_002)
        assert answer(other, 10) == b"it waits"
        for each in clients[:2]:
            each.communicate()
        assert answer(other, 60) == b"0\n"
    finally:
        for each in clients:
            each.kill()
            each.wait()
        daemon.close()


@pytest.mark.parametrize(("memory", "loads"), [(3 * GiB, True), (GiB // 2, False)])
def test_the_program_of_an_image_serves_within_what_was_reserved_for_it(
    tmp_path: Path, memory: int, loads: bool
) -> None:
    Bundles(tmp_path).write("one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PORT": str(port), "GPUFAAS_DEVICE": "cuda:0", "GPUFAAS_DEVICE_MEMORY": str(memory)}
    command = [sys.executable, "-m", "gpufaas_functions.http_server", str(tmp_path / "one" / "function")]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, env=env, stderr=log) as process:
        answer = None
        while answer is None and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"http://127.0.0.1:{port}/", timeout=120)  # waits for the load
        process.terminate()

    if loads:
        assert answer is not None
        assert answer.json() == {"device": "cuda:0", "sum": 1024.0}
    else:
        assert process.returncode == 1
        assert "OutOfMemoryError" in (tmp_path / "log").read_text()
