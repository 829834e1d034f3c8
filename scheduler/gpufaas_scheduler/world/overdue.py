"""
When local queues go back to the global queue: when their device is late by the patience of their first call.

Time alone makes this true, so `Overdue.at` is one of the times at which the engine is woken.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_scheduler.world import finish
from gpufaas_scheduler.world.device import DeviceState

_SLACK: Final = 1000


class Overdue:
    """
    Devices with local queues, by the time at which these go back. `note` is called when the first call of a local queue
    or the estimated end of a device changes.

    A device has one valid entry. A later time moves it only when it surfaces, since nearly each call makes it later.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Seconds, int, DeviceState]] = []
        """A heap. An entry whose time is not the device's `noted_at` is void. It is dropped when it surfaces, or when
        there are too many. If the first entry is later than now, none is due."""
        self._limit = _SLACK

    def note(self, device: DeviceState) -> None:
        """The first call of the local queue of *device* changed, or the device's estimated end."""
        at = finish.overdue_at(device)
        if at >= device.noted_at:
            return
        device.noted_at = at
        entries = self.entries
        heappush(entries, (at, device.order, device))
        if len(entries) > self._limit:
            entries[:] = [each for each in entries if each[0] == each[2].noted_at]
            heapify(entries)
            self._limit = 2 * len(entries) + _SLACK

    def at(self) -> Seconds | None:
        """Return when the next local queue goes back."""
        entries = self.entries
        while entries:
            noted_at, order, device = entries[0]
            at = finish.overdue_at(device)
            if noted_at != device.noted_at:
                heappop(entries)
            elif at == noted_at:
                return at
            else:
                device.noted_at = at
                heapreplace(entries, (at, order, device)) if at < inf else heappop(entries)
        return None

    def take(self, now: Seconds) -> list[DeviceState]:
        """Remove and return the devices whose local queues go back by *now*."""
        found = []
        while (at := self.at()) is not None and at <= now:
            device = heappop(self.entries)[2]
            device.noted_at = inf
            found.append(device)
        return found
