"""
The published evaluation of GPU-FaaS (Zhao, Jha, Hong; IPDPS 2023) in the simulator, written to docs/evaluation.md.

    python benchmarks/paper.py [--trace azure.csv] [--seeds 10] [--jobs 2] [--out docs/evaluation.md] [--json runs.json]

12 GPUs of 7,800 MB, profiles of table 1, six minutes; working sets of 15, 25, 35 (and 60) functions; LB, LALB, LALB-O3
and the default policy if it is another one; the O3 limit from 0 to 45. The workload is a power law and, with --trace,
the first six minutes of a file of the Azure Functions 2019 trace. Every figure is the mean of the seeds with its 95 %
confidence interval; reductions are paired by seed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
from _document import table, write_part
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpufaas_scheduler.policies import DEFAULT_POLICY
from gpufaas_simulator import plots, synthetic
from gpufaas_simulator.report import Estimate, Report, answered, estimate, figure
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.timeline import Timeline
from gpufaas_simulator.trace import Trace, read_trace, trace_workload

ROOT = Path(__file__).resolve().parent.parent
POLICIES = list(dict.fromkeys(["lb", "lalb", "lalb-o3", DEFAULT_POLICY]))
PAPER_SETS = (15, 25, 35)
SETTINGS = [(15, 325), (25, 325), (35, 325), (60, 325), (35, 450), (60, 450)]
LIMITS = range(0, 46, 5)
O3_LIMIT = 25
"""The paper's, and our default."""
POWER_LAW, TRACE = "power law", "trace"

PUBLISHED: Mapping[tuple[str, int, str], tuple[float | None, float | None]] = {
    ("lalb", 15, POWER_LAW): (0.9774, 0.9411), ("lalb", 25, POWER_LAW): (0.9333, None),
    ("lalb", 35, POWER_LAW): (0.7943, 0.6521), ("lalb-o3", 35, POWER_LAW): (0.9693, 0.8116),
}  # fmt: skip
"""Reductions against LB of mean latency and of misses, where the paper states them."""

INDEPENDENT: Mapping[tuple[str, int, int, str], tuple[float, float]] = {
    (POWER_LAW, 15, 325, "lb"): (130.8, 0.738), (POWER_LAW, 15, 325, "lalb"): (1.87, 0.020),
    (POWER_LAW, 15, 325, "lalb-o3"): (1.83, 0.018), (POWER_LAW, 25, 325, "lb"): (150.2, 0.812),
    (POWER_LAW, 25, 325, "lalb"): (2.76, 0.095), (POWER_LAW, 25, 325, "lalb-o3"): (2.53, 0.096),
    (POWER_LAW, 35, 325, "lb"): (159.7, 0.855), (POWER_LAW, 35, 325, "lalb"): (8.85, 0.277),
    (POWER_LAW, 35, 325, "lalb-o3"): (3.74, 0.241), (POWER_LAW, 60, 325, "lb"): (166.4, 0.891),
    (POWER_LAW, 60, 325, "lalb"): (54.3, 0.481), (POWER_LAW, 60, 325, "lalb-o3"): (9.35, 0.302),
    (POWER_LAW, 35, 450, "lb"): (285.4, 0.846), (POWER_LAW, 35, 450, "lalb"): (79.5, 0.300),
    (POWER_LAW, 35, 450, "lalb-o3"): (24.9, 0.143), (POWER_LAW, 60, 450, "lb"): (298.7, 0.891),
    (POWER_LAW, 60, 450, "lalb"): (135.7, 0.461), (POWER_LAW, 60, 450, "lalb-o3"): (71.1, 0.277),
    (TRACE, 15, 325, "lb"): (23.0, 0.327), (TRACE, 15, 325, "lalb"): (1.78, 0.021),
    (TRACE, 15, 325, "lalb-o3"): (1.77, 0.020), (TRACE, 35, 325, "lb"): (30.4, 0.360),
    (TRACE, 35, 325, "lalb"): (2.10, 0.053), (TRACE, 35, 325, "lalb-o3"): (2.04, 0.051),
    (TRACE, 60, 450, "lb"): (111.9, 0.365), (TRACE, 60, 450, "lalb"): (9.34, 0.093),
    (TRACE, 60, 450, "lalb-o3"): (4.45, 0.074),
}  # fmt: skip
"""Mean latency in s and miss ratio of an independent simulation of the same text, 5 seeds; written before this one."""


@dataclass(frozen=True)
class Task:
    workload: str
    working_set: int
    rpm: int
    policy: str
    limit: int
    seed: int


