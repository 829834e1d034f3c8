"""
The models in the memory of one device: what each is charged, and in which order they were last used.

One `Residency` per device. `replacement` chooses victims from these lists. The scheduler keeps the other list, the
copies of each function on all devices.

Source: GPU-FaaS, section on the cache manager ("one LRU list per GPU"). The charge is the occupation, which is the peak
memory while the model serves, and not the size of its file.
"""

from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

from gpufaas_core.model import ALL_COMPUTE, Bytes, CopyId, DeviceId, FunctionId, Part, Seconds, copy_id


class CachedFunction(Protocol):
    """What a function is to the cache: the same object for all of its copies."""

    @property
    def id(self) -> FunctionId: ...

    @property
    def copies(self) -> int:
        """The number of its copies on all devices, loading ones included."""

    @property
    def before(self) -> "CachedFunction | None":
        """The function that it succeeds once it is loaded."""

    @property
    def share(self) -> int:
        """What each copy holds of its device's compute for as long as it is there, in per cent."""

    @property
    def min_copies(self) -> int:
        """The number of copies that are never evicted for other functions."""

    def load_s(self, kind: str) -> Seconds:
        """Return what it costs to load it again on a device of *kind*, in seconds."""


OwnerT = TypeVar("OwnerT", bound=CachedFunction)


NOT_ASKED: Final = 0
ASKED: Final = 1
ANSWERED: Final = 2


class Copy(Generic[OwnerT]):
    """One copy of a function in a device's memory: one worker, ready or loading."""

    __slots__ = (
        "asked", "batch", "id", "kept", "last_used", "limit", "loading", "memory", "number", "owner", "parts", "queued",
        "ready_at", "reserve", "rest", "running", "share", "silent", "slots", "split", "tier", "told",
    )  # fmt: skip

    def __init__(self, owner: OwnerT, memory: Bytes, now: Seconds, ready_at: Seconds, number: int = 0) -> None:
        self.owner = owner
        self.number = number
        """Among all copies of its function that ever were."""
        self.id = copy_id(owner.id, number)
        self.memory = memory
        """Its charge. Decisions count with this; it is not reclaimed while the worker lives."""
        self.limit = memory
        """What its worker may use: its charge, and what is lent to it while no other worker needs it."""
        self.told = memory
        """What its node was last told that its worker may use."""
        self.asked = NOT_ASKED
        """Whether it was asked, during a call, to return what is lent to it."""
        self.last_used = now
        """The last start of service; the start of the load if it never served."""
        self.share = owner.share
        """What it holds of the compute, and is capped at, in per cent; 0: its grants reserve what they need."""
        self.reserve = 0
        """Without a share: what a grant of it counts for while it runs, in per cent; 0: as its function says."""
        self.kept: int | None = None
        """The version of the plan that names it: it is evicted for nobody. None: no plan in force does."""
        self.parts: tuple[Part, ...] = ()
        """What grants say of it; empty: it changed, or no grant was made."""
        self.split = False
        """The copy has parts on several devices. Each has an entry in the list of its device; that of the first stands
        for all in the lists of the function, and its number is one."""
        self.rest: tuple[tuple[DeviceId, Copy[OwnerT]], ...] = ()
        """Of a split copy, its entry on the first device has the entries on the others here: they run, load and go with
        it."""
        self.running = 0
        """Its running grants."""
        self.slots = 0
        """Grants that it runs at once; 0: as its function needs it. `batch` likewise: calls of one grant."""
        self.batch = 0
        self.queued = 0
        """Calls in the device's local queue that need it."""
        self.loading = True
        self.silent = False
        """Its worker owes a sign of life, so it takes no new calls."""
        self.tier = ""
        """Where its weights came from, as `messages.Loaded.tier`; empty: it loads."""
        self.ready_at = ready_at
        """When its load should end; in the past once it has."""

    @property
    def pinned(self) -> bool:
        """Whether it cannot be evicted now: it runs, loads, or has calls in the local queue."""
        return self.loading or self.running > 0 or self.queued > 0


