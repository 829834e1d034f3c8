"""
The reservations of a device's memory. Pure.

The scheduler plans with its own figures, but no worker starts before its memory is reserved here, and a reservation
ends only when its worker is gone.
"""

from collections.abc import Mapping

from gpufaas_core._types import Bytes


class MemoryLedger:
    """Reservations of one device, in bytes, by the number of the worker that holds them."""

    def __init__(self, capacity: Bytes) -> None:
        self.capacity = capacity
        self._reserved: dict[int, Bytes] = {}
        self._sum = 0

    @property
    def free(self) -> Bytes:
        return self.capacity - self._sum

    @property
    def used(self) -> Bytes:
        return self._sum

    @property
    def reserved(self) -> Mapping[int, Bytes]:
        return self._reserved

    def reserve(self, worker: int, size: Bytes) -> bool:
        """Reserve *size* bytes for *worker*, which has none yet; False, and nothing changes, if they are not free."""
        if worker in self._reserved:
            raise ValueError(f"worker {worker} has a reservation already")
        if size < 0 or size > self.free:
            return False
        self._reserved[worker] = size
        self._sum += size
        return True

    def hold(self, worker: int, size: Bytes) -> bool:
        """Reserve *size* bytes for *worker*, or change its reservation to that; False: they are not free."""
        return self.resize(worker, size) if worker in self._reserved else self.reserve(worker, size)

    def resize(self, worker: int, size: Bytes) -> bool:
        """Change the reservation of *worker*; False, and nothing changes, if it has none or room is lacking."""
        before = self._reserved.get(worker)
        if before is None or size < 0 or size - before > self.free:
            return False
        self._reserved[worker] = size
        self._sum += size - before
        return True

    def release(self, worker: int) -> Bytes:
        """End the reservation of *worker* and return its size; 0 when it has none."""
        size = self._reserved.pop(worker, 0)
        self._sum -= size
        return size
