"""The planner's port to where plans are kept. `adapters/` implements it."""

from typing import Protocol

from gpufaas_core.plans import PlanVersion


class PlanStore(Protocol):
    """
    Keeps the last versions of plans (`gpufaas_core.plans.KEPT`). Calls block, and may come from several threads.

    Each method raises `StorageFailed` if it cannot read or write; then nothing has changed.
    """

    def history(self) -> list[PlanVersion]:
        """Return all that are kept, newest first: the first one is in force."""

    def add(self, plan: PlanVersion) -> bool:
        """Store *plan*, in one step, if the latest is the one before it. False: somebody else was first."""