@dataclass(frozen=True)
class Done:
    report: Report
    quantiles: list[float]
    """Of latency, at two hundred equal steps; only of the first seed."""


_trace: Trace | None = None


def _take(trace: Trace | None) -> None:
    global _trace
    _trace = trace


def run(task: Task) -> tuple[Task, Done]:
    if task.workload == TRACE:
        assert _trace is not None
        workload = trace_workload(_trace, working_set=task.working_set, rpm=task.rpm, seed=task.seed)
    else:
        workload = synthetic.make_workload(working_set=task.working_set, rpm=task.rpm, seed=task.seed)
    policy = task.policy if task.limit == O3_LIMIT else f"{task.policy}:o3_limit={task.limit}"
    record, found = simulate(workload, engine_header(policy))
    shares = np.linspace(0, 1, 200)
    return task, Done(found, np.quantile(answered(record), shares).tolist() if task.seed == 0 else [])


def tasks(workloads: Sequence[str], seeds: int) -> list[Task]:
    of_seed = [
        Task(workload, working_set, rpm, policy, O3_LIMIT, 0)
        for workload in workloads
        for working_set, rpm in SETTINGS
        for policy in POLICIES
    ] + [Task(workload, 35, 325, "lalb-o3", limit, 0) for workload in workloads for limit in LIMITS]
    return [
        Task(each.workload, each.working_set, each.rpm, each.policy, each.limit, seed)
        for each in dict.fromkeys(of_seed)
        for seed in range(seeds)
    ]


class Results:
    def __init__(self, done: Mapping[Task, Done], seeds: int) -> None:
        self.done = done
        self.seeds = seeds

    def reports(self, workload: str, working_set: int, rpm: int, policy: str, limit: int = O3_LIMIT) -> list[Report]:
        return [
            self.done[Task(workload, working_set, rpm, policy, limit, seed)].report for seed in range(self.seeds)
        ]  # fmt: skip

    def mean(self, name: str, *where: object) -> Estimate:
        return estimate([figure(each, name) or 0.0 for each in self.reports(*where)])  # type: ignore[arg-type]

    def less(self, name: str, where: Sequence[object], than: Sequence[object]) -> Estimate:
        """The reduction of a figure, paired by seed."""
        pairs = zip(self.reports(*where), self.reports(*than), strict=True)  # type: ignore[arg-type]
        values = [(figure(ours, name) or 0.0, figure(theirs, name) or 0.0) for ours, theirs in pairs]
        return estimate([1 - ours / theirs if theirs else 0.0 for ours, theirs in values])


# --- the document -----------------------------------------------------------------------------------------------------


def seconds(value: Estimate) -> str:
    digits = 1 if value.mean >= 20 else 2
    return f"{value.mean:.{digits}f} ± {value.half_width:.{digits}f}"


def share(value: Estimate) -> str:
    return f"{value.mean:.3f} ± {value.half_width:.3f}"


def percent(value: Estimate) -> str:
    return f"{100 * value.mean:.1f} ± {100 * value.half_width:.1f} %"


def count(value: Estimate) -> str:
    return f"{value.mean:.0f} ± {value.half_width:.0f}"


def copies(value: Estimate) -> str:
    return f"{value.mean:.2f} ± {value.half_width:.2f}"


METRICS: Sequence[tuple[str, str, Callable[[Estimate], str]]] = (
    ("mean latency, s", "mean", seconds), ("p50, s", "p50", seconds), ("p95, s", "p95", seconds),
    ("p99, s", "p99", seconds), ("variance of latency, s²", "variance", seconds),
    ("mean wait (latency less inference), s", "mean_wait_s", seconds), ("miss ratio", "miss_ratio", share),
    ("false-miss ratio", "false_miss_ratio", share), ("devices that hold the hottest model", "hottest_copies", copies),
    ("SM utilisation (inference)", "utilisation", percent), ("device busy (and loads)", "busy_ratio", percent),
    ("evictions", "evictions", count), ("loads without a call", "prefetches", count),
    ("worst wait, s", "worst_wait_s", seconds), ("most often overtaken", "most_overtaken", count),
)  # fmt: skip


def headline(results: Results, workloads: Sequence[str]) -> str:
    rows = []
    for workload in workloads:
        for working_set in PAPER_SETS:
            base = (workload, working_set, 325, "lb")
            row = [f"{workload}, {working_set}", seconds(results.mean("mean", *base))]
            for policy in POLICIES[1:]:
                where = (workload, working_set, 325, policy)
                latency, misses = PUBLISHED.get((policy, working_set, workload), (None, None))
                for name, published in (("mean", latency), ("miss_ratio", misses)):
                    cell = "−" + percent(results.less(name, where, base))
                    row.append(cell + (f" ({100 * published:.1f})" if published is not None else ""))
            rows.append(row)
    headings = ["workload, functions", "LB mean latency, s"]
    for policy in POLICIES[1:]:
        headings += [f"{policy} latency", f"{policy} misses"]
    return table(headings, rows)


