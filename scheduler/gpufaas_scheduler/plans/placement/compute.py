"""`gpufaas solve compute`: one problem, the policy that is asked for."""

from collections.abc import Callable, Mapping
from typing import Final

from gpufaas_core._types import Seconds
from gpufaas_scheduler.plans.placement import igniter, interference_aware, programmes, usher
from gpufaas_scheduler.plans.placement.problem import Problem, Result
from gpufaas_scheduler.plans.problem import Table

__all__ = ["POLICIES", "Problem", "Result", "explain", "rows", "solve"]

POLICIES: Final[Mapping[str, Callable[[Problem, Seconds], Result]]] = {
    "igniter": lambda asked, _: igniter.solve(asked),
    "usher": lambda asked, _: usher.solve(asked, "ao"),
    "wao-usher": lambda asked, _: usher.solve(asked, "wao"),
    "ao-milp": lambda asked, limit: programmes.solve(asked, "ao", limit),
    "wsm-milp": lambda asked, limit: programmes.solve(asked, "wsm", limit),
    "qa-milp": programmes.queue_aware,
    "ia-greedy": lambda asked, _: interference_aware.solve(asked),
}
DEFAULT: Final = "qa-milp"


def solve(asked: Problem, policy: str = DEFAULT, time_limit: Seconds | None = None) -> Result:
    """Return the placement that *policy* makes; of integer programmes, the best one after *time_limit*."""
    return POLICIES[policy](asked, programmes.TIME_LIMIT if time_limit is None else time_limit)


def explain(asked: Problem, answer: Result) -> list[str]:
    told = [f"{each[:1].upper()}{each[1:]}." for each in answer.notes]
    for device in asked.devices:
        there = [each for each in answer.replicas if each.device == device.id]
        what = ", ".join(f"{each.model} by batches of {each.batch}" for each in there)
        told.append(f"{device.id}: {what or 'nothing'}.")
    for name, model in asked.models.items():
        expected = answer.expected[name]
        why = f": {answer.unserved[name]}" if name in answer.unserved else ""
        told.append(f"{name}: {expected:g} of {model.rps:g} requests per second{why}.")
    return told


def rows(answer: Result) -> Table:
    lines: list[tuple[str, ...]] = [
        (each.device, each.model, str(each.batch), "-" if each.share is None else f"{each.share:g} %")
        for each in answer.replicas
    ]
    total = sum(answer.expected.values())
    lines.append(("all", f"{total:g} requests/s", "", ""))
    lines += [("-", f"{name}: {why}", "", "") for name, why in answer.unserved.items()]
    return ("DEVICE", "MODEL", "BATCH", "SHARE"), lines
