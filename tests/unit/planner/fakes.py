"""A store of plans in memory."""

from dataclasses import dataclass, field

from gpufaas_core.errors import StorageFailed
from gpufaas_core.plans import KEPT, PlanVersion


@dataclass
class MemoryPlans:
    """A store in memory; with *broken*, one that cannot be used."""

    kept: list[PlanVersion] = field(default_factory=list)
    broken: bool = False

    def latest(self) -> PlanVersion | None:
        return self.kept[-1] if self.kept else None

    def get(self, version: int) -> PlanVersion | None:
        return next((each for each in self.kept if each.version == version), None)

    def history(self) -> list[PlanVersion]:
        return self.kept[::-1]

    def add(self, plan: PlanVersion) -> bool:
        if self.broken:
            raise StorageFailed("the disk is full")
        if (self.kept[-1].version if self.kept else 0) != plan.version - 1:
            return False
        self.kept = [*self.kept, plan][-KEPT:]
        return True
