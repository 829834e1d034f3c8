"""
Whether a copy of a function fits on a device, and which copies are evicted for it. The view of policies, the commit of
their actions, and the engine when it places a copy itself all use this check.

`FunctionState.need` says whether the function may be on the device, and how much memory it needs there; the cache
manager's `evictable` says whether a single copy may be evicted.
"""

from collections.abc import Callable
from typing import Any, Final, Generic

from msgspec import Struct

from gpufaas_cache_manager.eviction import evictable, victims
from gpufaas_cache_manager.replacement import Replacement
from gpufaas_cache_manager.residency import Copy, OwnerT, Residency
from gpufaas_core.model import Bytes, CopyId, DeviceId, FunctionId
from gpufaas_core.units import format_bytes


class Fit(Struct, Generic[OwnerT], frozen=True):
    victims: tuple[Copy[OwnerT], ...]
    """The copies to evict, in this order."""


class Reason(Struct, frozen=True):
    """Why a copy does not fit. `say` makes the words, since most reasons are never read."""

    rule: str
    """A format string, which `say` fills in."""
    need: Bytes = 0
    """The bytes that the copy needs; 0: it may not be on the device."""
    have: Bytes = 0
    """The memory for it, as the rule counts it."""
    victim: CopyId | None = None
    """The copy that cannot be evicted."""
    leaving: int = 0
    """The number of copies that would be evicted."""
    plan: int = 0
    """The version of the plan that keeps `victim`."""
    compute: int = 0
    """The compute that the call or copy needs, in per cent."""
    spare: int = 0
    """The compute for it, as the rule counts it."""

    def say(self, function: FunctionId, device: DeviceId, kind: str) -> str:
        need, have = format_bytes(self.need), format_bytes(self.have)
        return self.rule.format(
            function=function, device=device, kind=kind, need=need, have=have, victim=self.victim, leaving=self.leaving,
            plan=self.plan, compute=self.compute, spare=self.spare,
        )  # fmt: skip


NOT_ALLOWED: Final = Reason("device {device} does not satisfy the constraints of {function}")
NO_PROFILE: Final = Reason("{function} has no profile for devices of kind {kind}")

SHUT: Final = Reason("device {device} takes no new calls now")

NO_COMPUTE: Final = "{function} needs {compute} % of the compute of {device}, which has {spare} % spare"
_AS_IT_IS: Final[Fit[Any]] = Fit(())
_TOO_LARGE: Final = "{function} needs {need}, device {device} has {have}"
_NO_ROOM: Final = "{function} needs {need}, device {device} has {have} free, and what could be evicted is too little"
_ABSENT: Final = "{victim} cannot be evicted: {device} does not hold it"
_STAYS: Final = "{victim} cannot be evicted from {device}: it is pinned, or within its minimum of copies"
_KEPT: Final = "{victim} cannot be evicted: plan {plan} keeps it on {device}"
_TOO_FEW: Final = "{function} needs {need}, device {device} has {have} free once {leaving} are evicted"


def fits(
    residency: Residency[OwnerT],
    need: Bytes,
    owner: OwnerT,
    leaving: Replacement | tuple[CopyId, ...],
    compute: int = 0,
    taken: int = 0,
) -> Fit[OwnerT] | Reason:
    """
    Return the copies to evict so that one more copy of *owner*, of *need* bytes, or a call of it, fits; or why it does
    not fit. O(residents).

    :param residency: the device's memory, and the shares of its compute that copies hold
    :param compute: that has to be spare: the call's, or the share of the copy
    :param taken: the compute that running grants hold
    :param leaving: the order in which copies are evicted until there is room; or the copies that are evicted, all of
        them
    """
    lacking = compute and compute + taken + residency.shares - residency.compute
    if isinstance(leaving, tuple):
        return _fits_without(residency, need, leaving, compute, lacking)
    if need <= residency.free and lacking <= 0:
        return _AS_IT_IS
    chosen = victims(leaving, residency, need, owner, lacking)
    if chosen is not None:
        return Fit(chosen)
    if lacking > 0 and victims(leaving, residency, 0, owner, lacking) is None:
        return Reason(NO_COMPUTE, need, residency.free, compute=compute, spare=compute - lacking)
    if need > residency.memory:
        return Reason(_TOO_LARGE, need, residency.memory)
    return Reason(_NO_ROOM, need, residency.free)


def in_the_way(
    residency: Residency[OwnerT], need: Bytes, leaves: Callable[[Copy[OwnerT]], bool], compute: int = 0
) -> tuple[Copy[OwnerT], ...]:
    """
    Return the copies that a plan keeps, or that are within the minimum of their functions, if they leave less than
    *need* bytes of the device, or less than *compute* per cent of it; none: there is room once calls and loads have
    ended. O(residents).

    :param leaves: whether a copy drains, and does not count for its function any more
    """
    beyond: dict[FunctionId, int] = {}
    kept: list[Copy[OwnerT]] = []
    for each in residency:
        owner = each.owner
        if not (owner.min_copies or each.kept is not None) or leaves(each):
            continue
        left = beyond.setdefault(owner.id, owner.copies - owner.min_copies)
        if left > 0 and each.kept is None:
            beyond[owner.id] = left - 1
        else:
            kept.append(each)
    fits_memory = need <= residency.memory - sum(each.memory for each in kept)
    fits_compute = compute <= residency.compute - sum(each.share for each in kept)
    return () if fits_memory and fits_compute else tuple(kept)


def _fits_without(
    residency: Residency[OwnerT], need: Bytes, names: tuple[CopyId, ...], compute: int, lacking: int
) -> Fit[OwnerT] | Reason:
    chosen: list[Copy[OwnerT]] = []
    free = residency.free
    for name in dict.fromkeys(names):
        each = residency.copies.get(name)
        if each is None:
            return Reason(_ABSENT, need, free, name)
        if each.kept is not None:
            return Reason(_KEPT, need, free, name, plan=each.kept)
        if not evictable(each, sum(other.owner is each.owner for other in chosen)):
            return Reason(_STAYS, need, free, name)
        chosen.append(each)
        free += each.memory
        lacking -= each.share
    if lacking > 0:
        return Reason(NO_COMPUTE, need, free, compute=compute, spare=compute - lacking)
    return Fit(tuple(chosen)) if need <= free else Reason(_TOO_FEW, need, free, None, len(chosen))
