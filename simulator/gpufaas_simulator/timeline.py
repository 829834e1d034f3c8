"""What the nodes of a simulation do, as values; and which model was resident on which device, and when, for plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from gpufaas_core.model import Seconds


class Started(Struct, frozen=True):
    """The service of a grant begins, with its load if there is one."""

    t: Seconds
    function: str
    device: str
    victims: tuple[str, ...]
    calls: tuple[int, ...]
    """Indexes into the workload's arrivals."""
    hit: bool
    local: bool
    """Its calls were in a local queue."""


class LoadBegun(Struct, frozen=True):
    """A load without a call begins (a replica, a prefetch, a minimum of copies)."""

    t: Seconds
    function: str
    device: str
    victims: tuple[str, ...]


class Evicted(Struct, frozen=True):
    """An eviction that is not for a load: a revision was removed, or there was one copy too many."""

    t: Seconds
    function: str
    device: str


class Left(Struct, frozen=True):
    """A device is gone."""

    t: Seconds
    device: str


Done: TypeAlias = Started | LoadBegun | Evicted | Left
Observer: TypeAlias = Callable[[Done], None]
"""Gets what the nodes do, in order of time. Functions have the names of their revisions: ``f``, ``f@2``."""


@dataclass(frozen=True, slots=True)
class Stay:
    """The time of a model on a device, from the start of its load."""

    device: str
    function: str
    begin_s: Seconds
    end_s: Seconds


class Timeline:
    """An observer that collects stays. `stays` closes those that are open at the end."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Seconds] = {}
        self._closed: list[Stay] = []

    def stays(self, end_s: Seconds) -> list[Stay]:
        still = [Stay(device, function, begin, end_s) for (device, function), begin in self._open.items()]
        return [*self._closed, *still]

    def __call__(self, done: Done) -> None:
        match done:
            case Started(hit=True):
                pass
            case Started(t, function, device, victims) | LoadBegun(t, function, device, victims):
                for victim in victims:
                    self._close(device, victim, t)
                self._open[device, function] = t
            case Evicted(t, function, device):
                self._close(device, function, t)
            case Left(t, device):
                for _, function in [each for each in self._open if each[0] == device]:
                    self._close(device, function, t)

    def _close(self, device: str, function: str, t: Seconds) -> None:
        begin = self._open.pop((device, function), None)
        if begin is not None:
            self._closed.append(Stay(device, function, begin, t))
