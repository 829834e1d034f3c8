"""The node of a platform of one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import EngineStatus, NodeId, NodeView
from gpufaas_gateway.ports import Workers


@dataclass(slots=True, eq=False)
class OneNode:
    """The node of `gpufaas serve`, as gateways describe the nodes of a cluster (`node_api.ClusterNodes`)."""

    status: Callable[[], EngineStatus]
    _workers: Workers
    _gone: Sequence[str]
    """A line for each device that was given up."""
    _makes: Callable[[], str]
    """Returns what functions of images run as; see `NodeView`."""

    def nodes(self) -> list[NodeView]:
        note = "; ".join(self._gone)
        devices, makes = list(self._workers.devices()), self._makes()
        return [NodeView(NodeId("local"), "", devices, False, note, version("gpufaas"), makes=makes)]

    async def drain(self, node: str, drain: bool) -> None:  # noqa: ARG002 - the port's
        raise InvalidSpec(
            "this platform is one process, whose only node is its own: stop it instead; nodes of a cluster can be "
            "drained (gpufaas node)"
        )
