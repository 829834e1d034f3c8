"""
What it costs that a call goes over TCP to its node: the same warm echo through a `Node` in this process and through the
call server of one in another, in turn, so that both meet the same machine.

    python benchmarks/call_server.py [--json] [--calls 2000] [--rounds 5]

Gateway and scheduler are not part of it: grants are made here, as they would come. "at once" is calls per second with
so many callers.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Protocol

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_cluster.call_server import CallServer
from gpufaas_cluster.connection import Identity
from gpufaas_cluster.remote_nodes import RemoteNodes
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.logs import FunctionLogs
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, Device, DeviceId, FunctionId, Need, NodeId, NodeView, Part
from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import AnswerHead, CallHead
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node

CALLERS = 16
TARGET_US = 150.0
TOKEN = b"benchmark"
HANDLER = "def handle(event, context): return event.body"
HEADERS = [(b"host", b"gateway:8080"), (b"user-agent", b"benchmark"), (b"content-type", b"application/json"),
           (b"x-forwarded-for", b"10.0.0.1:5000"), (b"x-start-time", b"1795215653000000000")]  # fmt: skip


class Bundles:
    def __init__(self, root: Path) -> None:
        self._root = root

    def install(self, digest: str) -> Path:
        return self._root / digest

    def compiled(self, digest: str) -> Path:
        return self._root / "compiled" / digest

    def manifest(self, digest: str) -> Manifest:  # noqa: ARG002 - the port's
        return Manifest(kind="http", template="benchmark")


class Exchange(Protocol):
    async def answer(self) -> tuple[AnswerHead, bytes, bool]: ...


class Calls(Protocol):
    def call(self, grant: Grant, head: CallHead, body: bytes, /) -> Exchange: ...


def node_at(root: Path, name: str) -> Node:
    return Node(
        open_devices(["cpu:0=1GiB"], NodeId(name)),
        Bundles(root),
        FunctionLogs(root / "logs"),
        lambda _: None,
        host_cache=HostCache(HostTier(0)),
    )


def spec() -> WorkerSpec:
    return WorkerSpec(FunctionId("echo.ns@1"), "echo", "ns", "echo", "http", Need(0, slots=CALLERS))


async def serve(root: Path) -> None:
    """Be the other process."""
    node = node_at(root, "far")
    await node.start()
    await node.functions.define(spec())
    server = CallServer(node, FunctionLogs(root / "logs"), Identity("node", "far", "b", TOKEN), root / "spool")
    await server.open("127.0.0.1:0")
    print(server.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the other end is gone
    await node.close()
    await server.close()


class Bench:
    def __init__(self, calls: Calls, node: str) -> None:
        self._calls = calls
        self._device = DeviceId(f"{node}/cpu:0")
        self._number = 0

    async def call(self, cold: bool = False) -> None:
        self._number += 1
        call = CallId(f"3f2b8c1e-1111-4222-8333-{self._number:012d}@g1")
        grant = Grant(1, self._number, (call,), spec().function, "echo", (Part(self._device, 64 * MiB),), cold)
        head, body, whole = await self._calls.call(
            grant, CallHead(call, "POST", "/", b"", HEADERS), b'{"x":1}'
        ).answer()
        assert (head.status, body, whole) == (200, b'{"x":1}', True)

    async def latencies_us(self, calls: int) -> list[float]:
        found = []
        for _ in range(calls):
            begun = perf_counter()
            await self.call()
            found.append((perf_counter() - begun) * 1e6)
        return found

    async def per_s(self, calls: int) -> float:
        async def caller() -> None:
            for _ in range(calls // CALLERS):
                await self.call()

        begun = perf_counter()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return calls / (perf_counter() - begun)


async def measure(root: Path, calls: int, rounds: int) -> dict[str, Any]:
    (root / "echo" / "function").mkdir(parents=True)
    (root / "echo" / "function" / "handler.py").write_text(HANDLER)
    node = node_at(root, "near")
    await node.start()
    await node.functions.define(spec())
    other = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", str(root), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdin is not None
    port = int(await other.stdout.readline())
    remote = RemoteNodes(Identity("gateway", "g1", "b", TOKEN))
    device = Device(DeviceId("far/cpu:0"), "cpu", 1024 * MiB)
    remote.set_nodes([NodeView(NodeId("far"), f"127.0.0.1:{port}", [device])])
    near, far = Bench(node.grants, "near"), Bench(remote, "far")
    rows: dict[str, list[tuple[float, float, float]]] = {"near": [], "far": []}
    try:
        for bench in (near, far):
            await bench.call(cold=True)
            await bench.latencies_us(200)
            await bench.per_s(20 * CALLERS)
        for _ in range(rounds):
            for name, bench in (("near", near), ("far", far)):
                cuts = quantiles(await bench.latencies_us(calls), n=100)
                rows[name].append((cuts[49], cuts[98], await bench.per_s(calls)))
    finally:
        await remote.close()
        other.stdin.close()
        await other.wait()
        await node.close()
    found = {
        name: dict(zip(("p50_us", "p99_us", "per_s"), map(median, zip(*each, strict=True)), strict=True))
        for name, each in rows.items()
    }
    hop = median(far[0] - near[0] for near, far in zip(rows["near"], rows["far"], strict=True))
    return {**found, "hop_p50_us": hop, "ratio_p50": found["far"]["p50_us"] / found["near"]["p50_us"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.serve:
            runner.run(serve(options.serve))
            return 0
        with tempfile.TemporaryDirectory() as root:
            found = runner.run(measure(Path(root), options.calls, options.rounds))
    if options.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        table = Table(title="A warm echo, medians of the rounds")
        for column in ("node", "p50 [µs]", "p99 [µs]", f"{CALLERS} at once [1/s]"):
            table.add_column(column, justify="left" if column == "node" else "right")
        for name, words in (("near", "in this process"), ("far", "through its call server")):
            row = found[name]
            table.add_row(words, f"{row['p50_us']:.0f}", f"{row['p99_us']:.0f}", f"{row['per_s']:.0f}")
        Console().print(table)
        print(f"the hop: {found['hop_p50_us']:.0f} µs at the median (target: under {TARGET_US:g}), "
              f"{found['ratio_p50']:.2f} times the call in one process")  # fmt: skip
    return 0 if found["hop_p50_us"] < TARGET_US else 1


if __name__ == "__main__":
    sys.exit(main())