def for_readme(results: Results) -> str:
    shown = [policy for policy in POLICIES if policy != "lalb"]
    rows = []
    for working_set in PAPER_SETS:
        base = (POWER_LAW, working_set, 325, "lb")
        row = [str(working_set)]
        for policy in shown:
            where = (POWER_LAW, working_set, 325, policy)
            row += [f"{seconds(results.mean('mean', *where))} s", percent(results.mean("miss_ratio", *where))]
        for name, at in (("mean", 0), ("miss_ratio", 1)):
            published = PUBLISHED.get(("lalb-o3", working_set, POWER_LAW), (None, None))[at]
            less = results.less(name, (POWER_LAW, working_set, 325, "lalb-o3"), base)
            row.append(f"−{100 * less.mean:.1f} %" + (f" ({100 * published:.1f})" if published else ""))
        rows.append(row)
    headings = ["functions"]
    for policy in shown:
        headings += [f"{policy}: latency", "misses"]
    return table([*headings, "lalb-o3 against lb, latency (published)", "misses (published)"], rows)


def everything(results: Results, workloads: Sequence[str]) -> str:
    parts = []
    for workload in workloads:
        for working_set, rpm in SETTINGS:
            rows = [
                [label] + [form(results.mean(name, workload, working_set, rpm, policy)) for policy in POLICIES]
                for label, name, form in METRICS
            ]
            parts.append(
                f"**{workload}, {working_set} functions, {rpm} requests/min**\n\n{table(['', *POLICIES], rows)}"
            )
    return "\n\n".join(parts)


def beside_independent(results: Results, workloads: Sequence[str]) -> str:
    rows = []
    for (workload, working_set, rpm, policy), (latency, misses) in INDEPENDENT.items():
        if workload in workloads:
            where = (workload, working_set, rpm, policy)
            lowest, highest = (
                pick(figure(each, "mean") or 0.0 for each in results.reports(*where)) for pick in (min, max)
            )  # fmt: skip
            rows.append([
                f"{workload}, {working_set}, {rpm}/min, {policy}", seconds(results.mean("mean", *where)),
                f"{lowest:.2f} to {highest:.2f}", f"{latency:g}",
                share(results.mean("miss_ratio", *where)), f"{misses:g}",
            ])  # fmt: skip
    headings = ["", "mean latency, s", "seeds", "independent", "miss ratio", "independent"]
    return f"""### Beside an independent simulation

Of the same text, with 5 seeds, written before this one and sharing no code with it. The third column is the least and
the greatest of our seeds: how much depends on which models the hottest functions are.

{table(headings, rows)}"""


def more_published(results: Results, workload: str) -> str:
    """What the paper states beside latency and misses."""
    lb15, lb35 = (workload, 15, 325, "lb"), (workload, 35, 325, "lb")
    rows = [["LB's false-miss ratio, highest of the three sets", "up to 96 %", percent(max(
        (results.mean("false_miss_ratio", workload, working_set, 325, "lb") for working_set in PAPER_SETS),
        key=lambda value: value.mean,
    ))]]  # fmt: skip
    for policy, published in (("lalb", 34.4), ("lalb-o3", 35.4)):
        cut = results.less("false_miss_ratio", (workload, 15, 325, policy), lb15)
        rows.append([f"false-miss ratio, {policy} against LB, 15", f"−{published} %", "−" + percent(cut)])
    for working_set, base, published_pair in ((15, lb15, (48.96, 49.48)), (35, lb35, (35.32, 33.47))):
        for policy, published in zip(("lalb", "lalb-o3"), published_pair, strict=True):
            cut = results.less("hottest_copies", (workload, working_set, 325, policy), base)
            rows.append(
                [f"copies of the hottest, {policy} against LB, {working_set}", f"−{published} %", "−" + percent(cut)]
            )
    for name, label, published in (
        ("mean", "latency", 85.1), ("miss_ratio", "misses", 45.83), ("variance", "variance of latency", 95.93),
    ):  # fmt: skip
        cut = results.less(name, (workload, 35, 325, "lalb-o3", 45), (workload, 35, 325, "lalb-o3", 0))
        rows.append([f"{label}, O3 limit 45 against 0, 35", f"−{published} %", "−" + percent(cut)])
    for working_set in PAPER_SETS:
        pairs = zip(
            results.reports(workload, working_set, 325, "lb"), results.reports(workload, working_set, 325, "lalb-o3"),
            strict=True,
        )  # fmt: skip
        times = estimate([theirs.latency.mean / ours.latency.mean for theirs, ours in pairs])
        stated = "48x, for a set not named" if working_set == PAPER_SETS[0] else ""
        said = f"{times.mean:.0f}x ± {times.half_width:.0f}"
        rows.append([f"mean latency, LB over LALB-O3, {working_set}", stated, said])
    return table(["", "published", f"here, {workload}"], rows)


