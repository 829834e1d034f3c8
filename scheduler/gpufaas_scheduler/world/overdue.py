"""
When local queues go back to the global one: once their device is late by as much as their first call had patience for.

Time alone makes this true, so `Overdue.at` is part of when the engine wants to be woken.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_scheduler.world.state import DeviceState

_SLACK: Final = 1000


class Overdue:
    """
    Devices with local queues, by when these go back. Told of each change of a first call or an estimated end.

    A device has one entry that counts. It is moved when it surfaces and not when its time becomes a later one, as it
    does with nearly each call.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Seconds, int, DeviceState]] = []
        """A heap. Those whose time is not `noted_at` of their device are dropped when they surface or outnumber the
        others. While the first one is later than now, none is due."""
        self._limit = _SLACK

    def note(self, device: DeviceState) -> None:
        """The first call in the local queue of *device* is another one, or the device should end at another time."""
        at = device.overdue_at
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
        """When the next local queue goes back."""
        entries = self.entries
        while entries:
            noted_at, order, device = entries[0]
            at = device.overdue_at
            if noted_at != device.noted_at:
                heappop(entries)
            elif at == noted_at:
                return at
            else:
                device.noted_at = at
                heapreplace(entries, (at, order, device)) if at < inf else heappop(entries)
        return None

    def take(self, now: Seconds) -> list[DeviceState]:
        """Return the devices whose local queues are to go back by *now*, and forget them."""
        found = []
        while (at := self.at()) is not None and at <= now:
            device = heappop(self.entries)[2]
            device.noted_at = inf
            found.append(device)
        return found
