"""What was paid: node-seconds of the ledger, divided among functions by their device-seconds; idle time apart. Pure."""

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from gpufaas_core._types import Seconds
from gpufaas_core.orders import Stay

By: TypeAlias = Literal["function", "namespace", "offer"]
IDLE: Final = "(idle)"


class Item(Struct):
    """What was paid for one function, namespace or offer."""

    name: str
    """`IDLE`: for nobody."""
    node_s: Seconds = 0.0
    cost: float = 0.0
    """In the provider's currency."""
    unpriced_s: Seconds = 0.0
    """Those of `node_s` on nodes that were offered without a price, and cost 0."""


def bill(stays: Iterable[Stay], since: Seconds, now: Seconds, by: By) -> list[Item]:
    """
    Return what was paid from *since* until *now*, both Unix times, the dearest item first.

    Of a stay that had begun before *since*, the time from then on is divided as its whole time is.
    """
    items: dict[str, Item] = {}
    for stay in stays:
        if not stay.since:
            continue  # no node was started
        held_s = (stay.until or now) - max(stay.since, since)
        if held_s <= 0.0:
            continue
        for name, part in _parts(stay, now, by).items():
            item = items.setdefault(name, Item(name))
            item.node_s += held_s * part
            item.cost += held_s * part * (stay.price_per_h or 0.0) / 3600
            item.unpriced_s += held_s * part if stay.price_per_h is None else 0.0
    return sorted(items.values(), key=lambda each: (-each.cost, -each.node_s, each.name))


def _parts(stay: Stay, now: Seconds, by: By) -> dict[str, float]:
    """Return what share of the stay is whose; together 1."""
    if by == "offer":
        return {stay.kind: 1.0}
    device_s, used_s = ((stay.until or now) - stay.since) * stay.devices, sum(stay.used_s.values())
    busy = min(1.0, stay.busy_s / device_s) if device_s > 0.0 and used_s > 0.0 else 0.0
    parts: dict[str, float] = {IDLE: 1.0 - busy} if busy < 1.0 else {}
    for function, seconds in stay.used_s.items():
        name = function.rpartition(".")[2] if by == "namespace" else function
        parts[name] = parts.get(name, 0.0) + busy * seconds / used_s
    return parts
