"""
What a node keeps of weights in its host memory, within a budget and a number of files. Pure: the node and the simulator
decide by this.

Weights are worth keeping that are often asked for and save much time per byte. What was asked for long ago counts less:
half after `HALF_LIFE_S`. All weights age alike, so the order of two changes only when one of them is asked for. Weights
that workers have mapped stay charged until the last mapping ends: to drop them earlier would free nothing.

What parked workers hold beside weights is charged, too, as far as there is room. They give way to weights, and both to
what is set aside.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import inf, log2
from sys import maxsize
from typing import Final, Generic, TypeVar

from gpufaas_core._types import Bytes, Seconds

KeyT = TypeVar("KeyT", bound=Hashable)
WorkerT = TypeVar("WorkerT", bound=Hashable)

HALF_LIFE_S: Final[Seconds] = 600.0


@dataclass(slots=True)
class _Kept:
    size: Bytes
    mapped: int = 0
    dropped: bool = False
    """No start gets these weights any more: they go with their last mapping."""


class HostTier(Generic[KeyT, WorkerT]):
    """
    See module. A key names weights: by their digest on a node, by their function in the simulator. A worker is named by
    its number on a node, by the place of its copy in the simulator.
    """

    def __init__(self, budget: Bytes, most: int = maxsize) -> None:
        """:param most: how many may be kept: each is an open file of the node"""
        self.budget = budget
        self.most = most
        self.used: Bytes = 0
        self._kept: dict[KeyT, _Kept] = {}
        self._worth: dict[KeyT, float] = {}
        """The logarithm of how often and how recently weights were asked for; also of those that are not kept."""
        self._saves: dict[KeyT, float] = {}
        """The logarithm of the seconds that a start saves for each byte of them."""
        self.parked: dict[WorkerT, Bytes] = {}
        """What parked workers hold; the one that was parked first before others."""
        self._aside: Bytes = 0

    def __contains__(self, key: KeyT) -> bool:
        """Whether a start can have them from here."""
        kept = self._kept.get(key)
        return kept is not None and not kept.dropped

    def __iter__(self) -> Iterator[KeyT]:
        return (key for key, kept in self._kept.items() if not kept.dropped)

    def asked(self, key: KeyT, now: Seconds) -> None:
        """A start wants these weights."""
        at = now / HALF_LIFE_S
        before = self._worth.get(key, -inf)
        high = max(at, before)
        self._worth[key] = high + log2(2.0 ** (at - high) + 2.0 ** (before - high))

    def keep(self, key: KeyT, size: Bytes, saves_s: Seconds) -> list[KeyT] | None:
        """
        Keep *key*, of *size* bytes, which makes a start *saves_s* sooner, in place of weights that are worth less;
        return those. None: it is not kept.
        """
        self._saves[key] = log2(max(saves_s, 1e-6) / max(size, 1))
        found = self._kept.get(key)
        if found is not None:
            found.dropped = False
            return []
        worth = self.worth(key)
        victims: list[KeyT] = []
        short, over = self.used + size - self.budget, len(self._kept) + 1 - self.most
        if short > 0 or over > 0:
            for each in sorted((each for each, kept in self._kept.items() if not kept.mapped), key=self.worth):
                if (short <= 0 and over <= 0) or self.worth(each) >= worth:
                    break
                victims.append(each)
                short -= self._kept[each].size
                over -= 1
        if short > 0 or over > 0:
            return None
        for each in victims:
            self.used -= self._kept.pop(each).size
        self._kept[key] = _Kept(size)
        self.used += size
        return victims

    def worth(self, key: KeyT) -> float:
        """Return what orders weights: those worth least go first."""
        return self._worth.get(key, -inf) + self._saves.get(key, 0.0)

    def park(self, worker: WorkerT, size: Bytes) -> bool:
        """Charge what a parked worker holds. False: there is no room for it."""
        if self.used + size > self.budget:
            return False
        self.parked[worker] = size
        self.used += size
        return True

    def repark(self, worker: WorkerT, size: Bytes) -> None:
        """It holds *size* bytes."""
        self.used += size - self.parked[worker]
        self.parked[worker] = size

    def unpark(self, worker: WorkerT) -> None:
        self.used -= self.parked.pop(worker, 0)

    def set_aside(self, size: Bytes) -> bool:
        """
        Charge *size* bytes that are no weights' and no parked worker's; less than 0: give them back. Weights that are
        too many then go with the next ones that are kept. False: it would be more than half of the budget.
        """
        if size > 0 and self._aside + size > self.budget // 2:
            return False
        self._aside += size
        self.used += size
        return True

    def crowding(self, size: Bytes, apart: WorkerT | None = None) -> list[WorkerT]:
        """Return the parked workers that have to end before there is room for *size* bytes, but not *apart*."""
        short, found = self.used + size - self.budget, list[WorkerT]()
        for worker, held in self.parked.items():
            if short <= 0:
                break
            if worker != apart:
                found.append(worker)
                short -= held
        return found

    def map(self, key: KeyT) -> None:
        """A worker gets them."""
        self._kept[key].mapped += 1

    def unmap(self, key: KeyT) -> bool:
        """A worker that had them is gone. Return whether they went with it."""
        kept = self._kept[key]
        kept.mapped -= 1
        return self._gone(key, kept)

    def drop(self, key: KeyT) -> bool:
        """Keep them no longer. Return whether they are gone; else they go with their last mapping."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        kept.dropped = True
        return self._gone(key, kept)

    def forget(self, key: KeyT) -> None:
        """The weights will not be asked for again."""
        self._worth.pop(key, None)
        self._saves.pop(key, None)

    def _gone(self, key: KeyT, kept: _Kept) -> bool:
        if kept.mapped or not kept.dropped:
            return False
        self.used -= kept.size
        del self._kept[key]
        return True
