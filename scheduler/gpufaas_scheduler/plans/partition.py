"""
Where a model is cut so that several devices bring it up at once, each a part, and serve it as a pipeline.

A part is a run of layers. Parts load at the same time, so a cold start takes as long as the slowest part; a request
passes all of them, and the slowest part or transfer sets the pace. `devices` devices make ``devices // parts``
pipelines. The plan with the least mean time of all waiting requests, cold start included, is the best.

`PlanTable` has the undominated plans for every number of parts; it depends neither on the requests that wait nor on
the devices, so one table serves every query, and a version of a model that changes weights only keeps it.

Source: Flashpoint (J. San Juan, University of Waterloo, 2023), chapters on partitioning; the cost of a plan is its
formula, the search here is exact, where the thesis has a heuristic (`benchmarks/log_cutting.py`).
"""

import bisect
import functools
import itertools
import math
from typing import Annotated, Final

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_scheduler.plans import problem
from gpufaas_scheduler.plans.problem import EPSILON, AtLeastOne, BadProblem, NotNegative, Table

MOST_REQUESTS: Final = 3000
"""The longest queue that `ranges` plans for."""


class Costs(msgspec.Struct, frozen=True):
    """The times of a model on one kind of device, in seconds; layers are counted from 0."""

    c0: Seconds
    """Fixed part of each part's cold start."""
    c: tuple[Seconds, ...]
    """Cold start of each layer: download, load and send."""
    e: tuple[Seconds, ...]
    """Execution of each layer."""
    n: tuple[Seconds, ...]
    """Transfer to the next device if the model is cut after the layer; one fewer than layers."""


class Problem(problem.Problem, frozen=True):
    c: Annotated[tuple[NotNegative, ...], msgspec.Meta(min_length=1)]
    e: tuple[NotNegative, ...]
    n: tuple[NotNegative, ...]
    devices: AtLeastOne
    requests: tuple[AtLeastOne, ...]
    """Queue lengths to plan for."""
    c0: NotNegative = 0.0
    max_parts: AtLeastOne | None = None

    @property
    def costs(self) -> Costs:
        return Costs(self.c0, self.c, self.e, self.n)

    def __post_init__(self) -> None:
        layers = len(self.c)
        if len(self.e) != layers:
            raise BadProblem(f"`c` has {layers} layers and `e` {len(self.e)}: each layer needs both")
        if len(self.n) != layers - 1:
            raise BadProblem(f"`n` has {len(self.n)} entries: {layers} layers have {layers - 1} places to cut")


class Plan(msgspec.Struct, frozen=True):
    requests: int
    cuts: tuple[int, ...]
    """Layers after which the model is cut, ascending; empty for a model in one piece."""
    parts: int
    t_avg: Seconds
    """Mean time of the requests, from the start of the cold start to their answer."""
    C: Seconds
    """Cold start: of the slowest part."""
    B: Seconds
    """Pace of a pipeline: its slowest part or transfer."""
    IN: Seconds
    """All transfers of one request."""


class Result(msgspec.Struct, frozen=True):
    plans: tuple[Plan, ...]


_Triple = tuple[Seconds, Seconds, Seconds]
"""The times of a plan: cold start, pace, transfers."""
_Front = tuple[_Triple, ...]


def solve(asked: Problem) -> Result:
    return Result(tuple(best(asked.costs, x, asked.devices, asked.max_parts) for x in asked.requests))


