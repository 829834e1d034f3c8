"""The one node of a platform that is one process."""

from collections.abc import Callable, Sequence
from importlib.metadata import version

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import EngineStatus, NodeId, NodeView
from gpufaas_gateway.ports import Workers


class OneNode:
    """
    The node of `gpufaas serve`, as gateways describe the nodes of a cluster (`node_api.ClusterNodes`).

    :param gone: a line for each device that was given up
    :param makes: returns what functions of images run as; see `NodeView`
    """

    def __init__(
        self, status: Callable[[], EngineStatus], workers: Workers, gone: Sequence[str], makes: Callable[[], str]
    ) -> None:
        self.status = status
        self._workers = workers
        self._makes = makes
        self._gone = gone

    def nodes(self) -> list[NodeView]:
        note = "; ".join(self._gone)
        devices, makes = list(self._workers.devices()), self._makes()
        return [NodeView(NodeId("local"), "", devices, False, note, version("gpufaas"), makes=makes)]

    async def drain(self, node: str, drain: bool) -> None:  # noqa: ARG002 - the port's
        raise InvalidSpec(
            "this platform is one process, whose only node is its own: stop it instead; nodes of a cluster can be "
            "drained (gpufaas node)"
        )
