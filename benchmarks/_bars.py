"""Judges and shows the measurements of `policy.py`: bars, and the tables and plot of docs/policy-evaluation.md."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from _document import table
from matplotlib.figure import Figure
from msgspec import Struct, structs

from gpufaas_scheduler.policies.least_wait.tuning import DEFAULT_WAIT_BOUND_S
from gpufaas_simulator.plots import lines
from gpufaas_simulator.report import Estimate

BASELINE: Final = "lalb-o3"
DEFAULT: Final = "least-wait"
CVS: Final = (0.0, 1.0, 3.0)

TIE: Final = 1.02
"""Within 2 % is a tie."""
P99_EXCEPTIONS: Final = 3
P99_EXCEPTION: Final = 1.08
LESS_WAIT: Final = 0.6
NO_WORSE_THAN_BEFORE: Final = 1.1


class Cell(Struct, frozen=True):
    source: str
    functions: int
    rpm: int
    times: str
    """How true service times are distributed: ``cv 3`` (log-normal), or the name of another law."""

    @property
    def cv(self) -> float | None:
        return float(self.times.removeprefix("cv ")) if self.times.startswith("cv ") else None

    def __str__(self) -> str:
        return f"{self.source} {self.functions}/{self.rpm} at {self.times}"


class Figures(Struct, frozen=True):
    """Means over the seeds."""

    mean_s: float
    p99_s: float
    wait_s: float
    worst_wait_s: float
    """Of all seeds."""
    miss_ratio: float
    loads: float
    """Beyond the first of each function that is called: misses and prefetches."""


class Measured(Struct, frozen=True):
    cell: Cell
    by_policy: dict[str, Figures]


class Bar(Struct, frozen=True):
    asks: str
    found: str
    met: bool


class Results(Struct, frozen=True):
    policy: str
    measured: Sequence[Measured]
    recorded: dict[Cell, dict[str, Figures]]
    """What both policies made of the cells before they knew of uncertain times."""
    against_record: bool = False
    """LALB-O3 is that of the record: the published one to the letter."""

    def grid(self, cv: float | None = None) -> list[Measured]:
        return [each for each in self.measured if each.cell.cv is not None and cv in (None, each.cell.cv)]

    def theirs(self, each: Measured) -> Figures:
        return (self.recorded[each.cell] if self.against_record else each.by_policy)[BASELINE]

    def ratios(self, of: str, cv: float | None = None) -> dict[Cell, float]:
        """Of the policy's figure to that of LALB-O3, by cell."""
        return {
            each.cell: getattr(each.by_policy[self.policy], of) / getattr(self.theirs(each), of)
            for each in self.grid(cv)
        }

    @property
    def cvs(self) -> list[float]:
        return [cv for cv in CVS if self.grid(cv)]


# --- bars -------------------------------------------------------------------------------------------------------------


def bars(results: Results) -> list[Bar]:
    means, p99s = results.ratios("mean_s"), results.ratios("p99_s")
    above = [ratio for ratio in p99s.values() if ratio > TIE]
    beyond = {
        each.cell: each.by_policy[results.policy].worst_wait_s
        / max(results.theirs(each).worst_wait_s, DEFAULT_WAIT_BOUND_S)
        for each in results.grid()
    }
    found = [
        Bar(f"mean latency at least as good as {BASELINE}'s in every cell", *_every(means, TIE)),
        Bar(
            f"p99 as well, in all but {P99_EXCEPTIONS} cells, and within 8 % there",
            f"{len(above)} cells are worse; {_highest(p99s)}",
            len(above) <= P99_EXCEPTIONS and max(p99s.values()) <= P99_EXCEPTION,
        ),
        Bar(
            f"worst wait at most the larger of {BASELINE}'s and {DEFAULT_WAIT_BOUND_S:g} s, in every cell",
            *_every(beyond, TIE),
        ),
    ]
    if 3.0 in results.cvs:
        waits = results.ratios("wait_s", 3.0)
        mean = geometric_mean(list(waits.values()))
        found.append(
            Bar(
                f"at cv 3 at most {LESS_WAIT:g} times the mean wait, as geometric mean over the cells",
                f"{mean:.2f}; {_highest(waits)}",
                mean <= LESS_WAIT,
            )
        )
    if 3.0 in results.cvs and results.recorded:
        before = {
            each.cell: each.by_policy[results.policy].wait_s / results.recorded[each.cell][DEFAULT].wait_s
            for each in results.grid(3.0)
        }
        found.append(
            Bar(
                f"at cv 3 nowhere above {NO_WORSE_THAN_BEFORE:g} times the mean wait of {DEFAULT} before",
                *_every(before, NO_WORSE_THAN_BEFORE),
            )
        )
    return found


def _every(ratios: dict[Cell, float], limit: float) -> tuple[str, bool]:
    above = sum(ratio > limit for ratio in ratios.values())
    met = "all are" if not above else f"{len(ratios) - above} of {len(ratios)} are"
    return f"{met}; {_highest(ratios)}", not above


def _highest(ratios: dict[Cell, float]) -> str:
    cell = max(ratios, key=lambda each: ratios[each])
    return f"highest ratio {ratios[cell]:.2f} ({cell})"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# --- the document -----------------------------------------------------------------------------------------------------


