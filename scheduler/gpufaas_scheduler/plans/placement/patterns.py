"""
Large placements, by what one device may hold: a pattern is a set of models with batches that fit on one device
together.

How many devices have which pattern is a linear programme; no placement serves more than its best value. Its patterns
are found one by one: the prices of the programme say which pattern would improve it most (column generation, Gilmore
and Gomory, 1961). Whole numbers of the patterns that were found make a placement.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpufaas_core._types import Seconds
from gpufaas_scheduler.plans.milp import Programme, Solution, minimise
from gpufaas_scheduler.plans.placement.problem import FULL, Options, Problem

_ROUNDS: Final = 400
_SAME: Final = 1e-6
_CLOSE: Final = 0.002
"""A bound that is so much above the programme's value is near enough to stop."""

Item = tuple[str, int]
"""Model and batch."""


@dataclass(frozen=True, slots=True)
class Pattern:
    kind: str
    items: frozenset[Item]


@dataclass(frozen=True, slots=True)
class Packed:
    devices: Counter[Pattern]
    """How many devices have each pattern."""
    bound: float
    """No placement serves more requests per second."""


@dataclass(slots=True)
class _Rows:
    """The indexes of those rows of the programme whose prices are asked for."""

    served: dict[str, int]
    devices: dict[str, int]
    replicas: dict[str, int]
    items: dict[Item, int]


@dataclass(slots=True)
class _Market:
    """The programme over the patterns so far, and its prices."""

    asked: Problem
    found: Options
    counts: Counter[str]
    """The number of devices of each kind."""
    patterns: list[Pattern]
    seconds: Seconds
    """The time that is left."""

    def rate(self, item: Item) -> float:
        """Return the requests per second that a replica serves at most, on any kind of device."""
        name, batch = item
        return max(of[batch].goodput for of in self.found.of[name].values() if batch in of)

    def limit(self, model: str) -> int:
        return self.asked.models[model].max_replicas or len(self.asked.devices)

    def programme(self, whole: bool) -> tuple[Programme, list[int], _Rows]:
        """Return the programme, the columns of the patterns, and the rows."""
        made = Programme()
        rows = _Rows({}, {}, {}, {})
        served = {name: made.add(-1.0, model.rps, whole=False) for name, model in self.asked.models.items()}
        columns = [made.add(0.0, float(self.counts[each.kind]), whole) for each in self.patterns]
        having: dict[Item, list[int]] = {}
        for index, pattern in enumerate(self.patterns):
            for item in pattern.items:
                having.setdefault(item, []).append(index)
        for kind, count in self.counts.items():
            ours = [column for column, each in zip(columns, self.patterns, strict=True) if each.kind == kind]
            rows.devices[kind] = made.row(ours, [1.0] * len(ours), high=count)
        for name, column in served.items():
            items = [item for item in having if item[0] == name]
            holding = [(i, batch) for _, batch in items for i in having[name, batch]]
            rates = [self.found.on(name, self.patterns[i].kind)[batch].goodput for i, batch in holding]
            theirs = [columns[i] for i, _ in holding]
            rows.served[name] = made.row([*theirs, column], [*rates, -1.0], low=0.0)
            rows.replicas[name] = made.row(theirs, [1.0] * len(theirs), high=self.limit(name))
            self._steps(made, rows, column, {item: [columns[i] for i in having[item]] for item in items}, whole)
        return made, columns, rows

    def _steps(self, made: Programme, rows: _Rows, served: int, having: dict[Item, list[int]], whole: bool) -> None:
        """Add that a model has one batch, and that its last replica serves only what the others leave."""
        chosen: list[int] = []
        steps: list[int] = []
        worth: list[float] = []
        for item, ours in having.items():
            one = made.add(0.0, 1.0, whole)
            chosen.append(one)
            rate, left = self.rate(item), self.asked.models[item[0]].rps
            first = len(steps)
            while left > _SAME and len(steps) - first < self.limit(item[0]):
                steps.append(made.add(0.0, 1.0, whole=False))
                worth.append(min(rate, left))
                made.row([steps[-1], one], [1.0, -1.0], high=0.0)
                left -= rate
            of = steps[first:]
            rows.items[item] = made.row([*ours, *of], [*[1.0] * len(ours), *[-1.0] * len(of)], low=0.0)
            made.row([*ours, one], [*[1.0] * len(ours), -float(self.limit(item[0]))], high=0.0)
        made.row(chosen, [1.0] * len(chosen), high=1.0)
        made.row([*steps, served], [*worth, -1.0], low=0.0)

    def solve(self, programme: Programme) -> Solution:
        solution = minimise(programme, max(0.1, self.seconds))
        self.seconds -= solution.seconds
        return solution

    def best_pattern(self, kind: str, duals: Sequence[float], rows: _Rows) -> tuple[Pattern, float]:
        """Return the pattern that the prices *duals* value most, and its value."""
        made = Programme()
        columns: dict[Item, int] = {}
        for name in self.asked.models:
            for batch, option in self.found.on(name, kind).items():
                value = option.goodput * duals[rows.served[name]] + duals[rows.replicas[name]]
                value += duals[rows.items[name, batch]]
                if value > _SAME:
                    columns[name, batch] = made.add(-value, 1.0)
        for what in ("compute", "memory"):
            amounts = [getattr(self.found.on(name, kind)[batch], what) for name, batch in columns]
            made.row(list(columns.values()), amounts, high=FULL)
        for name in self.asked.models:
            ours = [column for item, column in columns.items() if item[0] == name]
            made.row(ours, [1.0] * len(ours), high=1.0)
        solution = self.solve(made)
        if solution.values is None:
            return Pattern(kind, frozenset()), 0.0
        chosen = frozenset(item for item, column in columns.items() if solution.values[column] > 0.5)
        value = -sum(made.costs[columns[item]] for item in chosen)
        return Pattern(kind, chosen), value if solution.optimal else max(value, -solution.bound)


