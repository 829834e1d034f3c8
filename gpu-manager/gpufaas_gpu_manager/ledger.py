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
        """Reserve *size* bytes for *worker*, in place of what it has; False: they are not free, and nothing changes."""
        before = self._reserved.get(worker, 0)
        if size < 0 or size - before > self.free:
            return False
        self._reserved[worker] = size
        self._sum += size - before
        return True

    def resize(self, worker: int, size: Bytes) -> bool:
        """As `reserve`; False, too, if *worker* has none."""
        return worker in self._reserved and self.reserve(worker, size)

    def release(self, worker: int) -> None:
        """End the reservation of *worker*, if it has one."""
        self._sum -= self._reserved.pop(worker, 0)
