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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gpufaas_core._types import Bytes, Seconds
from gpufaas_scheduler.plans.milp import Programme, Solution, minimise
from gpufaas_scheduler.plans.placement import patterns, problem
from gpufaas_scheduler.plans.placement.problem import FULL, Answer, Option, Options, Problem, Replica, options

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


def network(batch: int) -> Seconds:
    """Return the time that a batch of images takes to a worker."""
    return 0.0003 + 0.872e-3 * batch * ITEM / 1e6


def is_in_time(option: Option, rps: float, slo_ms: float) -> bool:
    """Whether a request meets its goal if its batch fills, and one batch is served before it."""
    fills = min(MAX_WAIT, (option.batch - 1) / rps)
    return (fills + network(option.batch) + OVERHEAD + 2 * option.latency) * 1000 <= slo_ms


@dataclass(slots=True)
class _Columns:
    """Of one programme: what each column stands for."""

    programme: Programme
    placed: dict[tuple[str, int, int], int]
    """By model, batch and index of the device."""
    served: dict[str, int]


def solve(asked: Problem, metric: Literal["ao", "wsm"], time_limit: Seconds = TIME_LIMIT) -> Answer:
    """Return the placement that serves most; after *time_limit* the best one known, with its gap."""
    found = options(asked, [each.kind for each in asked.devices], metric)
    return _answer(asked, found, metric, *_most(asked, found, time_limit))


def queue_aware(asked: Problem, time_limit: Seconds = TIME_LIMIT) -> Answer:
    """Return the placement that serves most of what can be in time, with the smallest batches."""
    wanted = math.fsum(each.rps for each in asked.models.values())
    found = _in_time(asked, "ao")
    replicas, gap = _most(asked, found, time_limit / 4)
    if _served(asked, found, replicas) >= wanted - _SAME:
        return _answer(asked, found, "ao", _smallest_batches(asked, found, replicas, time_limit / 4), gap)
    found = _in_time(asked, "wsm")
    replicas, gap = _most(asked, found, time_limit / 2)
    return _answer(asked, found, "wsm", _smallest_batches(asked, found, replicas, time_limit / 4), gap)


def _in_time(asked: Problem, metric: str) -> Options:
    found = options(asked, [each.kind for each in asked.devices], metric)
    of, why = {}, dict(found.why_none)
    for name, model in asked.models.items():
        of[name] = {
            kind: {size: each for size, each in batches.items() if is_in_time(each, model.rps, model.slo_ms)}
            for kind, batches in found.of[name].items()
        }
        if name not in why and not any(of[name].values()):
            why[name] = "no batch is in time, with the time to fill it and one batch before it"
    return Options(of, why)


def _most(asked: Problem, found: Options, time_limit: Seconds) -> tuple[list[Replica], float]:
    """Return replicas that serve most, and how much more might be served, as a fraction."""
    if not asked.devices:
        return [], 0.0
    columns = _build(asked, found)
    is_large = len(columns.placed) > _LARGE
    packed = patterns.pack(asked, found, [], time_limit * (0.95 if is_large else 0.5))
    replicas, bound = _unpacked(asked, packed.devices), packed.bound
    served = _served(asked, found, replicas)
    if bound > served + _SAME and not is_large:
        columns.programme.row(list(columns.served.values()), [1.0] * len(columns.served), high=bound)
        solution = minimise(columns.programme, time_limit / 2)
        others = _replicas(asked, columns, solution)
        if (more := _served(asked, found, others)) > served:
            replicas, served = others, more
        bound = served if solution.optimal else min(bound, -solution.bound)
    return replicas, max(0.0, bound - served - _SAME) / max(served, _SAME)


def _unpacked(asked: Problem, devices: Mapping[patterns.Pattern, int]) -> list[Replica]:
    free = {
        kind: [each.id for each in asked.devices if each.kind == kind] for kind in {each.kind for each in asked.devices}
    }
    ordered = sorted(devices.items(), key=lambda pair: (pair[0].kind, sorted(pair[0].items)))
    return [
        Replica(model, device, batch, None)
        for pattern, count in ordered
        for device in [free[pattern.kind].pop(0) for _ in range(count)]
        for model, batch in sorted(pattern.items)
    ]


def _answer(asked: Problem, found: Options, metric: str, replicas: Sequence[Replica], gap: float) -> Answer:
    kinds = {each.id: each.kind for each in asked.devices}

    def goodput(replica: Replica) -> float:
        return found.on(replica.model, kinds[replica.device])[replica.batch].goodput

    proof = [] if gap == 0 else ["time was over: the best placement known, not proven to be the most"]
    return problem.answer(asked, replicas, goodput, found.why_none, gap, [f"compute is measured by {metric}", *proof])


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


def _replicas(asked: Problem, columns: _Columns, solution: Solution) -> list[Replica]:
    if solution.values is None:
        return []
    return [
        Replica(name, asked.devices[index].id, batch, None)
        for (name, batch, index), column in columns.placed.items()
        if solution.values[column] > 0.5
    ]


def _served(asked: Problem, found: Options, replicas: Sequence[Replica]) -> float:
    """Return the requests per second that *replicas* serve."""
    kinds = {each.id: each.kind for each in asked.devices}
    total = dict.fromkeys(asked.models, 0.0)
    for each in replicas:
        total[each.model] += found.on(each.model, kinds[each.device])[each.batch].goodput
    return math.fsum(min(model.rps, total[name]) for name, model in asked.models.items())


def _smallest_batches(asked: Problem, found: Options, replicas: list[Replica], time_limit: Seconds) -> list[Replica]:
    """Return replicas that serve as much as *replicas*, with the least sum of batches; of equals, the fewest."""
    columns = _build(asked, found)
    programme = columns.programme
    served = _served(asked, found, replicas)
    programme.row(list(columns.served.values()), [1.0] * len(columns.served), low=served - _SAME)
    programme.costs = [0.0] * len(programme.costs)
    for (_, batch, _), column in columns.placed.items():
        programme.costs[column] = batch + 0.001
    solution = minimise(programme, time_limit)
    smaller = _replicas(asked, columns, solution)
    return (
        smaller if sum(each.batch for each in smaller) <= sum(each.batch for each in replicas) and smaller else replicas
    )
