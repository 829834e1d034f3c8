"""The planner's port to where plans are kept. `adapters/` implements it."""

from typing import Protocol

from gpufaas_core.plans import PlanVersion


class PlanStore(Protocol):
    """
    Keeps the last versions of plans (`gpufaas_core.plans.KEPT`). Calls block, and may come from several threads.

    Each method raises `StorageFailed` if it cannot read or write; then nothing has changed.
    """

    def latest(self) -> PlanVersion | None:
        """Return the plan in force; None: none was ever applied."""

    def get(self, version: int) -> PlanVersion | None:
        """Return *version*; None: it is not kept."""

    def history(self) -> list[PlanVersion]:
        """Return all that are kept, newest first."""

    def add(self, plan: PlanVersion) -> bool:
        """
        Store *plan*, durably and in one step, if the latest version is the one before it (for version 1: none).
        False: somebody was quicker, and nothing has changed.
        """
