"""
When a solver is asked for a plan, and what its answer must be. No clock, no IO: `shell` runs it on the platform.

At once: on a change of the fleet, and on demand. Once a minute at most: when functions change, or the rate of calls of
one drifts from that of the last plan. After a failure the plan in force stays, and the solver is asked again.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from msgspec.structs import replace

from gpufaas_core._types import Seconds
from gpufaas_core.errors import BadPlan, PlanConflict
from gpufaas_core.model import Device, Function, FunctionId, PlacementPlan, name_of
from gpufaas_core.plans import Answer, Snapshot

EVERY_S: Final[Seconds] = 60.0
DRIFT: Final = 0.2
"""A rate has drifted if it differs from that of the last plan by more than this share."""
CALM: Final = 0.1
"""A rate that has drifted has come back when it differs by no more than this share."""
LEAST_RATE: Final = 1 / 60
"""Lower rates, in calls per second, count as this one: otherwise a single call is a drift."""
_RETRY_S: Final[Seconds] = 10.0
_RETRY_AT_MOST_S: Final[Seconds] = 300.0


class Planner:
    """Ask `due`; when there is an answer tell `succeeded` or `failed`, and only then ask again."""

    def __init__(self, solver: str, snapshot: Callable[[Seconds, bool], Snapshot]) -> None:
        self.solver = solver
        self._snapshot = snapshot
        """See `Engine.snapshot`: takes the time, and whether profiles are needed."""
        self._asked = ""
        self._last = Snapshot()
        """What the last plan was made from, or the last attempt."""
        self._planned_at: Seconds = -inf
        self._drifted: set[str] = set()
        self._solving_since: Seconds | None = None
        self._version = self._failures = 0
        self._failing_since: Seconds = 0.0
        self._retry_at: Seconds = 0.0
        self._error = ""

    def ask(self, why: str) -> None:
        """Plan at once, or when the present attempt has ended."""
        self._asked = why

    def due(self, now: Seconds, in_force: PlacementPlan | None) -> Snapshot | None:
        """Return what to ask the solver now; None: there is no reason to."""
        seen = self._snapshot(now, False)
        why = self._reason(now, seen)
        if not why:
            return None
        self._asked, self._last, self._planned_at, self._solving_since = "", replace(seen, why=why), now, now
        self._drifted.clear()
        return replace(self._snapshot(now, True), why=why, plan=in_force)

    def judged(self, asked: Snapshot, answer: Answer) -> Answer | None:
        """Return *answer*, to be applied; None: it is in force. :raises BadPlan: it changes what people have pinned"""
        before = () if asked.plan is None else asked.plan.replicas
        pinned, kept = ({each for each in replicas if each.pinned} for replicas in (before, answer.replicas))
        for each in (*before, *answer.replicas):
            if each in pinned ^ kept:
                does = "changes what is pinned" if each in pinned else "pins what is not"
                raise BadPlan(f"solver {self.solver} {does}: {each.function} on {each.device}")
        return None if set(answer.replicas) == set(before) else answer

    def succeeded(self, version: int | None) -> None:
        """The answer was applied as *version*; None: it was in force."""
        self._solving_since, self._failures, self._error = None, 0, ""
        self._version = version or self._version

    def failed(self, error: Exception, now: Seconds) -> None:
        """There is no new plan. If somebody applied one meanwhile, that stays, and the solver is asked anew."""
        self._solving_since = None
        if isinstance(error, PlanConflict):
            self.ask(str(error))
            return
        self._failing_since = self._failing_since if self._failures else now
        self._retry_at = now + min(_RETRY_AT_MOST_S, _RETRY_S * 2.0 ** min(self._failures, 10))
        self._failures, self._error = self._failures + 1, str(error)

    def status(self, now: Seconds) -> dict[str, Any]:
        said: dict[str, Any] = {"solver": self.solver, "version": self._version}
        if self._last.why:
            said["why"] = self._last.why
        if self._solving_since is not None:
            said["solving_for_s"] = now - self._solving_since
        if self._failures:
            said |= {"last_error": self._error, "failures": self._failures, "failing_for_s": now - self._failing_since,
                     "retry_in_s": max(0.0, self._retry_at - now)}  # fmt: skip
        return said

    def _reason(self, now: Seconds, seen: Snapshot) -> str:
        drift, last = self._drift(seen), self._last
        if self._asked or not seen.functions or not seen.devices:
            return self._asked
        if fleet := _change("devices", last.devices, seen.devices):
            return fleet
        if self._failures:
            return last.why if now >= self._retry_at else ""
        return "" if now < self._planned_at + EVERY_S else _change("functions", last.functions, seen.functions) or drift

    def _drift(self, seen: Snapshot) -> str:
        """Return whose rate has drifted, and by how much. Each look is told: what has drifted is kept in mind."""
        said = ""
        for name, rate in seen.rates.items():
            before = max(LEAST_RATE, self._last.rates.get(name, 0.0))
            change = abs(max(LEAST_RATE, rate) - before) / before
            if change > (CALM if name in self._drifted else DRIFT):
                self._drifted.add(name)
                said = said or f"calls of {name}: {rate:.3g} per second, {before:.3g} before"
            else:
                self._drifted.discard(name)
        return said


def _change(what: str, before: Sequence[Device | Function], now: Sequence[Device | Function]) -> str:
    """Say what came, is gone or has changed, the first of several; empty: nothing."""
    old, new = ({name_of(FunctionId(each.id)): each for each in some} for some in (before, now))
    changed = [each for each in {**new, **old} if new.get(each) != old.get(each)]
    how = "" if not changed else "came" if changed[0] not in old else "has changed" if changed[0] in new else "is gone"
    more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{what}: {changed[0]} {how}{more}" if changed else ""
