"""A node as a process, with its call server: it prints its address, then each fact, as lines of JSON."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_cluster import connection, control
from gpufaas_cluster.call_server import CallServer
from gpufaas_cluster.connection import Identity
from gpufaas_core.bundle import Kind, Manifest
from gpufaas_core.logs import FunctionLogs
from gpufaas_core.messages import Event
from gpufaas_core.model import NodeId
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.settings import NodeSettings

HELD_UP_S = 60.0
"""A machine that is busy may hold up this process, and handlers, for longer than a node allows its gateway and them."""


class Bundles:
    """Bundles straight from folders, each with its kind in a file."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def install(self, digest: str) -> Path:
        return self._root / digest

    def compiled(self, digest: str) -> Path:
        return self._root / "compiled" / digest

    def manifest(self, digest: str) -> Manifest:
        kind = cast(Kind, (self._root / digest / "kind").read_text())
        return Manifest(kind=kind, template="test", command=("python", "server.py"))


def say(what: str, value: object) -> None:
    print(msgspec.json.encode({"what": what, "value": value}).decode(), flush=True)


def report(fact: Event) -> None:
    say(type(fact).__name__, fact)


async def main(name: str, root: Path, port: str, token: str, memory: str) -> None:
    logs = FunctionLogs(root / f"logs-{name}")
    node = Node(
        open_devices([f"cpu:0={memory}"], NodeId(name)), Bundles(root), logs, report,
        settings=NodeSettings(abort_grace_s=HELD_UP_S), host_cache=HostCache(HostTier(0)),
    )  # fmt: skip
    await node.start()
    server = CallServer(node, logs, Identity("node", name, "boot", token.encode()), root / f"spool-{name}")
    await server.open(f"127.0.0.1:{port}")
    say("open", server.port)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.finish(20.0)
    await server.close()
    await node.close()
    logs.close()


if __name__ == "__main__":
    control.SILENCE_S = connection.HANDSHAKE_S = HELD_UP_S  # type: ignore[misc]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