class Residency(Generic[OwnerT]):
    """
    The LRU list of one device, with the ledger of its memory.

    Recency is the last start of service; a model that was just loaded is the most recent. Operations are O(1), but
    `reclaim` is O(residents).

    There are two sums. Decisions use the sum of charges (`free`). Workers are held to their limits, which are charges
    and what is lent beyond them; the sum of limits never exceeds the device's memory (`unpromised`). Memory lent to an
    idle worker counts as free, since it can be reclaimed at once; memory lent to a running worker does not.
    """

    __slots__ = ("_newest", "compute", "copies", "free", "held", "kind", "memory", "shares", "unpromised")

    def __init__(self, memory: Bytes, kind: str, compute: int = ALL_COMPUTE) -> None:
        self.memory = memory
        self.free = memory
        """`memory` less the sum of the charges, and less `held`; never negative."""
        self.held = 0
        """Lent to residents that run, in bytes."""
        self.unpromised = memory
        """`memory` less the sum of the limits; never negative."""
        self.kind = kind
        self.compute = compute
        """In per cent."""
        self.shares = 0
        """The compute that copies hold."""
        self.copies: dict[CopyId, Copy[OwnerT]] = {}
        """Least recently used first: a dict keeps the order of insertion, and a use inserts again."""
        self._newest: Copy[OwnerT] | None = None
        """The last one in `copies`; None: not known."""

    def __iter__(self) -> Iterator[Copy[OwnerT]]:
        return iter(self.copies.values())

    def __len__(self) -> int:
        return len(self.copies)

    def insert(self, copy: Copy[OwnerT]) -> None:
        """Charge and list *copy* as the most recent."""
        assert copy.memory <= self.free, "the engine checks for room before it inserts"
        assert copy.limit <= self.unpromised, "the engine reclaims what is lent before it inserts"
        self.free -= copy.memory
        self.unpromised -= copy.limit
        self.shares += copy.share
        self.copies[copy.id] = self._newest = copy
        if copy.running:
            self.hold(copy)

    def remove(self, key: CopyId) -> Copy[OwnerT]:
        copy = self.copies.pop(key)
        self._newest = None
        if copy.running:
            self.let_go(copy)
        self.free += copy.memory
        self.unpromised += copy.limit
        self.shares -= copy.share
        copy.limit = copy.memory  # nothing is lent to it any more, also while its last calls end
        return copy

    def touch(self, copy: Copy[OwnerT], now: Seconds) -> None:
        """Make it the most recent: it begins to serve a call."""
        copy.last_used = now
        if copy is not self._newest:
            copies = self.copies
            key = copy.id
            del copies[key]
            copies[key] = self._newest = copy

    def hold(self, copy: Copy[OwnerT]) -> None:
        """*copy* runs from now on: memory lent to it is not free."""
        lent = copy.limit - copy.memory
        self.held += lent
        self.free -= lent

    def let_go(self, copy: Copy[OwnerT]) -> None:
        """*copy* is idle again: memory lent to it can be reclaimed at once."""
        lent = copy.limit - copy.memory
        self.held -= lent
        self.free += lent

    def room_of(self, copy: Copy[OwnerT]) -> Bytes:
        """Return the most that it can have without an eviction: its charge, and all that is free or lent to it."""
        return copy.memory + self.free + (copy.limit - copy.memory if copy.running else 0)

    def limit_compute(self, copy: Copy[OwnerT], share: int) -> None:
        """*copy* holds *share* of the compute from now on."""
        self.shares += share - copy.share
        copy.share = share
        copy.parts = ()

    def resize(self, copy: Copy[OwnerT], memory: Bytes, limit: Bytes) -> None:
        """Change its charge and its limit; a limit grows by what is unpromised at most."""
        assert memory <= limit, "a limit is never below the charge"
        assert limit - copy.limit <= self.unpromised, "a limit grows only into unpromised memory"
        if copy.running:
            self.let_go(copy)
        self.free -= memory - copy.memory
        self.unpromised -= limit - copy.limit
        copy.memory, copy.limit = memory, limit
        copy.parts = ()
        if copy.running:
            self.hold(copy)
        assert self.free >= 0, "a charge grows only into free memory"

    def reclaim(self, need: Bytes, apart: Copy[OwnerT] | None = None) -> list[Copy[OwnerT]]:
        """
        Reclaim what is lent to idle residents until *need* bytes are unpromised: least recently used first, no more
        than is lacking, nothing from *apart*. Return the residents whose limit changed.
        """
        changed = []
        for each in self.copies.values():
            lacking = need - self.unpromised
            if lacking <= 0:
                break
            lent = each.limit - each.memory
            if lent and not each.running and each is not apart:
                self.resize(each, each.memory, each.limit - min(lent, lacking))
                changed.append(each)
        return changed
