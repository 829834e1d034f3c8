"""When to plan: at once on a change of the fleet, at most once a minute on other changes, and again after a failure."""

from collections.abc import Sequence
from math import inf
from typing import Final

from gpufaas_core._types import Seconds
from gpufaas_core.model import Device, Function, FunctionId, name_of
from gpufaas_core.plans import Snapshot

EVERY_S: Final[Seconds] = 60.0
"""Functions that change, and rates that drift, lead to no plan within so long of the last one."""
DRIFT: Final = 0.2
"""A rate has drifted when it differs by more than this share from that of the last plan."""
CALM: Final = 0.1
"""A rate that has drifted has come back when it differs by at most this share."""
LEAST_RATE: Final = 1 / 60
"""Calls per second: lower rates count as this one, since a single call would be a drift."""

_RETRY_S: Final[Seconds] = 10.0
_RETRY_AT_MOST_S: Final[Seconds] = 300.0


class Triggers:
    """
    `look` says why to plan now. Then tell `begun`, and `failed` or `succeeded` before the next look: what changes
    meanwhile is noticed by that one.
    """

    def __init__(self) -> None:
        self.failures = 0
        """Plans that failed in a row."""
        self.retry_at: Seconds = inf
        """When to plan again after a failure, at the latest."""
        self._asked = ""
        self._last = Snapshot()
        """The snapshot of the last plan, or attempt."""
        self._planned_at: Seconds = -inf
        self._drifted: set[str] = set()

    def ask(self, why: str) -> None:
        """Plan at the next look."""
        self._asked = why

    def look(self, now: Seconds, seen: Snapshot) -> str:
        """Return why to plan now; empty: there is no reason."""
        last = self._last
        drift = self._drift(seen)  # it has a memory, so each look is told of the rates
        if self._asked:
            return self._asked
        if not seen.functions or not seen.devices:
            return ""
        if fleet := _change("devices", last.devices, seen.devices):
            return fleet
        if self.failures:
            return "again after a failure" if now >= self.retry_at else ""
        if now < self._planned_at + EVERY_S:
            return ""
        return _change("functions", last.functions, seen.functions) or drift

    def begun(self, now: Seconds, seen: Snapshot) -> None:
        """A plan is made from *seen*."""
        self._asked, self._last, self._planned_at = "", seen, now
        self._drifted.clear()

    def succeeded(self) -> None:
        self.failures, self.retry_at = 0, inf

    def failed(self, now: Seconds) -> None:
        """Plan again after a while: the longer, the more plans failed in a row."""
        self.retry_at = now + min(_RETRY_AT_MOST_S, _RETRY_S * 2.0 ** min(self.failures, 10))
        self.failures += 1

    def _drift(self, seen: Snapshot) -> str:
        """Return which rate has drifted, and by how much; empty: none has."""
        said = ""
        for name, rate in seen.rates.items():
            before = max(LEAST_RATE, self._last.rates.get(name, 0.0))
            change = abs(max(LEAST_RATE, rate) - before) / before
            if change > (CALM if name in self._drifted else DRIFT):
                self._drifted.add(name)
                said = said or f"calls of {name}: {rate:.3g} per second, {self._last.rates.get(name, 0.0):.3g} before"
            else:
                self._drifted.discard(name)
        return said


def _change(what: str, before: Sequence[Device | Function], now: Sequence[Device | Function]) -> str:
    """Say which of them came, are gone or have changed, the first of each; empty: none."""
    if now == before:
        return ""
    old, new = ({name_of(FunctionId(each.id)): each for each in some} for some in (before, now))
    changes = {
        "came": [each for each in new if each not in old],
        "gone": [each for each in old if each not in new],
        "changed": [each for each in new if each in old and new[each] != old[each]],
    }
    said = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} {how}"
        for how, names in changes.items()
        if names
    ]
    return f"{what}: {', '.join(said)}" if said else ""
