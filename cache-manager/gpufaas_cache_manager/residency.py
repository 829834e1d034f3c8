"""
What is in the memory of one device: the models, what each is charged, and in which order they were last used.

One `Residency` per device; the list of a function's copies, wherever they are, is the other half and lives with the
function (``FunctionState.active`` in the scheduler). Whom to evict is decided in `replacement`, on these lists.

Source: GPU-FaaS, section on the cache manager ("one LRU list per GPU"); the charge is the occupation, the peak memory
while the model serves, not the size of its file.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from gpufaas_core.model import Bytes, CopyId, FunctionId, Seconds, copy_id


class Owner(Protocol):
    """What a function is to the cache: the same object for all of its copies."""

    @property
    def id(self) -> FunctionId: ...

    @property
    def copies(self) -> int:
        """How many of them there are on all devices, loading ones included."""

    @property
    def min_copies(self) -> int:
        """So many of them are not evicted for others."""

    def load_s(self, kind: str) -> Seconds:
        """What it costs to bring it back on a device of this kind, in seconds."""


OwnerT = TypeVar("OwnerT", bound=Owner)


class Resident(Generic[OwnerT]):
    """One model in a device's memory: one worker, ready or loading."""

    __slots__ = ("copy", "key", "last_used", "loading", "memory", "owner", "queued", "ready_at", "running")

    def __init__(self, owner: OwnerT, memory: Bytes, now: Seconds, ready_at: Seconds, copy: int = 0) -> None:
        self.owner = owner
        self.copy = copy
        """Its number among the owner's copies on the device."""
        self.key = copy_id(owner.id, copy)
        self.memory = memory
        self.last_used = now
        """The last start of service; the start of the load if it never served."""
        self.running = 0
        self.queued = 0
        """Calls in the device's local queue that need it."""
        self.loading = True
        self.ready_at = ready_at
        """When its load should end; in the past once it has."""

    @property
    def pinned(self) -> bool:
        """Its memory cannot be had now: it runs, loads, or has local work."""
        return self.loading or self.running > 0 or self.queued > 0


class Residency(Generic[OwnerT]):
    """
    The LRU list of one device, with the ledger of its memory.

    Recency is the last start of service; a model that was just loaded is the most recent. All operations are O(1).
    """

    __slots__ = ("free", "kind", "memory", "models")

    def __init__(self, memory: Bytes, kind: str) -> None:
        self.memory = memory
        self.free = memory
        """`memory` less the sum of the charges; never negative."""
        self.kind = kind
        self.models: dict[CopyId, Resident[OwnerT]] = {}
        """Least recently used first: a dict keeps the order of insertion, and a use inserts again."""

    def __iter__(self) -> Iterator[Resident[OwnerT]]:
        return iter(self.models.values())

    def __len__(self) -> int:
        return len(self.models)

    def insert(self, resident: Resident[OwnerT]) -> None:
        """Charge and list *resident* as the most recent."""
        assert resident.memory <= self.free, "the engine checks for room before it inserts"
        self.free -= resident.memory
        self.models[resident.key] = resident

    def remove(self, key: CopyId) -> Resident[OwnerT]:
        resident = self.models.pop(key)
        self.free += resident.memory
        return resident

    def touch(self, resident: Resident[OwnerT], now: Seconds) -> None:
        """It begins to serve a call: the most recent from now on."""
        models = self.models
        key = resident.key
        del models[key]
        models[key] = resident
        resident.last_used = now

    def resize(self, resident: Resident[OwnerT], memory: Bytes) -> None:
        """Change the charge, upwards at most by what is free."""
        grown = memory - resident.memory
        assert grown <= self.free, "a charge grows only into free memory"
        self.free -= grown
        resident.memory = memory

    def listing(self) -> list[tuple[CopyId, Bytes, Seconds]]:
        """The list as a store keeps it: (copy, bytes, last used), least recently used first."""
        return [(each.key, each.memory, each.last_used) for each in self]
