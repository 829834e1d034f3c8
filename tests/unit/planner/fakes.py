"""A store of plans in memory."""

from dataclasses import dataclass, field

from gpufaas_core.errors import StorageFailed
from gpufaas_core.plans import KEPT, PlanVersion


@dataclass
class MemoryPlans:
    """A store in memory; with *broken*, one that cannot be used."""

    kept: list[PlanVersion] = field(default_factory=list)
    broken: bool = False

    def history(self) -> list[PlanVersion]:
        return self.kept[::-1]

    def add(self, plan: PlanVersion) -> bool:
        if self.broken:
            raise StorageFailed("the disk is full")
        if (self.kept[-1].version if self.kept else 0) != plan.version - 1:
            return False
        self.kept = [*self.kept, plan][-KEPT:]
        return True