def document(results: Results, seeds: range, held_out: Results | None, plot: str) -> str:
    judged, published = bars(results), bars(structs.replace(results, against_record=True))
    parts = [
        HEAD.format(policy=results.policy, baseline=BASELINE, first=seeds.start, last=seeds.stop - 1),
        table(
            ["bar", f"against {BASELINE}", "met", "as published", "met"],
            [
                [now.asks, now.found, _met(now), then.found, _met(then)]
                for now, then in zip(judged, published, strict=True)
            ],
        ),
        f"{sum(bar.met for bar in judged)} of {len(judged)} bars are met, {sum(bar.met for bar in published)} against "
        f"{BASELINE} as it was published.",
        *(() if held_out is None else (HELD_OUT, _verdicts(bars(held_out)))),
        "## By coefficient of variation",
        SUMMARY.format(policy=results.policy, baseline=BASELINE),
        table(
            [
                "cv",
                f"{BASELINE} before",
                BASELINE,
                f"{DEFAULT} before",
                results.policy,
                f"{results.policy} / {BASELINE}",
            ],
            [_summary(results, cv) for cv in results.cvs],
        ),
    ]
    if plot:
        parts.append(f"![Mean wait by coefficient of variation]({plot})")
    for cv in results.cvs:
        parts += [f"## Service times with cv {cv:g}", _table(results, results.grid(cv))]
    if others := [each for each in results.measured if each.cell.cv is None]:
        parts += ["## Other laws", OTHERS]
        laws = dict.fromkeys(each.cell.times for each in others)
        for law in laws:
            parts += [f"### {law.capitalize()}", _table(results, [each for each in others if each.cell.times == law])]
    return "\n\n".join(parts) + "\n"


def _verdicts(judged: Sequence[Bar]) -> str:
    return table(["bar", "found", "met"], [[bar.asks, bar.found, _met(bar)] for bar in judged])


def _met(bar: Bar) -> str:
    return "yes" if bar.met else "**no**"


HEAD = """\
# `{policy}` against `{baseline}`

Written by `python benchmarks/policy.py --trace FILE --write docs/policy-evaluation.md`: the real engine in the
simulator, seeds {first} to {last}, 12 devices of 7,800 MB, 6 minutes, the models of table 1 of GPU-FaaS drawn evenly.
*Trace* is the first 6 minutes of a sample of 500 functions of the Azure Functions 2019 trace. Both policies get the
same calls, and each call takes the same time under both. What a call takes is log-normal about the mean of its profile,
with a coefficient of variation (cv) of 0, 1 and 3. The policies are told that mean; how times spread they see only
as calls end.

Numbers are means over the seeds, {baseline} → {policy}; the worst wait is that of all seeds. Wait is latency less
service: queueing and loading. Ratios are of such means; within 2 % is a tie. *Before* and *as published* are
[the record](../benchmarks/data/least-wait-0.1.json) of commit 76a56c6, when both policies took a call that overran its
estimate to be about to end. That `{baseline}` is the published one to the letter; the one of now does not wait for a
device that is late by a load ([ADR 0028](adr/0028-unknown-times.md))."""

HELD_OUT = """\
The constants of the policy were found on these workloads, among others with these seeds. On other seeds, 100 to 104, on
which nothing was tuned:"""

SUMMARY = """\
Mean wait in seconds, as geometric mean over the cells; the ratio is that of the two policies now."""

OTHERS = """\
*Pareto*: index 1.5, cut off at 100 times the mean. *Bimodal*: 99 % of the calls take 0.1 times the mean, 1 % take 90.1
times. *One long*: the function in the middle of the ranks takes 40 s on average, which its profile says, all others
about 1.3 s; cv 1. *Drift*: cv 1, and the mean, but not the profile, doubles half-way."""


def _summary(results: Results, cv: float) -> list[str]:
    grid = results.grid(cv)

    def wait(of: Callable[[Measured], Figures]) -> float:
        return geometric_mean([of(each).wait_s for each in grid])

    columns = [
        wait(lambda each: results.recorded[each.cell][BASELINE]),
        wait(lambda each: each.by_policy[BASELINE]),
        wait(lambda each: results.recorded[each.cell][DEFAULT]),
        wait(lambda each: each.by_policy[results.policy]),
        geometric_mean(list(results.ratios("wait_s", cv).values())),
    ]
    return [f"{cv:g}", *(f"{each:.2f}" for each in columns)]


def _table(results: Results, rows: Sequence[Measured]) -> str:
    return table(
        ["workload", "functions", "calls/min", "mean, s", "p99, s", "mean wait, s", "wait before, s", "worst wait, s",
         "miss ratio", "loads beyond the first"],
        [_row(each.cell, each.by_policy[BASELINE], each.by_policy[results.policy], results.recorded[each.cell][DEFAULT])
         for each in rows],
    )  # fmt: skip


def _row(cell: Cell, them: Figures, us: Figures, before: Figures) -> list[str]:
    return [
        cell.source, str(cell.functions), str(cell.rpm),
        f"{them.mean_s:.2f} → {us.mean_s:.2f}",
        f"{them.p99_s:.1f} → {us.p99_s:.1f}",
        f"{them.wait_s:.2f} → {us.wait_s:.2f} ({100 * (us.wait_s / them.wait_s - 1):+.0f} %)",
        f"{before.wait_s:.2f}",
        f"{them.worst_wait_s:.0f} → {us.worst_wait_s:.0f}",
        f"{them.miss_ratio:.3f} → {us.miss_ratio:.3f}",
        f"{them.loads:.0f} → {us.loads:.0f}",
    ]  # fmt: skip


def wait_by_cv(results: Results) -> Figure:
    """Geometric means over the cells."""

    def series(of: Callable[[Measured], Figures]) -> list[Estimate]:
        return [Estimate(geometric_mean([of(each).wait_s for each in results.grid(cv)]), 0.0) for cv in results.cvs]

    return lines(
        results.cvs,
        {
            BASELINE: series(lambda each: each.by_policy[BASELINE]),
            f"{DEFAULT} before": series(lambda each: results.recorded[each.cell][DEFAULT]),
            results.policy: series(lambda each: each.by_policy[results.policy]),
        },
        "coefficient of variation of service times",
        "mean wait, s",
    )