def best(costs: Costs, requests: int, devices: int, max_parts: int | None = None) -> Plan:
    """
    Return the plan of least `t_avg` for so many *requests*; of equal ones, which differ by less than `EPSILON` of their
    size, the one with fewest parts, then with smaller cuts.
    """
    most = min(len(costs.c), devices, max_parts or len(costs.c))
    table = plan_table(costs, most)
    parts, least = 0, math.inf
    for count in range(1, most + 1):
        weight = waits(requests, devices // count) / requests
        found = min([total + pace * weight for total, pace in table.hulls[count - 1]], default=math.inf)
        if count == 1 or found < least - EPSILON * least:
            parts, least = count, found
    cuts = table.first_cuts(parts, waits(requests, devices // parts) / requests, least)
    return measure(costs, cuts, requests, devices)


def waits(requests: int, pipelines: int) -> int:
    """Return the sum over the *requests* of how many others are served before each, in the same of *pipelines*."""
    rounds, left = divmod(requests, pipelines)
    return pipelines * rounds * (rounds - 1) // 2 + left * rounds


def measure(costs: Costs, cuts: tuple[int, ...], requests: int, devices: int) -> Plan:
    """Return what the plan that is cut after the layers *cuts* costs."""
    bounds = list(itertools.pairwise((0, *(cut + 1 for cut in cuts), len(costs.c))))
    cold = max(costs.c0 + sum(costs.c[start:end]) for start, end in bounds)
    pace = max(itertools.chain((sum(costs.e[start:end]) for start, end in bounds), (costs.n[cut] for cut in cuts)))
    transfers = sum(costs.n[cut] for cut in cuts)
    weight = waits(requests, devices // len(bounds)) / requests
    t_avg = cold + sum(costs.e) + transfers + pace * weight
    return Plan(requests, cuts, len(bounds), t_avg, cold, pace, transfers)


class PlanTable:
    """
    All plans of a model that can be best for some number of requests and devices.

    One plan dominates another of as many or more parts if its pace, its transfers, and the sum of its cold start and
    its transfers are no worse: whatever stands before it, the plan as a whole is no worse then.
    """

    def __init__(self, costs: Costs, max_parts: int) -> None:
        self.costs = costs
        self.cold = (0.0, *itertools.accumulate(costs.c))
        self.work = (0.0, *itertools.accumulate(costs.e))
        self.fronts = self._fronts(max_parts)
        """``[parts - 1][first layer]``: the undominated plans of the layers from there to the last."""
        self.hulls = tuple(_hull(of[0]) for of in self.fronts)
        """By part count: what the time of a query can be, as (time without waiting, pace)."""

    def _fronts(self, max_parts: int) -> tuple[tuple[_Front, ...], ...]:
        layers = len(self.costs.c)
        pools: list[_Front] = [(self._part(first, layers - 1),) for first in range(layers)]
        """By first layer: the undominated plans of any number of parts so far."""
        made = [tuple(pools)]
        for _ in range(1, max_parts):
            rest, fronts = made[-1], []
            for first in range(len(rest) - 1):
                front, pools[first] = _undominated(self._cut_once_more(first, rest), pools[first])
                fronts.append(front)
            made.append(tuple(fronts))
        return tuple(made)

    def _part(self, first: int, last: int) -> _Triple:
        """Return cold start and pace of the part of these layers."""
        cold = self.costs.c0 + self.cold[last + 1] - self.cold[first]
        return cold, self.work[last + 1] - self.work[first], 0.0

    def _cut_once_more(self, first: int, rest: tuple[_Front, ...]) -> set[_Triple]:
        """Return the plans whose first part begins with layer *first* and whose other parts are of *rest*."""
        found: set[_Triple] = set()
        for cut in range(first, len(rest) - 1):
            part, slowest, _ = self._part(first, cut)
            transfer = self.costs.n[cut]
            slowest = max(slowest, transfer)
            found.update(
                [(part if part > c else c, slowest if slowest > b else b, t + transfer) for c, b, t in rest[cut + 1]]
            )
        return found

    def first_cuts(self, parts: int, weight: float, least: Seconds) -> tuple[int, ...]:
        """
        Return the smallest cuts with which a plan of so many *parts* takes no longer than *least*, the execution left
        out.

        :param weight: how many others are served before a request, in the mean
        """
        cuts: list[int] = []
        cold = pace = moved = 0.0
        enough = least + EPSILON * max(1.0, least)
        for left in range(parts - 1, 0, -1):
            first = cuts[-1] + 1 if cuts else 0
            rest = self.fronts[left - 1]
            for cut in range(first, len(rest) - 1):
                part, work, _ = self._part(first, cut)
                c, b, t = max(cold, part), max(pace, work, self.costs.n[cut]), moved + self.costs.n[cut]
                limit = enough - t
                least_c = (self.cold[-1] - self.cold[cut + 1]) / left
                least_b = (self.work[-1] - self.work[cut + 1]) / left
                if max(c, self.costs.c0 + least_c) + weight * max(b, least_b) > limit:
                    continue  # not even if the other parts were all of one size
                for other, slow, more in rest[cut + 1]:  # `max` would take most of the time of a query
                    if (other if other > c else c) + more + weight * (slow if slow > b else b) <= limit:
                        break
                else:
                    continue
                cuts.append(cut)
                cold, pace, moved = c, b, t
                break
        return tuple(cuts)


plan_table = functools.lru_cache(maxsize=64)(PlanTable)
"""Returns the table of a model; one with the same costs, such as a version with other weights, has the same."""


def _hull(front: _Front) -> tuple[tuple[Seconds, Seconds], ...]:
    """Return the (cold start with transfers, pace) of *front* of which one is least for some number of requests."""
    kept: list[tuple[Seconds, Seconds]] = []
    for x, y in sorted({(c + t, b) for c, b, t in front}):
        if kept and y >= kept[-1][1]:
            continue
        while len(kept) > 1 and _is_above(kept[-2], kept[-1], (x, y)):
            kept.pop()
        kept.append((x, y))
    return tuple(kept)


def _is_above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) > (c[1] - a[1]) * (b[0] - a[0])


def _undominated(plans: set[_Triple], pool: _Front) -> tuple[_Front, _Front]:
    """Return those of *plans* that neither another one nor one of *pool* dominates, and all of both that none does."""
    ranked = [(t, c + t, b, 1, c) for c, b, t in plans]
    ranked += [(t, c + t, b, 0, c) for c, b, t in pool]
    ranked.sort()
    front: list[_Triple] = []
    every: list[_Triple] = []
    # Transfers rise from here on. Of what was kept: `totals` rises, `paces` falls.
    totals: list[float] = []
    paces: list[float] = []
    for transfers, total, pace, new, cold in ranked:
        at = bisect.bisect_right(totals, total)
        if at and paces[at - 1] <= pace:
            continue
        end = at
        while end < len(paces) and paces[end] >= pace:
            end += 1
        totals[at:end], paces[at:end] = [total], [pace]
        every.append((cold, pace, transfers))
        if new:
            front.append((cold, pace, transfers))
    return tuple(front), tuple(every)


def ranges(costs: Costs, devices: int, max_parts: int | None = None, up_to: int = MOST_REQUESTS) -> list[Plan]:
    """
    Return the plans from one request to *up_to*, each for the least number of requests from which it has its part
    count.

    Part counts only change where doubling steps and halving find a change, as in the thesis: a change and its undoing
    between two steps is not seen.
    """
    found = [best(costs, 1, devices, max_parts)]

    def is_other(requests: int) -> bool:
        return best(costs, requests, devices, max_parts).parts != found[-1].parts

    while True:
        start, step = found[-1].requests, 1
        while start + step < up_to and not is_other(start + step):
            step *= 2
        end = min(start + step, up_to)
        if end <= start or not is_other(end):
            return found
        first = bisect.bisect_left(range(start, end), True, key=is_other) + start
        found.append(best(costs, first, devices, max_parts))


def explain(asked: Problem, answer: Result) -> list[str]:
    told = []
    for plan in answer.plans:
        whole = measure(asked.costs, (), plan.requests, asked.devices)
        pipelines = asked.devices // plan.parts
        what = f"{plan.parts} parts on {pipelines} x {plan.parts} devices" if plan.cuts else "one piece on each device"
        told.append(
            f"{plan.requests} requests: {what}: cold start {plan.C:.6g} s, then {pipelines} answers every {plan.B:.6g}"
            f" s, {plan.IN:.6g} s of each are transfers. Mean {plan.t_avg:.6g} s; in one piece {whole.t_avg:.6g} s."
        )
    return told


def rows(answer: Result) -> Table:
    headings = ("REQUESTS", "PARTS", "MEAN", "COLD START", "PACE", "TRANSFERS", "CUT AFTER")
    return headings, [
        (
            str(each.requests), str(each.parts), f"{each.t_avg:.6g} s", f"{each.C:.6g} s", f"{each.B:.6g} s",
            f"{each.IN:.6g} s", ",".join(map(str, each.cuts)) or "-",
        )
        for each in answer.plans
    ]  # fmt: skip
