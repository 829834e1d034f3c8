"""
The nodes of a simulation that come and go, and what they cost: those at the start, and those that a policy procures.

A node costs its price from the request until it has left, or until the end of the simulation; a node at the start, or
one that joins by a change, from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET
from msgspec.structs import asdict

from gpufaas_core.model import Offer, Seconds
from gpufaas_simulator.workload import NodeOffer, OfferChanges, SimulatedDevice

_ANY_NUMBER = 1 << 30


@dataclass(slots=True)
class NodeStay:
    node: str
    kind: str
    price_per_h: float
    asked_s: Seconds
    joined_s: Seconds | None = None
    """None: it has not come yet."""
    left_s: Seconds | None = None

    def hours(self, end_s: Seconds) -> float:
        """Return for how long it is paid."""
        return ((end_s if self.left_s is None else self.left_s) - self.asked_s) / 3600


class Fleet:
    def __init__(self, offers: Iterable[NodeOffer], prices: Mapping[str, float]) -> None:
        self.stays: list[NodeStay] = []
        """In the order of the requests."""
        self._offers = {each.kind: each for each in offers}
        self._prices = prices
        self._there: dict[str, NodeStay] = {}
        """Nodes that were procured or that have a price, and have not left."""
        self._count = Counter[str]()
        self.procured = set[str]()
        self.withheld = Counter[str]()
        """How often each kind cannot be procured, since a node of it has failed."""

    def change(self, change: OfferChanges) -> None:
        given = {key: value for key, value in asdict(change).items() if key != "at_s" and value is not UNSET}
        self._offers[change.kind] = replace(self._offers[change.kind], **given)

    def offers(self) -> tuple[Offer, ...]:
        """Return what can be procured from now on."""
        there = Counter(each.kind for each in self._there.values() if each.node not in self._prices)
        return tuple(
            Offer(
                each.kind, each.memory, each.devices, each.price_per_h, each.delay_s,
                0 if self.withheld[each.kind] else _ANY_NUMBER if each.limit is None
                else max(0, each.limit - there[each.kind]),
            )
            for each in self._offers.values()
        )  # fmt: skip

    def procure(self, kind: str, now: Seconds) -> tuple[NodeOffer, Sequence[SimulatedDevice]]:
        """
        Order a node; return its offer and its devices, which join after the delay.

        :raises KeyError: there is no such offer: the engine should have refused this
        """
        offer = self._offers[kind]
        self._count[kind] += 1
        devices = offer.node(self._count[kind])
        self.procured.add(devices[0].node)
        stay = self._there[devices[0].node] = NodeStay(devices[0].node, kind, offer.price_per_h, now)
        self.stays.append(stay)
        return offer, devices

    def joined(self, device: SimulatedDevice, now: Seconds) -> float:
        """A device has joined. Return the price of its node; 0.0: it has none."""
        stay = self._there.get(device.node)
        if stay is None and device.node in self._prices:
            stay = self._there[device.node] = NodeStay(device.node, device.kind, self._prices[device.node], now)
            self.stays.append(stay)
        if stay is None:
            return 0.0
        if stay.joined_s is None:
            stay.joined_s = now
        return stay.price_per_h

    def left(self, node: str, now: Seconds) -> bool:
        """The last device of *node* has left. Return whether that changes what can be procured."""
        stay = self._there.pop(node, None)
        if stay is None:
            return False
        stay.left_s = now
        return stay.kind in self._offers and node not in self._prices
