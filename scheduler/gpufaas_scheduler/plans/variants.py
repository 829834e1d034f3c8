"""
How many instances of which variants of a model serve a load at the least price.

A variant is a model built for some hardware, precision and batch size. `delta` says for each how many instances are
loaded (above 0) or unloaded (below). The integer programme is the one of INFaaS (USENIX ATC 2021), per application:

    minimise    sum of cost * (delta + lambda * load_s * max(delta, 0))
    such that   sum of qps * (running + delta) >= load + slack
                a variant slower than slo_ms is not loaded; what runs already counts
                sum of needs * (running + delta) <= the resource, for each that `resources` names
                running + delta >= 0

With a time limit, an answer that HiGHS could not prove in time is replaced by the better of its best one and `greedy`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_scheduler.plans import problem
from gpufaas_scheduler.plans.milp import Programme, minimise
from gpufaas_scheduler.plans.problem import EPSILON, Count, Infeasible, Name, NotNegative, Positive, Table

_MOST_WEIGHT: Final = 1e6
"""The most weight of one variant over another; with more, the tolerance of the solver would count."""
_UPGRADES: Final = 5
"""The number of variants that run which `greedy` tries to replace."""


class Variant(problem.Problem, frozen=True):
    name: Name
    cost: NotNegative
    """The cost of one instance per second."""
    qps: Positive
    """That one instance serves."""
    latency_ms: NotNegative
    load_s: NotNegative = 0.0
    running: Count = 0
    needs: dict[str, NotNegative] = msgspec.field(default_factory=dict)
    """The need of one instance, by resource."""


class Problem(problem.Problem, frozen=True):
    load: NotNegative
    """Queries per second."""
    slo_ms: Positive
    variants: Annotated[tuple[Variant, ...], msgspec.Meta(min_length=1)]
    slack: float = 0.0
    """Queries per second that are served beyond `load`."""
    lambda_: NotNegative = msgspec.field(default=0.0, name="lambda")
    """Weight of load times, 1/s: the less predictable the load, the larger."""
    resources: dict[str, NotNegative] = msgspec.field(default_factory=dict)
    """The limit of all instances together, by resource. What is not named is unlimited."""

    def __post_init__(self) -> None:
        problem.distinct([each.name for each in self.variants], "variants")

    @property
    def wanted(self) -> float:
        return self.load + self.slack

    def objective(self, delta: Sequence[int]) -> float:
        return math.fsum(
            each.cost * (change + self.lambda_ * each.load_s * max(change, 0))
            for each, change in zip(self.variants, delta, strict=True)
        )

    def served(self, delta: Sequence[int]) -> float:
        """Return the queries per second that are served after the change *delta*."""
        return math.fsum(each.qps * (each.running + n) for each, n in zip(self.variants, delta, strict=True))

    def may_load(self, variant: Variant) -> bool:
        return variant.latency_ms <= self.slo_ms


class Result(msgspec.Struct, frozen=True):
    delta: dict[str, int]
    """The change in the number of instances of every variant."""
    objective: float
    method: Literal["exact", "greedy"]
    gap: float | None
    """How much less might be possible, as a fraction of the objective; `null` when nothing is known."""


def solve(asked: Problem, time_limit: Seconds | None = None) -> Result | Infeasible:
    """
    Return the cheapest change; of equal ones, the one with fewest loads, then the one that prefers variants named
    first.

    :param time_limit: of the search for the least cost; without it the search ends when the answer is proven
    """
    programme, loads = _programme(asked)
    found = minimise(programme, math.inf if time_limit is None else time_limit)
    if found.optimal and found.values is None:
        return Infeasible(_why(asked))
    if found.optimal and found.values is not None:
        delta = _delta(found.values)
        return _answer(asked, _first_of_equals(asked, programme, loads, delta), "exact", 0.0)
    best = [each for each in (greedy(asked), _delta(found.values) if found.values else None) if each is not None]
    if not best:
        return Infeasible(f"nothing was found within {time_limit:g} s, which is no proof: give it more time")
    delta = min(best, key=asked.objective)
    objective = asked.objective(delta)
    known = math.isfinite(found.bound)
    gap = max(0.0, objective - found.bound) / max(abs(objective), EPSILON) if known else None
    return _answer(asked, delta, "greedy", gap)


def _answer(asked: Problem, delta: tuple[int, ...], method: Literal["exact", "greedy"], gap: float | None) -> Result:
    named = {each.name: change for each, change in zip(asked.variants, delta, strict=True)}
    return Result(named, asked.objective(delta), method, gap)


def _delta(values: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(round(values[2 * j] - values[2 * j + 1]) for j in range(len(values) // 2))


def _programme(asked: Problem) -> tuple[Programme, range]:
    """Return the programme, with two columns for each variant, loads and unloads; and the columns of loads."""
    made = Programme()
    for each in asked.variants:
        most = math.ceil(max(0.0, asked.wanted) / each.qps) if asked.may_load(each) else 0
        made.add(each.cost * (1 + asked.lambda_ * each.load_s), most)
        made.add(-each.cost, each.running)
    columns = range(2 * len(asked.variants))

    def row(amounts: list[float], low: float = -math.inf, high: float = math.inf) -> None:
        running = math.fsum(a * each.running for a, each in zip(amounts, asked.variants, strict=True))
        signed = [sign * amount for amount in amounts for sign in (1, -1)]
        made.row(columns, signed, low - running, high - running)

    row([each.qps for each in asked.variants], low=asked.wanted)
    for resource, total in asked.resources.items():
        row([each.needs.get(resource, 0.0) for each in asked.variants], high=total)
    return made, columns[::2]


def _first_of_equals(asked: Problem, programme: Programme, loads: range, delta: tuple[int, ...]) -> tuple[int, ...]:
    """Return the change of the same objective with fewest loads, and of those the one of the variants named first."""
    least = asked.objective(delta)
    limit = least + EPSILON * max(1.0, abs(least))
    programme.row(range(len(programme.costs)), list(programme.costs), high=limit)
    loading = [1.0 if column in loads else 0.0 for column in range(len(programme.costs))]
    delta = _least_by(asked, programme, loading, limit) or delta
    if _is_only(asked, programme, limit):
        return delta
    for costs in _in_turn(asked, sum(max(change, 0) for change in delta)):
        found = _least_by(asked, programme, costs, limit)
        if found is None:
            return delta
        delta = found
    return delta


def _in_turn(asked: Problem, loads: int) -> Iterator[list[float]]:
    """Yield costs that prefer more of the first variant, then of the second, and so on; several at a time."""
    costs, weight = [0.0] * (2 * len(asked.variants)), 1.0
    start = 0
    for j, each in enumerate(asked.variants):
        counts = each.running + loads + 1
        if j > start and weight * counts > _MOST_WEIGHT:
            yield costs
            costs, weight, start = [0.0] * len(costs), 1.0, j
        weight *= counts
        for before in range(start, j):
            costs[2 * before] *= counts
            costs[2 * before + 1] *= counts
        costs[2 * j], costs[2 * j + 1] = -1.0, 1.0
    yield costs


def _least_by(asked: Problem, programme: Programme, costs: list[float], limit: float) -> tuple[int, ...] | None:
    """Return the change of least *costs* that keeps to *limit*, which *programme* keeps to from now on."""
    programme.costs = costs
    found = minimise(programme)
    if found.values is None or asked.objective(_delta(found.values)) > limit:
        return None
    reached = math.fsum(cost * value for cost, value in zip(costs, found.values, strict=True))
    programme.row(range(len(costs)), costs, high=reached)
    return _delta(found.values)


def _is_only(asked: Problem, programme: Programme, limit: float) -> bool:
    """Whether one change is left: then it has the least as well as the most of any sum, such as this one."""
    ends = set()
    for way in (1.0, -1.0):
        weights = [way * math.sqrt(2 + j) for j in range(len(asked.variants))]
        programme.costs = [sign * weight for weight in weights for sign in (1.0, -1.0)]
        found = minimise(programme)
        if found.values is None or asked.objective(_delta(found.values)) > limit:
            return True
        ends.add(_delta(found.values))
    return len(ends) == 1


def _why(asked: Problem) -> str:
    serving = asked.served([0] * len(asked.variants))
    fast = [each for each in asked.variants if asked.may_load(each)]
    if not fast and serving < asked.wanted:
        fastest = min(asked.variants, key=lambda each: each.latency_ms)
        return (
            f"no variant answers within {asked.slo_ms:g} ms: the fastest, {fastest.name}, takes"
            f" {fastest.latency_ms:g} ms; what runs serves {serving:g} of {asked.wanted:g} qps"
        )
    resources = ", ".join(f"{amount:g} {name}" for name, amount in asked.resources.items())
    programme, _ = _programme(asked)
    programme.costs = [sign * -each.qps for each in asked.variants for sign in (1, -1)]
    programme.rows = programme.rows[1:]
    found = minimise(programme)
    if found.values is None:
        return f"the resources cannot be kept to, whatever is unloaded: {resources}"
    most = asked.served(_delta(found.values))
    return f"{resources} serve at most {most:g} qps within {asked.slo_ms:g} ms; {asked.wanted:g} are wanted"


def greedy(asked: Problem) -> tuple[int, ...] | None:
    """
    Return a change that serves the load, or `None` if this search finds none. Not the cheapest, but quick.

    INFaaS takes as many of one variant as cover what is missing. Here one variant serves as much as it does exactly, or
    one instance less, and the cheapest single variant the rest; on random problems that is 0.2 % above the least, not 6
    %.
    """
    best: tuple[int, ...] | None = None
    for unloaded in _unloaded_first(asked):
        start = [-each.running if j in unloaded else 0 for j, each in enumerate(asked.variants)]
        for delta in _covers(asked, start):
            if best is None or asked.objective(delta) < asked.objective(best) - EPSILON:
                trimmed = _without_surplus(asked, delta)
                best = trimmed if _keeps_to_resources(asked, trimmed) else best
    return best


def _unloaded_first(asked: Problem) -> list[set[int]]:
    """Return what is unloaded before anything is loaded: nothing, all, or one of the dearest variants that run."""
    running = [j for j, each in enumerate(asked.variants) if each.running]
    dearest = sorted(running, key=lambda j: -asked.variants[j].cost * asked.variants[j].running)
    return [set(), *({j} for j in dearest[:_UPGRADES]), set(running)]


def _covers(asked: Problem, start: list[int]) -> Iterator[list[int]]:
    """Yield changes that serve the load: some of one variant, then the cheapest single variant for the rest."""
    price = [each.cost * (1 + asked.lambda_ * each.load_s) for each in asked.variants]
    loadable = [j for j, each in enumerate(asked.variants) if asked.may_load(each)]
    missing = asked.wanted - asked.served(start)
    if missing <= 0:
        yield start
        return
    for j in loadable:
        exactly = math.floor(missing / asked.variants[j].qps)
        for count in {0, exactly, exactly - 1, exactly + 1}:
            rest = missing - count * asked.variants[j].qps
            if count < 0:
                continue
            counts = [(k, math.ceil(max(0.0, rest) / asked.variants[k].qps - EPSILON)) for k in loadable]
            k, more = min(counts, key=lambda pair: price[pair[0]] * pair[1])
            delta = list(start)
            delta[j] += count
            delta[k] += more
            yield delta


def _without_surplus(asked: Problem, delta: Sequence[int]) -> tuple[int, ...]:
    """Return *delta* without the instances that are not needed, the dearest first."""
    kept = list(delta)
    spare = asked.served(kept) - asked.wanted
    for j in sorted(range(len(kept)), key=lambda j: -asked.variants[j].cost):
        each = asked.variants[j]
        gone = min(max(0, math.floor(spare / each.qps + EPSILON)), each.running + kept[j])
        kept[j] -= gone
        spare -= gone * each.qps
    return tuple(kept)


def _keeps_to_resources(asked: Problem, delta: Sequence[int]) -> bool:
    after = [(each.needs, each.running + change) for each, change in zip(asked.variants, delta, strict=True)]
    return all(
        math.fsum(needs.get(resource, 0.0) * count for needs, count in after) <= total + EPSILON
        for resource, total in asked.resources.items()
    )


def explain(asked: Problem, answer: Result | Infeasible) -> list[str]:
    if isinstance(answer, Infeasible):
        return [f"No change serves {asked.wanted:g} qps: {answer.infeasible}."]
    told = [f"{asked.wanted:g} qps are wanted, each answered within {asked.slo_ms:g} ms."]
    for each in asked.variants:
        after = each.running + answer.delta[each.name]
        if not asked.may_load(each):
            told.append(f"{each.name} takes {each.latency_ms:g} ms: no more of it is loaded.")
        if after:
            told.append(f"{after} x {each.name} serve {after * each.qps:g} qps for {after * each.cost:g} per second.")
    proof = "no change is cheaper."
    if answer.method == "greedy":
        below = (
            "nothing is known about the least" if answer.gap is None else f"the least is at most {answer.gap:.2%} below"
        )
        proof = f"time was over: {below}."
    return [*told, f"Objective {answer.objective:.6g}; {proof}"]


def rows(answer: Result | Infeasible) -> Table:
    if isinstance(answer, Infeasible):
        return ("INFEASIBLE",), [(answer.infeasible,)]
    return ("VARIANT", "CHANGE"), [(name, f"{change:+d}" if change else "0") for name, change in answer.delta.items()]
