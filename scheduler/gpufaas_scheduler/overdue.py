"""
When local queues go back to the global one: once their device is late by as much as their first call had patience for.

Time alone makes this true, so `Overdue.at` is part of when the engine wants to be woken.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_scheduler.state import DeviceState

_SLACK: Final = 1000


class Overdue:
    """Devices with local queues, by when these go back. Told of each change of a first call or an estimated end."""

    def __init__(self) -> None:
        self.entries: list[tuple[Seconds, int, DeviceState]] = []
        """A heap; entries that are true no more are dropped when they surface or outnumber the others. While the first
        one is later than now, none is due."""
        self._limit = _SLACK

    def note(self, device: DeviceState) -> None:
        """The first call in the local queue of *device* is another one, or the device should end at another time."""
        at = device.overdue_at
        if at == inf:
            return
        entries = self.entries
        heappush(entries, (at, device.order, device))
        if len(entries) > self._limit:
            entries[:] = {each[2]: each for each in entries if _holds(each)}.values()
            heapify(entries)
            self._limit = 2 * len(entries) + _SLACK

    def at(self) -> Seconds | None:
        """When the next local queue goes back."""
        entries = self.entries
        while entries:
            if _holds(entries[0]):
                return entries[0][0]
            heappop(entries)
        return None

    def take(self, now: Seconds) -> list[DeviceState]:
        """Return the devices whose local queues are to go back by *now*, and forget them."""
        found = []
        while (at := self.at()) is not None and at <= now:
            device = heappop(self.entries)[2]
            if device not in found:
                found.append(device)
        return found


def _holds(entry: tuple[Seconds, int, DeviceState]) -> bool:
    return entry[0] == entry[2].overdue_at
