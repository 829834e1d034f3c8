"""What the scheduler's service needs of others."""

from typing import Protocol

from gpufaas_core import messages as m
from gpufaas_core.model import DeviceId, FunctionId, NodeId, OrderId, Seconds


class NodeCommands(Protocol):
    """What the scheduler asks of a node."""

    def execute(self, command: m.Command) -> None: ...


class Provider(Protocol):
    """Makes the nodes that are procured, and takes them back."""

    def execute(self, command: m.ProcureNodes | m.ReleaseNode) -> None: ...
    def joined(self, order: OrderId, node: NodeId) -> None:
        """A node has joined that names *order*, perhaps not for the first time."""

    def finished(self, device: DeviceId, function: FunctionId, seconds: Seconds) -> None:
        """Calls of *function* have ended, which took so long in all."""
