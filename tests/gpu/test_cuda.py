"""
CUDA devices, on a real GPU: the same claims as on CPU devices, with the driver's own account of memory.

Skipped where there is none; `make test` passes without. On a machine with one: ``pytest tests/gpu -ra``.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx
import pytest

from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.frames import CallHead
from gpufaas_core.messages import Event, Grant, Loaded
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, NodeId, Part
from gpufaas_core.units import GiB
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.nvml import Nvml


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


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[tuple[Node, Bundles, list[Event]]]:
    bundles, facts = Bundles(tmp_path), list[Event]()
    node = Node(open_devices(["cuda:0=4GiB"], NodeId("n")), bundles, Silent(), facts.append)
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
