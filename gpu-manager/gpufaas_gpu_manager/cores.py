"""
The cores of CPU devices: how many a worker may use, and which, where the kernel cannot limit their time.

A control group limits CPU time to fractions of a core (cgroups.py). Without one, a worker is bound to whole cores.
"""

import math
import os
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from gpufaas_core.model import ALL_COMPUTE


class CpuShare(Struct, frozen=True):
    """What a worker may use of its device's cores."""

    device: str
    """Its name on its node: ``cpu-0``."""
    cores: float
    """The cores of the device."""
    share: int = 0
    """The worker's share of them, in per cent; 0: all, beside others."""

    @property
    def threads(self) -> int:
        """How many threads can run at once."""
        return max(1, math.ceil(self.cores * (self.share or ALL_COMPUTE) / ALL_COMPUTE))


class Pinned:
    """The CPUs of one worker."""

    def __init__(self, cpus: tuple[int, ...], users: dict[int, int]) -> None:
        self.cpus = cpus
        self._users = users
        for each in cpus:
            users[each] += 1

    def give_back(self) -> None:
        """The worker is gone. May be called again."""
        for each in self.cpus:
            self._users[each] -= 1
        self.cpus = ()


class Pinning:
    """Which CPUs the devices of this node have, and which of these their workers are bound to."""

    def __init__(self, cpus: Iterable[int] | None = None) -> None:
        """:param cpus: numbers of those that there are; None: those of this process"""
        self._all: Final = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
        self._next = 0
        self._devices: dict[str, dict[int, int]] = {}
        """By device: how many workers are bound to each of its CPUs."""

    def take(self, share: CpuShare) -> Pinned:
        """Return the CPUs for a worker: of its device's, those that the fewest others are bound to."""
        users = self._devices.get(share.device)
        if users is None:
            users = self._devices[share.device] = self._of_device(math.ceil(share.cores))
        count = min(share.threads, len(users))
        return Pinned(tuple(sorted(users, key=lambda cpu: (users[cpu], cpu))[:count]), users)

    def _of_device(self, count: int) -> dict[int, int]:
        """Devices take CPUs in turn, so that they have different ones as long as there are enough."""
        taken = [self._all[(self._next + each) % len(self._all)] for each in range(min(count, len(self._all)))]
        self._next += len(taken)
        return dict.fromkeys(taken, 0)