def sweep(results: Results, workloads: Sequence[str]) -> str:
    rows = []
    for limit in LIMITS:
        row = [str(limit)]
        for workload in workloads:
            where = (workload, 35, 325, "lalb-o3", limit)
            row += [
                seconds(results.mean("mean", *where)), seconds(results.mean("p99", *where)),
                seconds(results.mean("variance", *where)), share(results.mean("miss_ratio", *where)),
            ]  # fmt: skip
        rows.append(row)
    headings = ["limit"]
    for workload in workloads:
        headings += [f"{workload}: mean, s", "p99, s", "variance, s²", "miss ratio"]
    return table(headings, rows)


def table_1() -> str:
    rows = [
        [name, f"{size}", f"{load_s:.2f}", f"{infer_s:.2f}"]
        for name, (size, load_s, infer_s) in synthetic.TABLE_1.items()
    ]  # fmt: skip
    headings = ["model", "occupation, MB", "load, s", "inference of 32 images, s"]
    return f"""### Table 1

As published, GeForce RTX 2080, PyTorch; every request is one batch of 32 images.

{table(headings, rows)}"""


def shape_holds(results: Results) -> str:
    base = (POWER_LAW, 35, 325, "lb")
    ours = (POWER_LAW, 35, 325, "lalb-o3")
    latency, misses = results.less("mean", ours, base).mean, results.less("miss_ratio", ours, base).mean
    held = latency >= 0.95 and misses >= 0.65
    return (
        f"The shape {'holds' if held else '**does not hold**'}: at 35 functions LALB-O3's mean latency is "
        f"{100 * latency:.1f} % below LB's (at least 95 is asked) and its misses {100 * misses:.1f} % (65)."
    )


HEAD = """
# Evaluation

Simulated on the engine that `gpufaas serve` runs ([simulator.md](simulator.md)), beside the figures of the paper whose
scheduler this is: M. Zhao, K. Jha, S. Hong, "GPU-enabled Function-as-a-Service for Machine Learning Inference" (IPDPS
2023). The parts between marks are written by the programs that they name.
"""


DIFFERENCES = """\
- *Latencies of the testbed* are not stated, only ratios. LB cannot keep up in either (once most requests load, they
  need more than twelve GPUs): its latency grows for as long as the trace runs, and each ratio to it grows with that.
- *Plain LALB at 35 functions* does better here than on the testbed, and so there is less left for O3 to gain. The
  working set fits the cluster with little to spare (about 80 of 94 GB), and which models the hottest functions are
  decides how much: see the spread of seeds. Here load times do not depend on each other; there, the weights came from
  one disk over the network, so loads that coincide should have slowed each other down, which costs a policy more the
  more it loads. What was in the page cache there is not stated.
- *Misses of LALB-O3 at 35* are cut less here. Most of those left are avoidable, and LRU makes them: it evicts last
  copies while duplicates of other models stay.
- *False misses and copies* follow the popularity of the hottest function: of the calls of 35 functions it has 17 % by
  this power law and 65 % in the trace sample. In the full trace the first 15 functions of 46,413 have 56 % of all
  calls; what the hottest of them has is not stated.
- *On the trace sample*, where one function has most of the calls, LB finds its model on nearly every GPU and is
  overloaded far less, which leaves less to be reduced. The published trace is the full one.
- *SM utilisation* here is the share of GPU time with inference on it; how many SMs that keeps busy is not known. It is
  higher with fewer loads because the same work is done in less time."""


