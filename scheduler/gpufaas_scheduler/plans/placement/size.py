"""
`gpufaas solve size`: the fewest devices, or the cheapest, that serve everything.

Kinds without a price cost 1 each, so that the cheapest cluster is the smallest. Clusters are tried by rising price,
from one that could serve everything if nothing were lost by sharing.

Source: the clusters that are not fixed of P. Elvinger's thesis, ETH Zurich, 2024.
"""

import heapq
import math
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_scheduler.plans.placement import compute, problem
from gpufaas_scheduler.plans.placement.problem import Cluster, Device, Kind
from gpufaas_scheduler.plans.placement.problem import Result as Placement
from gpufaas_scheduler.plans.problem import AtLeastOne, Infeasible, Table

_SAME: Final = 1e-6
_METRICS: Final = {"usher": "ao", "wao-usher": "wao", "ao-milp": "ao"}
"""What a policy measures compute by, if not by `wsm`."""


class Problem(Cluster, frozen=True, kw_only=True):
    kinds: Annotated[dict[str, Kind], msgspec.Meta(min_length=1)]
    """Of devices that may be bought."""
    max_devices: AtLeastOne = 64
    """Of all kinds together."""


class Result(msgspec.Struct, frozen=True):
    devices: dict[str, int]
    """Of each kind."""
    price: float
    placement: Placement


def solve(asked: Problem, policy: str = compute.DEFAULT, time_limit: Seconds | None = None) -> Result | Infeasible:
    """
    Return the cheapest cluster on which *policy* serves everything.

    :param time_limit: of each placement that is tried
    """
    if hopeless := _hopeless(asked, policy):
        return Infeasible(f"{asked.max_devices} devices do not serve all: {'; '.join(hopeless)}")
    best: Placement | None = None
    for counts in _clusters(asked):
        placed = compute.solve(_on(counts, asked), policy, time_limit)
        if all(placed.expected[name] >= model.rps - _SAME for name, model in asked.models.items()):
            return Result(counts, sum(asked.kinds[kind].price * count for kind, count in counts.items()), placed)
        if best is None or sum(placed.expected.values()) > sum(best.expected.values()):
            best = placed
    assert best is not None
    missing = [name for name, model in asked.models.items() if best.expected[name] < model.rps - _SAME]
    why = "".join(f"; {name}: {reason}" for name, reason in best.unserved.items())
    return Infeasible(f"{asked.max_devices} devices do not serve all: {', '.join(missing)}{why}")


def _on(counts: dict[str, int], asked: Problem) -> problem.Problem:
    """Return the problem on as many devices of each kind as *counts* says."""
    devices = tuple(Device(id=f"{kind}-{i}", kind=kind) for kind, count in counts.items() for i in range(count))
    return problem.Problem(devices=devices, kinds=asked.kinds, models=asked.models)


def _clusters(asked: Problem) -> Iterator[dict[str, int]]:
    """Yield how many devices of each kind, by rising price; of equals, the fewest, then more of kinds named first."""
    kinds = list(asked.kinds)
    start = tuple(0 for _ in kinds)
    heap = [(0.0, 0, start)]  # counts are negated: of equals, more of kinds named first
    seen = {start}
    least = _least(asked)
    while heap:
        price, count, negated = heapq.heappop(heap)
        if count >= least:
            yield {kind: -each for kind, each in zip(kinds, negated, strict=True)}
        if count == asked.max_devices:
            continue
        for index, kind in enumerate(kinds):
            more = tuple(each - (i == index) for i, each in enumerate(negated))
            if more not in seen:
                seen.add(more)
                heapq.heappush(heap, (price + asked.kinds[kind].price, count + 1, more))


def _hopeless(asked: Problem, policy: str) -> list[str]:
    """Return the models that no cluster serves, and why each; a policy that computes goodput itself is tried."""
    if policy == "igniter":
        return []
    found = problem.options(asked, asked.kinds, _METRICS.get(policy, "wsm"))
    told = []
    for name, model in asked.models.items():
        rates = [option.goodput for of in found.of[name].values() for option in of.values()]
        most = min(asked.max_devices, model.max_replicas or asked.max_devices)
        if name in found.why_none:
            told.append(f"{name}: {found.why_none[name]}")
        elif most * max(rates) < model.rps - _SAME:
            told.append(
                f"{name}: {most} replicas serve at most {most * max(rates):g} of {model.rps:g} requests per second"
            )
    return told


def _least(asked: Problem) -> int:
    """Return how many devices it takes at least: a model has one replica on a device."""
    needed = [1]
    for model in asked.models.values():
        rates = [
            batch.goodput
            for kind in asked.kinds
            for batch in model.measured(kind).values()
            if batch.goodput is not None and batch.latency_s is not None and batch.latency_s * 1000 <= model.slo_ms
        ]
        if rates:
            needed.append(math.ceil(model.rps / max(rates) - _SAME))
    return min(max(needed), asked.max_devices)


def explain(asked: Problem, answer: Result | Infeasible) -> list[str]:
    if isinstance(answer, Infeasible):
        return [f"{answer.infeasible}."]
    return compute.explain(_on(answer.devices, asked), answer.placement)


def rows(answer: Result | Infeasible) -> Table:
    if isinstance(answer, Infeasible):
        return ("INFEASIBLE",), [(answer.infeasible,)]
    return ("KIND", "DEVICES"), [(kind, str(count)) for kind, count in answer.devices.items()]
