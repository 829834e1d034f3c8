"""When the heap is asked to give back what it does not need."""

import pytest

from gpufaas_apps import watchdog
from gpufaas_apps.watchdog import BUSY_S, QUIET, Heap


class Process:
    """A process, and how often its heap was trimmed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used_s, self.trimmed = 100.0, 0
        monkeypatch.setattr(watchdog, "_trim", self._trim)
        monkeypatch.setattr(watchdog.time, "process_time", lambda: self.used_s)
        self.heap = Heap()

    def _trim(self, _: int) -> None:
        self.trimmed += 1

    def second(self, used_s: float) -> int:
        """A second passes, in which it uses so much processor time. Return how often it was trimmed by then."""
        self.used_s += used_s
        self.heap.look()
        return self.trimmed


def test_it_is_asked_once_after_a_storm_and_not_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    assert process.second(0.0) == 0
    assert [process.second(0.9) for _ in range(5)] == [0] * 5
    assert [process.second(0.001) for _ in range(5)] == [1] * 5


def test_the_last_calls_of_a_storm_which_wait_quietly_are_a_reason_to_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch)
    process.second(0.9)
    assert process.second(0.0) == 1
    assert process.second(QUIET * 0.9) == 2
    assert process.second(BUSY_S * 0.5) == 2
