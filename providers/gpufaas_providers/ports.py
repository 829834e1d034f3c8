"""What the broker needs: one who starts and stops nodes, and a place for its ledger."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from msgspec import Struct

from gpufaas_core._types import Seconds
from gpufaas_core.model import NodeId, OrderId
from gpufaas_core.orders import NodeOffer, Stay


class Held(Struct, frozen=True):
    """A node that a provider has started. Its times are Unix times."""

    node: NodeId
    order: OrderId
    since: Seconds
    """When the node was started: it is paid from then on."""
    until: Seconds = 0.0
    """When it had ended; 0.0: it is there."""


class Joining(Struct, frozen=True):
    """How a node that is started gets into the cluster."""

    arguments: tuple[str, ...]
    """Of ``gpufaas node``, without ``--id``, ``--order``, ``--data`` and ``--device``."""
    data: Path
    """A directory for what the provider keeps. The next leader on this machine has the same one."""


class Provider(Protocol):
    """
    Starts and stops nodes of one cluster. Each method may be called again, by another process too, after it failed or
    its caller died: it then finishes what is left to do. What it raises is shown to people as the reason.
    """

    async def start(self, order: OrderId, offer: NodeOffer) -> Held:
        """Start a node, which joins as one of *order*; if there is one of this order, or was, return that one."""

    async def stop(self, node: NodeId) -> None:
        """End the node, and return once it has ended; do nothing if there is none of that name."""

    async def list(self) -> Sequence[Held]:
        """Return the nodes that are there, and those that ended within the last hour, as far as they are known."""


Make: TypeAlias = Callable[[Joining], Provider]
"""What an entry point of the group ``gpufaas.providers`` names."""


class Ledger(Protocol):
    """Keeps stays. Each method raises `StorageFailed` if it cannot read or write; then nothing has changed."""

    async def stays(self) -> list[Stay]:
        """Return all that are kept."""

    async def put(self, stay: Stay) -> bool:
        """Keep *stay* in place of what was kept of its order. False: another leads, and nothing was kept."""

    async def forget(self, order: OrderId) -> None:
        """Keep nothing of this order any more."""
