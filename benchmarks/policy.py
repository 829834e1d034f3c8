"""
Whether `least-wait` is better than LALB-O3 with unknown service times: the tables of
docs/policy-evaluation.md, and the bars that they are judged by.

    python benchmarks/policy.py --trace FILE [--seeds 10] [--cv 0 --cv 3] [--jobs 2] [--json | --write docs/FILE.md]

Simulates the published set-up (12 devices of 7,800 MB, six minutes, the models of table 1) in every cell of 15 to 60
functions and 200 to 450 calls a minute, drawn by a power law and taken from the Azure trace. What calls truly take is
drawn with a coefficient of variation of 0, 1 and 3 about the profile, which is all that the policies are told.
Workloads, and the time of each call, are the same for both policies. Further laws are simulated in a few cells. Without
a trace its cells are left out, and it says so. Exits with 1 if a bar is missed.
"""

import argparse
import functools
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
from _bars import BASELINE, CVS, Cell, Figures, Measured, Results, bars, document, wait_by_cv
from rich.console import Console
from rich.progress import Progress

from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.noise import bimodal, lognormal, pareto, service_noise
from gpufaas_simulator.plots import save
from gpufaas_simulator.report import Report
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import PAPER_MINUTES, make_workload
from gpufaas_simulator.trace import Trace, read_trace, trace_workload
from gpufaas_simulator.workload import Workload

SOURCES = ("power law", "trace")
WORKING_SETS = (15, 25, 35, 60)
RATES = (200, 325, 450)
OTHER_LAWS = {"pareto": pareto(), "bimodal": bimodal(), "one long": lognormal(1), "drift": lognormal(1)}
"""One long: the function in the middle of the ranks takes `LONG_S`, and is known to. Drift: as in `--drift 2`."""
OTHER_CELLS = (("power law", 35, 200), ("power law", 60, 200), ("trace", 35, 325))
LONG_S = 40.0
PLOT = "evaluation/wait-by-cv.svg"
RECORDED = Path(__file__).parent / "data" / "least-wait-0.1.json"
"""What `least-wait` made of the cells before it knew of uncertain times, and what `lalb-o3` did."""


@functools.cache
def trace(path: Path) -> Trace:
    return read_trace(path, minutes=PAPER_MINUTES)


