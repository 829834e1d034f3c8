"""Which model was resident on which device, and when: for plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpufaas_core.model import Seconds
from gpufaas_simulator.nodes_at_work import Observer


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
        self.devices: list[str] = []
        self._open: dict[tuple[str, str], Seconds] = {}
        self._closed: list[Stay] = []

    def stays(self, end_s: Seconds) -> list[Stay]:
        still = [Stay(device, function, begin, end_s) for (device, function), begin in self._open.items()]
        return [*self._closed, *still]

    def started(
        self, t: Seconds, calls: tuple[int, ...], function: str, device: str, hit: bool, victims: tuple[str, ...],
        local: bool,
    ) -> None:  # fmt: skip
        del calls, local
        if not hit:
            self.loading(t, function, device, victims)

    def loading(self, t: Seconds, function: str, device: str, victims: tuple[str, ...]) -> None:
        if device not in self.devices:
            self.devices.append(device)
        for victim in victims:
            self.evicted(t, victim, device)
        self._open[device, function] = t

    def evicted(self, t: Seconds, function: str, device: str) -> None:
        begin = self._open.pop((device, function), None)
        if begin is not None:
            self._closed.append(Stay(device, function, begin, t))

    def left(self, t: Seconds, device: str) -> None:
        for on, function in [each for each in self._open if each[0] == device]:
            self.evicted(t, function, on)


class Several:
    """Passes everything to each of *observers*."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def started(
        self, t: Seconds, calls: tuple[int, ...], function: str, device: str, hit: bool, victims: tuple[str, ...],
        local: bool,
    ) -> None:  # fmt: skip
        for each in self._observers:
            each.started(t, calls, function, device, hit, victims, local)

    def loading(self, t: Seconds, function: str, device: str, victims: tuple[str, ...]) -> None:
        for each in self._observers:
            each.loading(t, function, device, victims)

    def evicted(self, t: Seconds, function: str, device: str) -> None:
        for each in self._observers:
            each.evicted(t, function, device)

    def left(self, t: Seconds, device: str) -> None:
        for each in self._observers:
            each.left(t, device)
