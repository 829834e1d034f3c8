"""Who decides about the copies of a function (`gpufaas_core.owners`), and why."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import astuple

from gpufaas_core.model import PlannedCopy, PlanStatus
from gpufaas_core.owners import LABELS, PLAN
from gpufaas_core.plans import PlanVersion
from gpufaas_core.scaling import PREFIX
from gpufaas_gateway.catalogue import ServedRevision

_AWAY: Final = "away"


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """The plan in force, and what became of its replicas."""

    version: int = 0
    by: str = ""
    replicas: tuple[PlannedCopy, ...] = ()
    of: Mapping[str, Sequence[PlannedCopy]] = field(default_factory=dict)
    """Those of each function, by ``NAME.NAMESPACE``."""


def in_force(plan: PlanVersion | None, said: PlanStatus | None) -> PlanInForce:
    """:param said: what the scheduler says of its plan, which may be another version"""
    if plan is None:
        return PlanInForce()
    copies = said.copies if said is not None and said.version == plan.version else ()
    became = {(each.function, each.device): each for each in copies}
    shown = tuple(became.get((each.function, each.device)) or PlannedCopy(*astuple(each)) for each in plan.replicas)
    of: defaultdict[str, list[PlannedCopy]] = defaultdict(list)
    for each in shown:
        of[each.function].append(each)
    return PlanInForce(plan.version, plan.by, shown, of)


def owner_of(deployed: ServedRevision, plan: PlanInForce) -> tuple[str, str]:
    """Return the owner of the copies of *deployed*, and why it is that one."""
    owner, why = deployed.function.owner, _why_declared(deployed)
    planned = plan.of.get(deployed.full_name, ())
    if not planned or deployed.function.need.reserved <= 0:  # deployed since as one that no plan can name
        return owner, why
    named = f"plan {plan.version} (by {plan.by}) {'pins' if any(each.pinned for each in planned) else 'names'} it"
    if all(each.state == _AWAY for each in planned):
        return owner, f"{why}; {named}, but its devices are gone or drained"
    return PLAN, named


def _why_declared(deployed: ServedRevision) -> str:
    spec = deployed.record.spec
    labels = [each for each in {**(spec.annotations or {}), **(spec.labels or {})} if each.startswith(PREFIX)]
    if deployed.function.owner == LABELS:
        return f"label{'s' * (len(labels) > 1)} {', '.join(sorted(labels))}"
    return "its labels have no rule by load: copies follow calls" if labels else "nothing is said: copies follow calls"
