"""
Which type of node serves a function's requests: the cheapest that is nearly as fast as the fastest.

A CPU that is fast enough wins over every GPU. Of the GPUs that answer all requests within the goal, those count whose
last request ends at most 50 ms after the best one's; the cheapest of them is chosen. If none answers all, the one that
answers most in time is chosen.

The problem is taken as it stands: all `n` requests are there at once (`bulk`), and the whole goal is left for them.

Source: PALDIA, IPDPS 2024, section on hardware selection.
"""

import math
from typing import Annotated, Final, Literal

import msgspec

from gpufaas_scheduler.plans import problem
from gpufaas_scheduler.plans.problem import (
    EPSILON,
    AtLeastOne,
    BadProblem,
    Count,
    Milliseconds,
    Name,
    NotNegative,
    Positive,
    Table,
)
from gpufaas_scheduler.plans.split import Sharing, split

SLACK: Final[Milliseconds] = 50.0
"""A GPU may be so much slower than the fastest one, and be chosen because it is cheaper."""


class NodeType(problem.Problem, frozen=True):
    name: Name
    price: NotNegative
    """Per hour; any currency, one for all types."""
    kind: Literal["cpu", "gpu"]
    solo_ms: Positive
    """The time of one batch that has the node to itself."""
    batch: AtLeastOne
    fbr: NotNegative | None = None
    """Fraction of the memory bandwidth that one batch uses alone. A GPU must have it."""
    p: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    c_max: AtLeastOne | None = None
    """Most batches at once; none: no limit."""


class Problem(problem.Problem, frozen=True):
    n: Count
    """Requests that are there."""
    slo_ms: Positive
    types: Annotated[tuple[NodeType, ...], msgspec.Meta(min_length=1)]
    rate: NotNegative | None = None
    """Requests per second, for the reader: nothing is computed from it."""

    def __post_init__(self) -> None:
        problem.distinct([each.name for each in self.types], "node types")
        for each in self.types:
            if each.kind == "gpu" and each.fbr is None:
                raise BadProblem(f"node type {each.name!r} has no `fbr`: a GPU needs one, a fraction such as 0.4")


class Candidate(msgspec.Struct, frozen=True):
    name: str
    y: int | None
    """Requests that wait; `null` for a CPU."""
    t_max_ms: Milliseconds | None
    """End of the last request; `null` for a GPU that does not answer all in time."""
    feasible: bool
    in_time: int
    price: float


class Result(msgspec.Struct, frozen=True):
    choice: str
    y: int | None
    t_max_ms: Milliseconds | None
    feasible: bool
    in_time: int
    candidates: tuple[Candidate, ...]
    """Every type, in the order of the problem."""


def solve(asked: Problem) -> Result:
    """Return the choice. Ties go to the type that was named first."""
    candidates = tuple(evaluate(each, asked.n, asked.slo_ms) for each in asked.types)
    chosen = _choose(candidates)
    return Result(chosen.name, chosen.y, chosen.t_max_ms, chosen.feasible, chosen.in_time, candidates)


def evaluate(node: NodeType, n: int, goal: Milliseconds) -> Candidate:
    """Return what *node* makes of *n* requests that have *goal* left."""
    if node.kind == "cpu":
        ends = math.ceil(n / node.batch) * node.solo_ms
        feasible = ends < goal - EPSILON
        in_time = n if feasible else min(n, node.batch * math.floor(goal / node.solo_ms))
        return Candidate(node.name, None, ends, feasible, in_time, node.price)
    assert node.fbr is not None
    found = split(n, Sharing(node.solo_ms, node.batch, node.fbr, node.p, node.c_max), goal)
    return Candidate(node.name, found.y, found.ends, found.ends is not None, found.in_time, node.price)


def _choose(candidates: tuple[Candidate, ...]) -> Candidate:
    feasible = [each for each in candidates if each.feasible]
    if not feasible:
        return min(candidates, key=lambda each: (-each.in_time, each.price))
    if cpus := [each for each in feasible if each.y is None]:
        return min(cpus, key=lambda each: each.price)
    ends = [(each, each.t_max_ms or 0.0) for each in feasible]
    limit = min(end for _, end in ends) + SLACK + EPSILON
    return min((pair for pair in ends if pair[1] <= limit), key=lambda pair: (pair[0].price, pair[1]))[0]


def explain(asked: Problem, answer: Result) -> list[str]:
    told = [f"{asked.n} requests are there at once; the last must end before {asked.slo_ms:g} ms."]
    for node, found in zip(asked.types, answer.candidates, strict=True):
        told.append(f"{node.name} ({node.kind}, {node.price:g} per hour): {_working(node, found, asked)}")
    told.append(_reason(asked, answer))
    return told


def _working(node: NodeType, found: Candidate, asked: Problem) -> str:
    if node.kind == "cpu":
        batches = math.ceil(asked.n / node.batch)
        verdict = "in time" if found.feasible else f"too late; {found.in_time} are in time"
        return f"{batches} batches of up to {node.batch}, one after another, end at {found.t_max_ms:g} ms: {verdict}."
    assert found.y is not None
    at_once = asked.n - found.y
    what = f"{at_once} at once ({at_once / node.batch:.3g} batches), {found.y} wait"
    if found.feasible:
        return f"{what}; the last ends at {found.t_max_ms:.6g} ms: in time."
    return f"no split has all in time; best is {what}: {found.in_time} are in time."


def _reason(asked: Problem, answer: Result) -> str:
    if not answer.feasible:
        most = f"{answer.in_time} of {asked.n}"
        return f"{answer.choice}: no type answers all in time, and this one answers most ({most})."
    if answer.y is None:
        return f"{answer.choice}: the cheapest CPU that is fast enough; no GPU is looked at."
    best = min(each.t_max_ms for each in answer.candidates if each.feasible and each.t_max_ms is not None)
    return f"{answer.choice}: the cheapest within {SLACK:g} ms of the fastest ({best:.6g} ms)."


def rows(answer: Result) -> Table:
    headings = ("", "TYPE", "PRICE/H", "WAIT", "LAST ENDS", "IN TIME", "FEASIBLE")
    return headings, [_row(each, each.name == answer.choice) for each in answer.candidates]


def _row(found: Candidate, chosen: bool) -> tuple[str, ...]:
    wait = "-" if found.y is None else str(found.y)
    ends = "-" if found.t_max_ms is None else f"{found.t_max_ms:.6g} ms"
    feasible = "yes" if found.feasible else "no"
    return "*" if chosen else "", found.name, f"{found.price:g}", wait, ends, str(found.in_time), feasible
