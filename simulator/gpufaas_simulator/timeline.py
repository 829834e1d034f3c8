"""Which model was resident on which device, and when: for plots."""

from __future__ import annotations

from dataclasses import dataclass

from gpufaas_core.model import Seconds
from gpufaas_simulator.decisions import Done, Evicted, Left, LoadBegun, Started


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