def pack(asked: Problem, found: Options, time_limit: Seconds) -> Packed:
    """Return a placement and a bound, after *time_limit* at the latest."""
    counts = Counter(each.kind for each in asked.devices)
    alone = [
        Pattern(kind, frozenset({(name, batch)}))
        for kind in counts
        for name in asked.models
        for batch in found.on(name, kind)
    ]
    market = _Market(asked, found, counts, alone, time_limit / 2)
    bound = _find_patterns(market)
    market.seconds += time_limit / 2
    return Packed(_whole(market), bound)


def _find_patterns(market: _Market) -> float:
    """Add patterns until none improves the programme by much; return the bound."""
    bound = math.fsum(each.rps for each in market.asked.models.values())
    for _ in range(_ROUNDS):
        programme, _, rows = market.programme(whole=False)
        solution = market.solve(programme)
        if not solution.duals or market.seconds <= 0:
            return bound
        value = -math.fsum(c * v for c, v in zip(programme.costs, solution.values or (), strict=True))
        over, added = 0.0, False
        for kind, count in market.counts.items():
            pattern, worth = market.best_pattern(kind, solution.duals, rows)
            better = worth + solution.duals[rows.devices[kind]]  # the price of a device is below 0
            over += count * max(0.0, better)
            if better > _SAME and pattern not in market.patterns:
                market.patterns.append(pattern)
                added = True
        bound = min(bound, value + over)
        if not added or bound <= value * (1 + _CLOSE):
            return bound
    return bound


def _whole(market: _Market) -> Counter[Pattern]:
    """Return how many devices have each pattern, in whole numbers."""
    programme, columns, _ = market.programme(whole=True)
    solution = market.solve(programme)
    if solution.values is None:
        return Counter()
    counts = {pattern: round(solution.values[column]) for pattern, column in zip(market.patterns, columns, strict=True)}
    return Counter({pattern: count for pattern, count in counts.items() if count})
