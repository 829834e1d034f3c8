"""The versions of plans, as they are kept and shown."""

from msgspec import Struct, field

from gpufaas_core._types import Seconds
from gpufaas_core.model import PlacementPlan, Replica


class PlanVersion(Struct, frozen=True, omit_defaults=True):
    """A plan that was applied. The one with the highest version is in force; without replicas it plans nothing."""

    version: int
    """From 1."""
    replicas: tuple[Replica, ...] = ()
    by: str = ""
    """Who applied it: a user, or ``planner NAME``."""
    at: Seconds = 0.0
    """When it was applied, as Unix time."""
    why: str = ""
    expected: dict[str, float] = field(default_factory=dict)
    """What its author expects of it, by name; the names end in their units."""
    notes: tuple[str, ...] = ()
    """What people should know of it."""

    def plan(self) -> PlacementPlan:
        """Return what the engine is told of it."""
        return PlacementPlan(self.version, self.replicas, self.notes)

    def names(self, function: str) -> bool:
        """Whether it owns the copies of *function*, a ``NAME.NAMESPACE``."""
        return any(each.function == function for each in self.replicas)
