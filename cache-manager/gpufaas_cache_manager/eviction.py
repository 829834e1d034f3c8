"""
What to evict: the one procedure that applies a replacement order to the residency list of a device.

That pinned models, those that a plan keeps, and those within their minimum of copies are never victims is checked
here, once for all orders.
"""

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_cache_manager.residency import Copy, OwnerT, Residency
from gpufaas_core.model import Bytes


def evictable(copy: Copy[OwnerT], others: int = 0) -> bool:
    """Whether it may be evicted with *others* of its owner: not pinned, kept or pending, and beyond the minimum."""
    if copy.running or copy.loading or copy.queued or copy.kept is not None:
        return False
    owner = copy.owner
    # Of a pending one, calls that wait for the revision before it would take the room, until it has the calls.
    return owner.before is None and owner.copies - others > owner.min_copies


def victims(
    replacement: Replacement, residency: Residency[OwnerT], need: Bytes, owner: OwnerT | None = None, compute: int = 0
) -> tuple[Copy[OwnerT], ...] | None:
    """
    Return what to evict so that *need* bytes are free: nothing if they are, None if pins make it impossible.

    :param owner: the function that gets the memory: its other copies are no victims, nor are those of the revision
        that it succeeds
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
    before = None if owner is None else owner.before
    for each in replacement.order(residency):
        its = each.owner
        others = sum(other.owner is its for other in chosen) if its.min_copies else 0
        if its is owner or its is before or not evictable(each, others) or (short <= 0 and not each.share):
            continue
        chosen.append(each)
        short -= each.memory
        compute -= each.share
        if short <= 0 and compute <= 0:
            return tuple(chosen)
    return None
