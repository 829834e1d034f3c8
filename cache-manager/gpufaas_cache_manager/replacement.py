"""
What to evict: replacement orders over the residency lists, and the one procedure that applies them.

An order only ranks the models. That pinned models and those within their minimum of copies are never victims is checked
here, once for all orders.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from gpufaas_cache_manager.residency import Copy, OwnerT, Residency
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Bytes, FunctionId


class Replacement(Protocol):
    """Orders the models of a device, best victim first. Pure, and total: the same list gives the same order."""

    @property
    def name(self) -> str: ...

    def order(self, residency: Residency[OwnerT]) -> Iterable[Copy[OwnerT]]: ...


class Lru:
    """Least recently used first (GPU-FaaS, cache manager)."""

    name = "lru"

    def order(self, residency: Residency[OwnerT]) -> Iterable[Copy[OwnerT]]:
        return residency


class CostAware:
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


def make_replacement(name: str) -> Replacement:
    """:raises InvalidSpec: there is no such order; names those that there are"""
    try:
        return REPLACEMENTS[name]()
    except KeyError:
        raise InvalidSpec(f"no replacement order is called {name!r}: choose one of {', '.join(REPLACEMENTS)}") from None


def evictable(copy: Copy[OwnerT], others: int = 0) -> bool:
    """Return whether it may be evicted together with *others* of its owner: not pinned, not within the minimum."""
    if copy.running or copy.loading or copy.queued:
        return False
    owner = copy.owner
    return owner.copies - others > owner.min_copies


def victims(
    replacement: Replacement,
    residency: Residency[OwnerT],
    need: Bytes,
    owner: OwnerT | None = None,
    compute: int = 0,
) -> tuple[Copy[OwnerT], ...] | None:
    """
    Return what to evict so that *need* bytes are free: nothing if they are, None if pins make it impossible.

    :param owner: the function that gets the memory: its other copies are no victims
    :param compute: so much of what copies hold of the compute must become free, too

    Takes victims in order until the need is met, as the paper does. A smaller set may exist, but it would contain
    models that were used more recently. O(residents).
    """
    short = need - residency.free
    if short <= 0 and compute <= 0:
        return ()
    if need > residency.memory or compute > residency.shares:
        return None
    chosen: list[Copy[OwnerT]] = []
    for each in replacement.order(residency):
        its = each.owner
        others = sum(other.owner is its for other in chosen) if its.min_copies else 0
        if its is owner or not evictable(each, others) or (short <= 0 and not each.share):
            continue
        chosen.append(each)
        short -= each.memory
        compute -= each.share
        if short <= 0 and compute <= 0:
            return tuple(chosen)
    return None
