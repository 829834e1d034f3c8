"""
Placements by integer programme: the most requests that a cluster serves, if isolated measurements add up.

A replica of a model with a batch takes its compute and its memory on one device; a model has one batch size, and at
most one replica on a device. `ao` measures compute by the highest occupancy, `wsm` by the mean share of the
multiprocessors.

`queue_aware` is ours: it leaves out batches that would miss their goal by the time that they take to fill and to wait
for the one before, and of all placements that serve as much takes the one with the smallest batches. It lets models
share a device by `wsm` only if they cannot be served without (`ao`).

Source of the first two: P. Elvinger's thesis, ETH Zurich, 2024, where the second constraint lacks the placement by
mistake.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from gpufaas_core._types import Bytes, Seconds
from gpufaas_scheduler.plans.milp import Programme, Solution, minimise
from gpufaas_scheduler.plans.placement import patterns, problem
from gpufaas_scheduler.plans.placement.problem import FULL, Option, Options, Problem, Replica, Result, options

TIME_LIMIT: Final[Seconds] = 60.0
MAX_WAIT: Final[Seconds] = 0.1
"""A batch is sent after it, full or not."""
OVERHEAD: Final[Seconds] = 0.02
"""Of a batch, before it reaches its worker; fitted to one published figure."""
ITEM: Final[Bytes] = 3 * 224 * 224 * 4
"""An image."""
_SAME: Final = 1e-6
_LARGE: Final = 3000
"""Places of a model, a batch and a device: with more, a proof takes longer than anybody waits."""

_Goodput = Mapping[Replica, float]
"""The requests per second of each replica."""


def network(batch: int) -> Seconds:
    """Return the time that a batch of images takes to a worker."""
    return 0.0003 + 0.872e-3 * batch * ITEM / 1e6


def latest(option: Option, rps: float, slower: float = 1.0) -> Seconds:
    """Return when a request is answered if its batch fills, one batch is served before it, and both are *slower*."""
    fills = min(MAX_WAIT, (option.batch - 1) / rps)
    return fills + network(option.batch) + OVERHEAD + 2 * option.latency * slower


@dataclass(slots=True)
class _Columns:
    """Of one programme: what each column stands for."""

    programme: Programme
    placed: dict[tuple[str, int, int], int]
    """By model, batch and index of the device."""
    served: dict[str, int]


def solve(asked: Problem, metric: Literal["ao", "wsm"], time_limit: Seconds = TIME_LIMIT) -> Result:
    """Return the placement that serves most; after *time_limit* the best one known, with its gap."""
    found = options(asked, [each.kind for each in asked.devices], metric)
    return _answer(asked, found, metric, *_most(asked, found, time_limit))


def queue_aware(asked: Problem, time_limit: Seconds = TIME_LIMIT) -> Result:
    """Return the placement that serves most of what can be in time, with the smallest batches."""
    wanted = math.fsum(each.rps for each in asked.models.values())
    found = _in_time(asked, "ao")
    goodput, gap = _most(asked, found, time_limit / 4)
    if _served(asked, goodput) >= wanted - _SAME:
        return _answer(asked, found, "ao", _smallest_batches(asked, found, goodput, time_limit / 4), gap)
    found = _in_time(asked, "wsm")
    goodput, gap = _most(asked, found, time_limit / 2)
    return _answer(asked, found, "wsm", _smallest_batches(asked, found, goodput, time_limit / 4), gap)


def _in_time(asked: Problem, metric: str) -> Options:
    found = options(asked, [each.kind for each in asked.devices], metric)
    of, why = {}, dict(found.why_none)
    for name, model in asked.models.items():
        of[name] = {
            kind: {size: each for size, each in batches.items() if latest(each, model.rps) * 1000 <= model.slo_ms}
            for kind, batches in found.of[name].items()
        }
        if name not in why and not any(of[name].values()):
            why[name] = "no batch is in time, with the time to fill it and one batch before it"
    return Options(of, why)


def _most(asked: Problem, found: Options, time_limit: Seconds) -> tuple[_Goodput, float]:
    """Return replicas that serve most, and how much more might be served, as a fraction."""
    if not asked.devices:
        return {}, 0.0
    columns = _build(asked, found)
    is_large = len(columns.placed) > _LARGE
    packed = patterns.pack(asked, found, time_limit * (0.95 if is_large else 0.5))
    goodput, bound = _unpacked(asked, found, packed.devices), packed.bound
    served = _served(asked, goodput)
    if bound > served + _SAME and not is_large:
        columns.programme.row(list(columns.served.values()), [1.0] * len(columns.served), high=bound)
        solution = minimise(columns.programme, time_limit / 2)
        others = _chosen(asked, found, columns, solution)
        if (more := _served(asked, others)) > served:
            goodput, served = others, more
        bound = served if solution.optimal else min(bound, -solution.bound)
    return goodput, max(0.0, bound - served - _SAME) / max(served, _SAME)


def _unpacked(asked: Problem, found: Options, devices: Mapping[patterns.Pattern, int]) -> _Goodput:
    free = defaultdict[str, deque[str]](deque)
    for each in asked.devices:
        free[each.kind].append(each.id)
    ordered = sorted(devices.items(), key=lambda pair: (pair[0].kind, sorted(pair[0].items)))
    return {
        Replica(model, device, batch, None): found.on(model, pattern.kind)[batch].goodput
        for pattern, count in ordered
        for device in [free[pattern.kind].popleft() for _ in range(count)]
        for model, batch in sorted(pattern.items)
    }


def _answer(asked: Problem, found: Options, metric: str, goodput: _Goodput, gap: float) -> Result:
    proof = [] if gap == 0 else ["time was over: the best placement known, not proven to be the most"]
    return problem.answer(asked, goodput, found.why_none, gap, [f"compute is measured by {metric}", *proof])


def _build(asked: Problem, found: Options) -> _Columns:
    made = Programme()
    served = {name: made.add(-1.0, model.rps, whole=False) for name, model in asked.models.items()}
    placed: dict[tuple[str, int, int], int] = {}
    for name, model in asked.models.items():
        batches = found.batches(name)
        chosen = {batch: made.add(0.0, 1.0) for batch in batches}
        for index, device in enumerate(asked.devices):
            for batch in found.on(name, device.kind):
                placed[name, batch, index] = made.add(0.0, 1.0)
        ours = {key: column for key, column in placed.items() if key[0] == name}
        rates = [found.on(name, asked.devices[i].kind)[batch].goodput for _, batch, i in ours]
        made.row([*ours.values(), served[name]], [*rates, -1.0], low=0.0)
        made.row(list(chosen.values()), [1.0] * len(chosen), high=1.0)
        for batch, column in chosen.items():
            of_batch = [each for key, each in ours.items() if key[1] == batch]
            limit = min(len(of_batch), model.max_replicas or len(of_batch))
            made.row([*of_batch, column], [*[1.0] * len(of_batch), -float(limit)], high=0.0)
            for each in of_batch:
                made.row([each, column], [1.0, -1.0], high=0.0)
    for index, device in enumerate(asked.devices):
        here = {key: column for key, column in placed.items() if key[2] == index}
        for what in ("compute", "memory"):
            amounts = [getattr(found.on(name, device.kind)[batch], what) for name, batch, _ in here]
            made.row(list(here.values()), amounts, high=FULL)
    return _Columns(made, placed, served)


def _chosen(asked: Problem, found: Options, columns: _Columns, solution: Solution) -> _Goodput:
    """Return the replicas that *solution* places."""
    placed = [key for key, column in columns.placed.items() if solution.values and solution.values[column] > 0.5]
    devices = asked.devices
    return {
        Replica(name, devices[i].id, batch, None): found.on(name, devices[i].kind)[batch].goodput
        for name, batch, i in placed
    }


def _served(asked: Problem, goodput: _Goodput) -> float:
    """Return the requests per second that the replicas of *goodput* serve, none beyond what is asked of its model."""
    total = dict.fromkeys(asked.models, 0.0)
    for each, rate in goodput.items():
        total[each.model] += rate
    return math.fsum(min(model.rps, total[name]) for name, model in asked.models.items())


def _smallest_batches(asked: Problem, found: Options, goodput: _Goodput, time_limit: Seconds) -> _Goodput:
    """Return replicas that serve as much as *goodput* does, with the least sum of batches; of equals, the fewest."""
    columns = _build(asked, found)
    programme = columns.programme
    served = _served(asked, goodput)
    programme.row(list(columns.served.values()), [1.0] * len(columns.served), low=served - _SAME)
    programme.costs = [0.0] * len(programme.costs)
    for (_, batch, _), column in columns.placed.items():
        programme.costs[column] = batch + 0.001
    smaller = _chosen(asked, found, columns, minimise(programme, time_limit))
    return (
        smaller if smaller and sum(each.batch for each in smaller) <= sum(each.batch for each in goodput) else goodput
    )