def workload(cell: Cell, path: Path | None, seed: int) -> Workload:
    if cell.source == "trace":
        assert path is not None
        found = trace_workload(trace(path), working_set=cell.functions, rpm=cell.rpm, seed=seed)
    else:
        found = make_workload(working_set=cell.functions, rpm=cell.rpm, seed=seed)
    if cell.times == "one long":
        functions = list(found.functions)
        long = functions[len(functions) // 2]
        costs = {kind: replace(cost, service_s=LONG_S) for kind, cost in long.costs.items()}
        functions[len(functions) // 2] = replace(long, costs=costs)
        found = replace(found, functions=functions)
    return found


def noise(cell: Cell, drawn: Workload, seed: int) -> Noise:
    law = lognormal(cell.cv) if cell.cv is not None else OTHER_LAWS[cell.times]
    return Noise(service_noise(drawn, law, seed, 2.0 if cell.times == "drift" else 1.0))


def figures(reports: Sequence[Report]) -> Figures:
    def mean(values: list[float]) -> float:
        return round(fmean(values), 4)

    if any(each.completed < each.calls for each in reports):
        raise RuntimeError("calls were not served: what is measured says nothing of them")
    return Figures(
        mean([each.latency.mean for each in reports]),
        mean([each.latency.p99 for each in reports]),
        mean([each.mean_wait_s for each in reports]),
        round(max(each.fairness.worst_wait_s for each in reports), 2),
        mean([each.miss_ratio for each in reports]),
        mean([each.misses + (each.prefetches or 0) - (each.first_loads or 0) for each in reports]),
    )


def measure(cell: Cell, policies: Sequence[str], path: Path | None, seeds: range) -> Measured:
    found: dict[str, list[Report]] = {name: [] for name in policies}
    for seed in seeds:
        drawn = workload(cell, path, seed)
        factors = noise(cell, drawn, seed)
        for name, reports in found.items():
            reports.append(simulate(drawn, engine_header(name), noise=factors)[1])
    return Measured(cell, {name: figures(reports) for name, reports in found.items()})


def read(path: Path) -> list[Measured]:
    """Return what `--json` printed."""

    class File(msgspec.Struct):
        cells: list[Measured]

    return msgspec.json.decode(path.read_bytes(), type=File).cells


def yardstick() -> float:
    """Return seconds of CPU for a loop of ten million additions: how quick this machine is at Python now."""
    began = time.process_time()
    total = 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - began


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def measure_all(options: argparse.Namespace, seeds: range, console: Console) -> list[Measured]:
    cvs = sorted(set(options.cv or CVS))
    grid = [
        Cell(source, working_set, rpm, f"cv {cv:g}")
        for cv in cvs
        for source in SOURCES
        for working_set in WORKING_SETS
        for rpm in RATES
    ]
    others = [Cell(*cell, law) for law in OTHER_LAWS for cell in OTHER_CELLS] if not options.cv else []
    cells = [cell for cell in grid + others if cell.source != "trace" or options.trace is not None]
    measuring = functools.partial(measure, policies=(BASELINE, options.policy), path=options.trace, seeds=seeds)
    began = time.monotonic()
    measured: list[Measured] = []
    with Progress(console=console) as progress, multiprocessing.Pool(options.jobs) as pool:
        task = progress.add_task("simulating", total=len(cells))
        for each in pool.imap(measuring, cells):
            measured.append(each)
            progress.advance(task)
    runs = 2 * len(cells) * len(seeds)
    console.print(
        f"{runs} simulations in {time.monotonic() - began:.0f} s in {options.jobs} processes; "
        f"ten million additions in a Python loop: {yardstick():.2f} s"
    )
    return measured


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--policy", default="least-wait")
    arguments.add_argument("--trace", type=Path, help="Azure Functions 2019 trace, or a sample of it")
    arguments.add_argument("--seeds", type=int, default=10, help="how many")
    arguments.add_argument("--first-seed", type=int, default=0)
    arguments.add_argument("--cv", type=float, action="append", choices=CVS, help="only this one; may be repeated")
    arguments.add_argument("--jobs", type=int, default=1, help="processes")
    arguments.add_argument("--measured", type=Path, help="judge this, printed by --json, and simulate nothing")
    arguments.add_argument("--held-out", type=Path, help="show bars of these, too: --json of seeds 100 to 104")
    arguments.add_argument("--json", action="store_true", help="print what was measured, and judge nothing")
    arguments.add_argument("--write", type=Path, help="this file, in place of what it says now")
    options = arguments.parse_args()

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    console = Console(stderr=True)
    if seeds != range(10) and not options.json:
        console.print("what is compared with the record is of other seeds: that has seeds 0 to 9")
    if options.trace is None and options.measured is None:
        console.print("no trace: its cells are left out (--trace FILE)")
    measured = measure_all(options, seeds, console) if options.measured is None else read(options.measured)
    if options.json:
        command = " ".join(["python", "benchmarks/policy.py", *sys.argv[1:]])
        head = msgspec.json.encode({"command": command, "commit": commit()}).decode().removesuffix("}")
        print(head + ',"cells":[\n' + ",\n".join(msgspec.json.encode(each).decode() for each in measured) + "\n]}")
        return 0
    held_out = None if options.held_out is None else Results(options.policy, read(options.held_out), {})
    results = Results(options.policy, measured, {each.cell: each.by_policy for each in read(RECORDED)})
    if options.write:
        save(wait_by_cv(results), options.write.parent / PLOT)
        options.write.write_text(document(results, seeds, held_out, PLOT), encoding="utf-8")
    else:
        print(document(results, seeds, held_out, ""))
    judged = bars(results)
    for bar in judged:
        console.print(f"{'met' if bar.met else 'MISSED'}: {bar.asks}: {bar.found}")
    return 0 if all(bar.met for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
