"""
Which variant answers a query that says what it needs, not which model; and on which worker.

A variant that is loaded and healthy (active) is taken before one that must be loaded first; of several, the cheapest,
the fastest or the most accurate, as the query prefers. If none meets the needs, the answer names what comes closest.

Source: INFaaS (USENIX ATC 2021), selection on arrival of a query; its random choice among the least used workers is
left out: the least used is taken, of equals the first.
"""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from gpufaas_scheduler.plans import problem
from gpufaas_scheduler.plans.problem import AtLeastOne, BadProblem, Milliseconds, Name, NotNegative, Positive, Table

ENGINE_BATCH: Final = 32
"""An engine that is built for one batch size runs that size, at most this one."""

STATES: Final = ("inactive", "active", "overloaded", "interfered")


class Query(problem.Problem, frozen=True):
    """What is asked for: one of `app`, `model` and `variant`, and limits; an absent limit does not limit."""

    app: Name | None = None
    model: Name | None = None
    variant: Name | None = None
    batch: AtLeastOne = 1
    latency_ms: Positive | None = None
    min_accuracy: float | None = None
    max_cost: NotNegative | None = None
    """The limit of `cost_rate`, in the same unit."""
    prefer: Literal["cheapest", "fastest", "accurate"] = "cheapest"

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.app, self.model, self.variant)) != 1:
            raise BadProblem("`query` needs exactly one of `app`, `model` and `variant`")


class Variant(problem.Problem, frozen=True):
    name: Name
    model: Name
    app: Name
    accuracy: float
    max_batch: AtLeastOne
    slope_ms: NotNegative
    """Time of one more in a batch."""
    intercept_ms: NotNegative
    cost_rate: NotNegative
    """The cost of one instance per second."""
    sat_qps: Positive
    """Queries per second that saturate one instance."""
    kind: Name
    """The kind of hardware."""
    load_ms: NotNegative = 0.0
    fixed_batch: bool = False
    """Whether it always runs its full batch."""

    def predicted(self, batch: int) -> Milliseconds:
        """Return the time of a query of so many, without waiting and loading."""
        runs = min(ENGINE_BATCH, self.max_batch) if self.fixed_batch else batch
        return self.slope_ms * runs + self.intercept_ms


class Instance(problem.Problem, frozen=True):
    variant: Name
    worker: Name
    state: str
    qps: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.state.lower() not in STATES:
            raise BadProblem(f"instance of {self.variant!r} on {self.worker!r} is {self.state!r}: not one of {STATES}")

    @property
    def active(self) -> bool:
        return self.state.lower() == "active"


class Worker(problem.Problem, frozen=True):
    id: Name
    kinds: tuple[Name, ...]
    """The kinds of hardware that it has."""
    utilisation: NotNegative = 0.0


class Problem(problem.Problem, frozen=True):
    query: Query
    variants: Annotated[tuple[Variant, ...], msgspec.Meta(min_length=1)]
    instances: tuple[Instance, ...] = ()
    workers: tuple[Worker, ...] = ()

    def __post_init__(self) -> None:
        problem.distinct([each.name for each in self.variants], "variants")
        problem.distinct([each.id for each in self.workers], "workers")
        variants, workers = {each.name for each in self.variants}, {each.id for each in self.workers}
        for each in self.instances:
            if each.variant not in variants:
                raise BadProblem(f"there is an instance of {each.variant!r}, which is not among `variants`")
            if each.worker not in workers:
                raise BadProblem(f"there is an instance on {each.worker!r}, which is not among `workers`")
        if not self.asked_for():
            what = next((k, v) for k in ("app", "model", "variant") if (v := getattr(self.query, k)) is not None)
            raise BadProblem(f"no variant has {what[0]} {what[1]!r}")

    def asked_for(self) -> list[Variant]:
        """Return the variants that the query may mean."""
        query = self.query
        return [
            each
            for each in self.variants
            if each.name == query.variant or each.model == query.model or each.app == query.app
        ]


class Result(msgspec.Struct, frozen=True):
    variant: str
    worker: str
    cold: bool
    """Whether the variant must be loaded first."""
    predicted_ms: Milliseconds
    """The time of the query alone, without waiting and loading."""
    filtered: dict[str, str]
    """Why each other variant was left out that does not meet the needs."""


class Closest(msgspec.Struct, frozen=True):
    fastest: str | None
    """The fastest variant of those that are accurate enough."""
    most_accurate: str | None
    """The most accurate variant of those that are fast enough."""


class NoneFits(msgspec.Struct, frozen=True):
    closest: Closest


