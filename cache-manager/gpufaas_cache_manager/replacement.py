"""Replacement orders over the residency lists. An order only ranks the models; `eviction` applies it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final, Protocol

from msgspec import Meta, Struct

from gpufaas_cache_manager.residency import Copy, OwnerT, Residency
from gpufaas_core.model import FunctionId


class Replacement(Protocol):
    """Orders the models of a device, best victim first. Pure, and total: the same list gives the same order."""

    def order(self, residency: Residency[OwnerT]) -> Iterable[Copy[OwnerT]]: ...


class ReplacementOptions(Struct, frozen=True):
    """Of all orders here."""

    park: Annotated[bool, Meta(description="victims are parked on nodes that can do that, and not ended")] = False


class _Order:
    Options = ReplacementOptions

    def __init__(self, options: ReplacementOptions = ReplacementOptions()) -> None:  # noqa: B008 (frozen)
        self.park = options.park


class Lru(_Order):
    """Least recently used first (GPU-FaaS, cache manager)."""

    name = "lru"

    def order(self, residency: Residency[OwnerT]) -> Iterable[Copy[OwnerT]]:
        return residency.copies.values()


class CostAware(_Order):
    """
    Duplicates before last copies, then the least seconds of reload per byte freed; ties: least recently used.

    LRU alone evicts last copies while duplicates stay. Where the working set fits the cluster, most of the avoidable
    misses come from that.
    """

    name = "cost-aware"

    def order(self, residency: Residency[OwnerT]) -> Iterable[Copy[OwnerT]]:
        kind = residency.kind
        before: dict[FunctionId, int] = {}

        def cost(each: Copy[OwnerT]) -> tuple[bool, float]:
            owner = each.owner
            others = before.get(owner.id, 0)  # copies here that go before this one
            before[owner.id] = others + 1
            return owner.copies - others <= 1, owner.load_s(kind) / max(1, each.memory)

        return sorted(residency, key=cost)  # stable and called in LRU order: equals stay in it


REPLACEMENTS: Final[Mapping[str, Callable[[], Replacement]]] = {Lru.name: Lru, CostAware.name: CostAware}
