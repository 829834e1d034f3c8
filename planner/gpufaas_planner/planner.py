"""
The planner: what a solver is asked and when, and what its answer must be. No clock and no IO: `shell` runs it on the
platform, and a simulation in its own time.

A plan in force stays as it is while its successor is made, and if none can be made. Whoever applies a plan meanwhile
wins: the solver is asked again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite

from msgspec import Struct
from msgspec.structs import replace

from gpufaas_core._types import Seconds
from gpufaas_core.errors import BadPlan, PlanConflict
from gpufaas_core.model import PlacementPlan
from gpufaas_core.plans import Answer, PlannerStatus, Snapshot
from gpufaas_planner.triggers import Triggers


class Question(Struct, frozen=True):
    """What a solver is asked."""

    why: str
    """Why now: one line."""
    snapshot: Snapshot

    @property
    def base(self) -> int:
        """The version of the plan in force; 0: there is none."""
        return 0 if self.snapshot.plan is None else self.snapshot.plan.version


@dataclass(slots=True, eq=False)
class Planner:
    """Ask `due`, have the solver answer, and tell `succeeded` or `failed`: one question after the other."""

    solver: str
    snapshot: Callable[[Seconds, bool], Snapshot]
    """See `Engine.snapshot`: now, and whether profiles are needed."""
    triggers: Triggers = field(default_factory=Triggers)
    _why: str = ""
    _solving_since: Seconds | None = None
    _version: int = 0
    _last_error: str = ""
    _failing_since: Seconds = 0.0

    def due(self, now: Seconds, in_force: PlacementPlan | None) -> Question | None:
        """Return what to ask the solver now; None: there is no reason to."""
        seen = self.snapshot(now, False)
        why = self.triggers.look(now, seen)
        if not why:
            return None
        self.triggers.begun(now, seen)
        self._why, self._solving_since = why, now
        return Question(why, replace(self.snapshot(now, True), plan=in_force))

    def judged(self, question: Question, answer: Answer) -> Answer | None:
        """
        Return *answer*, to be applied; None: it is the plan in force.

        :raises BadPlan: it changes what a person has pinned, or what it expects is no number
        """
        plan = question.snapshot.plan
        before = () if plan is None else plan.replicas
        pinned, kept = ({each for each in replicas if each.pinned} for replicas in (before, answer.replicas))
        for each in before:
            if each in pinned - kept:
                raise BadPlan(f"solver {self.solver} changes {each.function} on {each.device}, which is pinned there")
        for each in answer.replicas:
            if each in kept - pinned:
                raise BadPlan(f"solver {self.solver} pins {each.function} to {each.device}, which only people may")
        for name, value in answer.expected.items():
            if not isfinite(value):
                raise BadPlan(f"solver {self.solver} expects a {name} of {value}, which is no number")
        return None if set(answer.replicas) == set(before) else answer

    def succeeded(self, version: int = 0) -> None:
        """The plan was applied as *version*; 0: the plan in force is still the best one."""
        self.triggers.succeeded()
        self._solving_since, self._last_error = None, ""
        self._version = version or self._version

    def failed(self, error: Exception, now: Seconds) -> None:
        """There is no new plan."""
        self._solving_since = None
        if isinstance(error, PlanConflict):
            self.triggers.ask(str(error))
            return
        if not self.triggers.failures:
            self._failing_since = now
        self._last_error = str(error)
        self.triggers.failed(now)

    def status(self, now: Seconds) -> PlannerStatus:
        failing, since = self.triggers.failures, self._solving_since
        return PlannerStatus(
            self.solver, None if since is None else now - since, self._why, self._version, self._last_error, failing,
            now - self._failing_since if failing else 0.0,
            max(0.0, self.triggers.retry_at - now) if failing else 0.0,
        )  # fmt: skip