def document(results: Results, workloads: Sequence[str], command: str, figures: str) -> str:
    trace_note = "" if TRACE in workloads else (
        "\n\nThis run had no trace: with `--trace FILE` the same tables are made for the Azure Functions 2019 trace.\n"
    )  # fmt: skip
    extra = "" if DEFAULT_POLICY in ("lb", "lalb", "lalb-o3") else f" `{DEFAULT_POLICY}` is ours, and the default."
    return f"""
## The published evaluation

```console
$ {command}
```

12 GPUs of 7,800 MB; profiles of table 1, shuffled by the seed and spread evenly over the functions, each of which is a
model of its own; six minutes of 325 requests, each minute's calls at random times in it. Power law: in each minute,
function *n* is called in proportion to n^-0.8. Trace: the functions that are called most in its first six minutes, each
minute normalised. Means of {results.seeds} seeds ± the half width of the 95 % confidence interval (Student's t);
reductions are paired by seed, against LB; in brackets, what the paper states.{extra}{trace_note}

{headline(results, workloads)}

{shape_holds(results)}

![Mean latency and miss ratio by policy and working set, power law]({figures}/latency.svg)

### What else the paper states

{more_published(results, POWER_LAW)}

### The O3 limit, 35 functions

How often a waiting call may be overtaken by later ones that hit; 0 is LALB.

{sweep(results, workloads)}

![Mean latency against the O3 limit]({figures}/o3-limit.svg)

### Where we differ, and why

{DIFFERENCES}

### Distribution of latency, and what was resident

Power law, first seed.

![Distribution of latency]({figures}/cdf.svg)

![What was resident on each GPU, LALB-O3, 35 functions]({figures}/resident-lalb-o3.png)

{beside_independent(results, workloads)}

### All metrics

{everything(results, workloads)}

{table_1()}
"""


def draw(results: Results, folder: Path, workloads: Sequence[str]) -> None:
    bars = {
        (policy, working_set): {
            name: results.mean(name, POWER_LAW, working_set, 325, policy) for name in ("mean", "miss_ratio")
        }
        for working_set in (*PAPER_SETS, 60)
        for policy in POLICIES
    }
    plots.save(plots.latency_and_misses(bars), folder / "latency.svg")
    spread = {
        (policy, working_set): np.array(results.done[Task(POWER_LAW, working_set, 325, policy, O3_LIMIT, 0)].quantiles)
        for working_set in PAPER_SETS
        for policy in POLICIES
    }
    plots.save(plots.latency_cdf(spread), folder / "cdf.svg")
    series = {
        workload: [results.mean("mean", workload, 35, 325, "lalb-o3", limit) for limit in LIMITS]
        for workload in workloads
    }
    plots.save(plots.lines(list(LIMITS), series, "O3 limit", "mean latency, s"), folder / "o3-limit.svg")
    timeline = Timeline()
    record, _ = simulate(synthetic.make_workload(working_set=35), engine_header("lalb-o3"), observers=[timeline])
    figure = plots.residency(timeline.stays(record.end_s), record.end_s, "LALB-O3, 35 functions, 325/min")
    plots.save(figure, folder / "resident-lalb-o3.png")


def carried_out(todo: Sequence[Task], trace: Trace | None, jobs: int) -> Iterable[tuple[Task, Done]]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with (
        ProcessPoolExecutor(jobs, initializer=_take, initargs=(trace,)) as pool,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("simulating", total=len(todo))
        for each in as_completed([pool.submit(run, task) for task in todo]):
            progress.advance(bar)
            yield each.result()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--trace", type=Path, help="a file of the Azure Functions 2019 trace, or a sample of it")
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments.add_argument("--out", type=Path, default=ROOT / "docs" / "evaluation.md")
    arguments.add_argument("--json", type=Path, help="write every report of every run there")
    options = arguments.parse_args()

    began = perf_counter()
    trace = read_trace(options.trace, minutes=synthetic.PAPER_MINUTES) if options.trace else None
    workloads = [POWER_LAW, TRACE] if trace else [POWER_LAW]
    done = dict(carried_out(tasks(workloads, options.seeds), trace, options.jobs))
    results = Results(done, options.seeds)
    figures = options.out.with_suffix("")
    draw(results, figures, workloads)
    command = "python benchmarks/paper.py" + (f" --trace {options.trace.name}" if trace else "")
    write_part(options.out, "benchmarks/paper.py", document(results, workloads, command, figures.name), HEAD)
    if options.out == arguments.get_default("out"):
        write_part(ROOT / "README.md", "benchmarks/paper.py", for_readme(results))
    if options.json:
        rows = [
            {"workload": task.workload, "working_set": task.working_set, "rpm": task.rpm, "o3_limit": task.limit,
             "seed": task.seed, **msgspec.to_builtins(each.report)}
            for task, each in done.items()
        ]  # fmt: skip
        options.json.write_text(json.dumps(rows))
    print(f"wrote {options.out}: {len(done)} runs in {perf_counter() - began:.0f} s")
    print(shape_holds(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
