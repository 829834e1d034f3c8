"""What plans are made from, and their versions, as they are kept and shown."""

from typing import Final

from msgspec import Struct, field

from gpufaas_core._types import Seconds
from gpufaas_core.model import Device, Function, PlacementPlan, Replica


class Snapshot(Struct, frozen=True, omit_defaults=True):
    """What a solver makes a plan from."""

    functions: tuple[Function, ...] = ()
    """Of each name the revision that copies are for, with its profiles as they are now."""
    devices: tuple[Device, ...] = ()
    """Those that take new copies."""
    rates: dict[str, float] = field(default_factory=dict)
    """The calls per second of each ``NAME.NAMESPACE``, as a mean that weighs the last two minutes most."""
    plan: PlacementPlan | None = None
    """The plan in force. A solver leaves its pinned replicas as they are."""
    why: str = ""
    """Why a plan is made now."""


class Answer(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The plan that a solver made."""

    replicas: tuple[Replica, ...]
    """All of them, the pinned ones of the plan in force among them."""
    expected: dict[str, float] = field(default_factory=dict)
    """See `PlanVersion.expected`."""


KEPT: Final = 50
"""The versions that stores keep."""


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
