"""
Whom to evict: replacement orders over the residency lists, and the one procedure that applies them.

An order only says who goes first; that a pinned model or one within its minimum of copies is never a victim is held
here, once, for all orders.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from gpufaas_cache_manager.residency import OwnerT, Residency, Resident
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Bytes


class Replacement(Protocol):
    """Orders the models of a device, best victim first. Pure, and total: the same list gives the same order."""

    @property
    def name(self) -> str: ...

    def order(self, residency: Residency[OwnerT]) -> Iterable[Resident[OwnerT]]: ...


class Lru:
    """Least recently used first (GPU-FaaS, cache manager)."""

    name = "lru"

    def order(self, residency: Residency[OwnerT]) -> Iterable[Resident[OwnerT]]:
        return residency


class CostAware:
    """
    Duplicates before last copies, then the least seconds of reload per byte freed; ties: least recently used.

    LRU alone evicts last copies while duplicates stay, and at a working set that fits the cluster that is where most
    of the avoidable misses come from (specs/gpu-faas.md, 7).
    """

    name = "cost-aware"

    def order(self, residency: Residency[OwnerT]) -> Iterable[Resident[OwnerT]]:
        kind = residency.kind

        def cost(each: Resident[OwnerT]) -> tuple[bool, float]:
            return each.owner.copies <= 1, each.owner.load_s(kind) / max(1, each.memory)

        return sorted(residency, key=cost)  # stable: equals stay in LRU order


REPLACEMENTS: Final[Mapping[str, Callable[[], Replacement]]] = {Lru.name: Lru, CostAware.name: CostAware}


def make_replacement(name: str) -> Replacement:
    """:raises InvalidSpec: no such order; says which there are"""
    try:
        return REPLACEMENTS[name]()
    except KeyError:
        raise InvalidSpec(f"no replacement order is called {name!r}: choose one of {', '.join(REPLACEMENTS)}") from None


def victims(replacement: Replacement, residency: Residency[OwnerT], need: Bytes) -> tuple[Resident[OwnerT], ...] | None:
    """
    Return whom to evict so that *need* bytes are free: none if they are, None if pins make it impossible.

    Takes victims in order until it fits and gives none back, as the paper does: a smaller set could be found, at the
    price of evicting what was used last. O(residents).
    """
    short = need - residency.free
    if short <= 0:
        return ()
    if need > residency.memory:
        return None
    chosen = []
    for each in replacement.order(residency):
        if each.loading or each.running or each.queued or each.owner.copies <= each.owner.min_copies:
            continue
        chosen.append(each)
        short -= each.memory
        if short <= 0:
            return tuple(chosen)
    return None
