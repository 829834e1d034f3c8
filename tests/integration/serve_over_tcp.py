"""
`gpufaas serve`, but that its calls go over TCP to its node, as they do in a cluster.

Every test of the invocation path tests this protocol too: ``pytest tests/integration/test_streaming.py --over-tcp``.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import gpufaas_gateway.calls
import gpufaas_gpu_manager.node
from gpufaas_cli.main import main
from gpufaas_cluster.call_server import CallServer
from gpufaas_cluster.connection import Identity
from gpufaas_cluster.remote_nodes import RemoteNodes
from gpufaas_core.logs import FunctionLogs
from gpufaas_core.messages import Grant, NodeRefused
from gpufaas_core.model import NodeId, NodeView

Node = gpufaas_gpu_manager.node.Node
ADDRESS = "127.0.0.1:0"


class NodeOverTcp(Node):
    """Opens its call server when it starts."""

    remote: RemoteNodes

    def __init__(self, devices: Any, bundles: Any, logs: FunctionLogs, *args: Any, **kwargs: Any) -> None:
        super().__init__(devices, bundles, logs, *args, **kwargs)
        token = b"secret" * 8
        spool = Path(tempfile.mkdtemp(prefix="calls-"))
        self._server = CallServer(self, logs, Identity("node", "n", "b", token), spool)
        self.remote = RemoteNodes(Identity("gateway", "g", "b", token), self._unreachable)
        self.grants.remote = self.remote  # type: ignore[attr-defined]
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        await self._server.open(ADDRESS)
        self.remote.set_nodes([NodeView(NodeId("local"), f"127.0.0.1:{self._server.port}", self.devices())])

    def _unreachable(self, grant: Grant, reason: str) -> None:
        self.report(NodeRefused.of(grant, reason))

    async def close(self) -> None:
        await super().close()
        await self._server.close()
        await self.remote.close()


def through(cls: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        return cls(*(getattr(each, "remote", each) for each in args), **{**kwargs, "here": False})

    return made


if __name__ == "__main__":
    gpufaas_gpu_manager.node.Node = NodeOverTcp  # type: ignore[misc]
    gpufaas_gateway.calls.Calls = through(gpufaas_gateway.calls.Calls)  # type: ignore[misc]
    main()
