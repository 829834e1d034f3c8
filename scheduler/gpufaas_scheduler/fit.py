"""
Whether a copy of a function fits on a device, and which copies are evicted for it. The view of policies, the commit of
their actions, and the engine when it places a copy itself all use this check.

`FunctionState.need` says whether the function may be on the device, and how much memory it needs there; the cache
manager's `evictable` says whether a single copy may be evicted.
"""

from collections.abc import Callable
from typing import Any, Final, Generic

from msgspec import Struct

from gpufaas_cache_manager.replacement import Replacement, evictable, victims
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
    """Of the copy; 0: it may not be on the device."""
    have: Bytes = 0
    """The memory for it, as the rule counts it."""
    victim: CopyId | None = None
    """The copy that cannot be evicted."""
    leaving: int = 0
    """The number of copies that would be evicted."""

    def say(self, function: FunctionId, device: DeviceId, kind: str) -> str:
        need, have = format_bytes(self.need), format_bytes(self.have)
        return self.rule.format(
            function=function, device=device, kind=kind, need=need, have=have, victim=self.victim, leaving=self.leaving
        )


NOT_ALLOWED: Final = Reason("device {device} does not satisfy the constraints of {function}")
NO_PROFILE: Final = Reason("{function} has no profile for devices of kind {kind}")

_AS_IT_IS: Final[Fit[Any]] = Fit(())
_TOO_LARGE: Final = "{function} needs {need}, device {device} has {have}"
_NO_ROOM: Final = "{function} needs {need}, device {device} has {have} free, and what could be evicted is too little"
_ABSENT: Final = "{victim} cannot be evicted: {device} does not hold it"
_STAYS: Final = "{victim} cannot be evicted from {device}: it is pinned, or within its minimum of copies"
_TOO_FEW: Final = "{function} needs {need}, device {device} has {have} free once {leaving} are evicted"


def fits(
    residency: Residency[OwnerT], need: Bytes, owner: OwnerT, leaving: Replacement | tuple[CopyId, ...]
) -> Fit[OwnerT] | Reason:
    """
    Return the copies to evict so that one more copy of *owner*, of *need* bytes, fits; or why it does not fit.
    O(residents).

    :param residency: the device's memory
    :param leaving: the order in which copies are evicted until there is room; or the copies that are evicted, all of
        them
    """
    if isinstance(leaving, tuple):
        return _fits_without(residency, need, leaving)
    if need <= residency.free:
        return _AS_IT_IS
    chosen = victims(leaving, residency, need, owner)
    if chosen is not None:
        return Fit(chosen)
    if need > residency.memory:
        return Reason(_TOO_LARGE, need, residency.memory)
    return Reason(_NO_ROOM, need, residency.free)


def in_the_way(
    residency: Residency[OwnerT], need: Bytes, leaves: Callable[[Copy[OwnerT]], bool]
) -> tuple[Copy[OwnerT], ...]:
    """
    Return the copies within the minimum of their functions that leave less than *need* bytes of the device; none: there
    is room once calls and loads have ended. O(residents).

    :param leaves: whether a copy drains, and does not count for its function any more
    """
    beyond: dict[FunctionId, int] = {}
    kept: list[Copy[OwnerT]] = []
    for each in residency:
        owner = each.owner
        if not owner.min_copies or leaves(each):
            continue
        left = beyond.setdefault(owner.id, owner.copies - owner.min_copies)
        if left > 0:
            beyond[owner.id] = left - 1
        else:
            kept.append(each)
    return tuple(kept) if need > residency.memory - sum(each.memory for each in kept) else ()


def _fits_without(residency: Residency[OwnerT], need: Bytes, names: tuple[CopyId, ...]) -> Fit[OwnerT] | Reason:
    chosen: list[Copy[OwnerT]] = []
    free = residency.free
    for name in dict.fromkeys(names):
        each = residency.copies.get(name)
        if each is None:
            return Reason(_ABSENT, need, free, name)
        if not evictable(each, sum(other.owner is each.owner for other in chosen)):
            return Reason(_STAYS, need, free, name)
        chosen.append(each)
        free += each.memory
    return Fit(tuple(chosen)) if need <= free else Reason(_TOO_FEW, need, free, None, len(chosen))
