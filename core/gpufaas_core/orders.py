"""Nodes that were ordered: what a kind of node is, and what is kept of each order. `gpufaas_providers` orders them."""

from typing import Final

from msgspec import Struct, field

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.model import NodeId, OrderId

NO_NODE: Final = NodeId("")


class NodeOffer(Struct, frozen=True, omit_defaults=True):
    """A kind of node that can be ordered."""

    kind: str
    """The kind of its devices."""
    memory: Bytes
    """The memory of each device."""
    devices: int = 1
    """The devices of one node."""
    price_per_h: float | None = None
    """The price of one node, in the provider's currency; None: it has none, and costs 0."""
    start_s: Seconds = 0.0
    """From the order until its devices join, as far as people know."""
    limit: int = 1
    """Nodes of this kind at once."""
    options: dict[str, str] = field(default_factory=dict)
    """What the provider wants to know beside this."""


class Stay(Struct, frozen=True, omit_defaults=True):
    """One order, from its note until its node has ended. All times are Unix times."""

    order: OrderId
    kind: str
    asked_at: Seconds
    devices: int = 1
    price_per_h: float | None = None
    """What the offer said when the node was ordered."""
    node: NodeId = NO_NODE
    """Empty: it is not known that one was started."""
    since: Seconds = 0.0
    """When the node was started: it is paid from then on."""
    joined_at: Seconds = 0.0
    """0.0: it has not joined."""
    releasing: bool = False
    """The node is given back."""
    until: Seconds = 0.0
    """When the node had ended; of an order without a node, when it failed. 0.0: not yet."""
    why: str = ""
    """Why the order failed."""
    busy_s: Seconds = 0.0
    """Device-seconds in which its devices were busy."""
    used_s: dict[str, Seconds] = field(default_factory=dict)
    """Seconds of calls on it, by ``NAME.NAMESPACE``: `busy_s` is divided among functions by these."""