def solve(asked: Problem) -> Result | NoneFits:
    filtered = {each.name: why for each in asked.asked_for() if (why := _why_not(asked, each))}
    fit = [each for each in asked.asked_for() if each.name not in filtered]
    batch = asked.query.batch
    active = [each for each in fit if _active(asked, each)]
    if active:
        chosen = min(active, key=lambda each: _rank(each, asked.query))
        worker = min(_active(asked, chosen), key=lambda each: each.qps).worker
        return Result(chosen.name, worker, False, chosen.predicted(batch), filtered)
    if not fit:
        return NoneFits(_closest(asked))
    chosen = min(fit, key=lambda each: each.load_ms + each.predicted(batch))
    least_used = min(_with_kind(asked.workers, chosen.kind), key=lambda each: each.utilisation)
    return Result(chosen.name, least_used.id, True, chosen.predicted(batch), filtered)


def _rank(variant: Variant, query: Query) -> tuple[float, ...]:
    predicted = variant.predicted(query.batch)
    if query.prefer == "fastest":
        return (predicted,)
    if query.prefer == "accurate":
        return (-variant.accuracy,)
    return variant.cost_rate / variant.sat_qps, -predicted  # of equally cheap ones, the one with least to spare


def _active(asked: Problem, variant: Variant) -> list[Instance]:
    return [each for each in asked.instances if each.variant == variant.name and each.active]


def _with_kind(workers: Sequence[Worker], kind: str) -> list[Worker]:
    return [each for each in workers if kind in each.kinds]


def _why_not(asked: Problem, variant: Variant) -> str | None:
    """Return why *variant* does not meet the needs."""
    query, predicted = asked.query, variant.predicted(asked.query.batch)
    if variant.max_batch < query.batch:
        return f"takes batches of up to {variant.max_batch}, not {query.batch}"
    if query.min_accuracy is not None and variant.accuracy < query.min_accuracy:
        return f"accuracy {variant.accuracy:g} is below {query.min_accuracy:g}"
    if query.latency_ms is not None and predicted > query.latency_ms:
        return f"takes {predicted:g} ms, more than {query.latency_ms:g} ms"
    if query.max_cost is not None and variant.cost_rate > query.max_cost:
        return f"costs {variant.cost_rate:g}, more than {query.max_cost:g}"
    if not _active(asked, variant) and not _with_kind(asked.workers, variant.kind):
        return f"no worker has {variant.kind}"
    return None


def _closest(asked: Problem) -> Closest:
    query = asked.query
    usable = [each for each in asked.asked_for() if each.max_batch >= query.batch]
    accurate = [each for each in usable if query.min_accuracy is None or each.accuracy >= query.min_accuracy]
    fast = [each for each in usable if query.latency_ms is None or each.predicted(query.batch) <= query.latency_ms]
    fastest = min(accurate, key=lambda each: (each.predicted(query.batch), -each.accuracy), default=None)
    best = min(fast, key=lambda each: (-each.accuracy, each.predicted(query.batch)), default=None)
    return Closest(fastest.name if fastest else None, best.name if best else None)


def explain(asked: Problem, answer: Result | NoneFits) -> list[str]:
    by_name = {each.name: each for each in asked.variants}
    told = [f"{each.name}: {why}." for each in asked.asked_for() if (why := _why_not(asked, each))]
    if isinstance(answer, NoneFits):
        for what, name in (("fastest", answer.closest.fastest), ("most accurate", answer.closest.most_accurate)):
            if name is not None:
                each = by_name[name]
                told.append(f"Closest, {what}: {name}, {each.predicted(asked.query.batch):g} ms, {each.accuracy:g}.")
        return told or ["No variant takes a batch of this size."]
    chosen = by_name[answer.variant]
    if answer.cold:
        took = f"no variant that meets the needs is active; {answer.variant} is loaded and answers soonest"
        return [*told, f"{took}: {chosen.load_ms:g} ms load, then {answer.predicted_ms:g} ms."]
    return [*told, f"{answer.variant} is active, and the first by '{asked.query.prefer}': {answer.predicted_ms:g} ms."]


def rows(answer: Result | NoneFits) -> Table:
    if isinstance(answer, NoneFits):
        closest = answer.closest.fastest or "-", answer.closest.most_accurate or "-"
        return ("CLOSEST, FASTEST", "CLOSEST, MOST ACCURATE"), [closest]
    row = answer.variant, answer.worker, "yes" if answer.cold else "no", f"{answer.predicted_ms:g} ms"
    return ("VARIANT", "WORKER", "COLD", "PREDICTED"), [row]
