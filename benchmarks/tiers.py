"""
What host tiers and prefetch give, in the simulator: the tables of docs/tiers.md.

    python benchmarks/tiers.py [--trace FILE] [--parked] [--seeds 8] [--jobs 2] [--write docs/tiers.md]

Simulates each workload three times, with the same calls and times: without host tiers; with them and a policy that
estimates loads by them; and with prefetch as well. A load from the host tier takes `SHARE` of one from disk. Exits with
1 if host tiers, or prefetch, make the mean latency of a cell worse by more than `TIE`. With --parked: only what parking
gives on top of both.
"""

import argparse
import functools
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from _document import table, write_part

from gpufaas_core.model import DeviceId
from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.noise import pareto, service_noise
from gpufaas_simulator.report import Report, estimate
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import PAPER_MEMORY, PAPER_MINUTES, make_workload
from gpufaas_simulator.trace import read_trace, trace_workload
from gpufaas_simulator.workload import MB, SimulatedDevice, Workload

NODES, DEVICES = 3, 4
SHARE = 0.3
TIE = 1.02
WITHOUT, TIERS, PREFETCH = "without", "tiers", "tiers + prefetch"
WAYS = (WITHOUT, TIERS, PREFETCH)
WITH_PARKED = "tiers + prefetch + parked"
WAKE = 0.1
"""A wake takes this part of the time of a load from disk."""
SPECS = {
    "least-wait": ("least-wait", "least-wait+prefetch=none", "least-wait"),
    "lalb-o3": ("lalb-o3", "lalb-o3", "lalb-o3+prefetch=next-misses"),
}
"""The policies of the three ways."""
HEAD = """# What host tiers and prefetch give

A node keeps weights in its memory, as far as they are worth their place (`HostTier` in
`cache-manager/gpufaas_cache_manager/host_tier.py`). The scheduler follows what nodes say of it, learns load times by
where weights came from, and plans with them ([writing-a-policy.md](writing-a-policy.md)). With prefetch, the default of
`least-wait`, it has the weights of calls that wait brought into host tiers, and from there beside running calls onto
devices with free memory.
"""
INTRODUCTION = """
Written by `python benchmarks/tiers.py --trace FILE --write docs/tiers.md`: the real engine in the simulator, seeds 0 to
{seeds}, {nodes} nodes with {devices} devices each, {minutes} minutes of 325 calls a minute, the models of table 1 of
GPU-FaaS. *Trace* is the first minutes of a sample of 500 functions of the Azure Functions 2019 trace. A load from the
host tier takes {share:g} of one from disk. *Pareto*: service times have a tail of index 1.5 that the policy is not
told; *even*: they are those of the profile.

Figures are means over the seeds: without host tiers → with them → with prefetch too. *Misses* are calls that waited for
a load of their own; with host tiers there are more, since a policy waits less for a copy where a load is short. The
last column is what prefetch changes in the mean latency, with its 95 % interval over the seeds. Loads beside calls slow
none of them here, and reading for a host tier slows no load: on a real node both cost some bandwidth.
"""


PARKED = """
## Parked copies

Written by `python benchmarks/tiers.py --parked --write docs/tiers.md`: `least-wait` with prefetch, Pareto times, and
otherwise as above, without → with nodes that park (`--park`). A parked copy has weights of its own in the host tier,
as on a GPU, gives way to staged ones, and wakes in {wake:g} of the time of a load from disk. It wakes on its device
only, so where several devices may load a function, most misses go by.
"""


class Cell(NamedTuple):
    policy: str
    source: str
    functions: int
    memory_gb: float
    """The memory of a device."""
    host_gb: float
    """The size of a node's host tier."""
    heavy: bool
    """Service times have a Pareto tail; else they are those of the profile."""


class Found(NamedTuple):
    cell: Cell
    reports: dict[str, list[Report]]


def cells(trace: bool) -> list[Cell]:
    paper = PAPER_MEMORY / MB / 1000
    sources = [("power law", 35), ("power law", 60), *([("trace", 35), ("trace", 60)] if trace else [])]
    found = [
        Cell("least-wait", *source, paper, host_gb, heavy)
        for source in sources
        for heavy in (False, True)
        for host_gb in (10, 30)
    ]
    found += [Cell("least-wait", *source, 16, 30, True) for source in sources]
    return found + [Cell("lalb-o3", *source, paper, 30, True) for source in sources]


def workload(cell: Cell, trace: Path | None, seed: int, *, host: bool) -> Workload:
    rpm = 325
    if cell.source == "trace":
        assert trace is not None
        found = trace_workload(_trace(trace), working_set=cell.functions, rpm=rpm, seed=seed)
    else:
        found = make_workload(working_set=cell.functions, rpm=rpm, seed=seed)
    nodes = [f"n{number}" for number in range(NODES)]
    memory = round(cell.memory_gb * 1000) * MB
    on = [SimulatedDevice(DeviceId(f"{node}/g{at}"), memory, node=node) for node in nodes for at in range(DEVICES)]
    functions = [
        replace(each, costs={kind: replace(cost, host_load_s=SHARE * cost.load_s) for kind, cost in each.costs.items()})
        for each in found.functions
    ]
    size = round(cell.host_gb * 1000) * MB if host else 0
    return replace(found, devices=on, functions=functions, host_memory=dict.fromkeys(nodes, size) if host else {})


@functools.cache
def _trace(path: Path):  # type: ignore[no-untyped-def]
    return read_trace(path, minutes=PAPER_MINUTES)


def measure(cell: Cell, trace: Path | None, seeds: int) -> Found:
    reports: dict[str, list[Report]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        for way, spec in zip(WAYS, SPECS[cell.policy], strict=True):
            drawn = workload(cell, trace, seed, host=way != WITHOUT)
            noise = Noise(service_noise(drawn, pareto(), seed)) if cell.heavy else None
            report = simulate(drawn, engine_header(spec), noise=noise)[1]
            if report.completed < report.calls:
                raise RuntimeError(f"{cell}: calls were not served")
            reports[way].append(report)
    return Found(cell, reports)


def measure_parked(cell: Cell, seeds: int) -> Found:
    reports: dict[str, list[Report]] = {way: [] for way in (PREFETCH, WITH_PARKED)}
    for seed in range(seeds):
        drawn = workload(cell, None, seed, host=True)
        functions = [
            replace(each, costs={kind: replace(cost, wake_s=WAKE * cost.load_s) for kind, cost in each.costs.items()})
            for each in drawn.functions
        ]
        parks = replace(drawn, functions=functions, parks=frozenset(drawn.host_memory))
        for way, given in ((PREFETCH, drawn), (WITH_PARKED, parks)):
            noise = Noise(service_noise(given, pareto(), seed))
            reports[way].append(simulate(given, engine_header("least-wait"), noise=noise)[1])
    return Found(cell, reports)


def parked_text(found: Sequence[Found]) -> str:
    heads = ["functions", "host tier, GB", "mean, s", "p99, s", "misses per call", "wakes per call", "parking: mean"]
    rows = []
    for of in found:

        def each(form: str, figure: Callable[[Report], float], of: Found = of) -> str:
            return " → ".join(form.format(fmean(map(figure, of.reports[way]))) for way in (PREFETCH, WITH_PARKED))

        pairs = zip(means(of.reports[WITH_PARKED]), means(of.reports[PREFETCH]), strict=True)
        change = estimate([100 * (new / old - 1) for new, old in pairs])
        rows.append([
            str(of.cell.functions), f"{of.cell.host_gb:g}", each("{:.2f}", lambda report: report.latency.mean),
            each("{:.1f}", lambda report: report.latency.p99), each("{:.3f}", lambda report: report.miss_ratio),
            f"{fmean(report.wakes / report.calls for report in of.reports[WITH_PARKED]):.3f}",
            f"{change.mean:+.1f} ± {change.half_width:.1f} %",
        ])  # fmt: skip
    return PARKED.strip().format(wake=WAKE) + "\n\n" + table(heads, rows)


def means(reports: Sequence[Report]) -> list[float]:
    return [each.latency.mean for each in reports]


def ratio(found: Found, way: str, to: str) -> float:
    return fmean(means(found.reports[way])) / fmean(means(found.reports[to]))


def row(found: Found) -> list[str]:
    cell = found.cell

    def each(form: str, figure: Callable[[Report], float]) -> str:
        return " → ".join(form.format(fmean(map(figure, found.reports[way]))) for way in WAYS)

    changes = [new / old for new, old in zip(means(found.reports[PREFETCH]), means(found.reports[TIERS]), strict=True)]
    change = estimate([100 * (each - 1) for each in changes])
    return [
        cell.source, str(cell.functions), f"{cell.memory_gb:g}", f"{cell.host_gb:g}",
        "Pareto" if cell.heavy else "even",
        each("{:.2f}", lambda report: report.latency.mean),
        each("{:.1f}", lambda report: report.latency.p99),
        each("{:.3f}", lambda report: report.miss_ratio),
        each("{:.3f}", lambda report: (report.misses + (report.prefetches or 0) - report.host_loads) / report.calls),
        f"{change.mean:+.1f} ± {change.half_width:.1f} %",
    ]  # fmt: skip


def text(found: Sequence[Found], seeds: int) -> str:
    heads = [
        "workload", "functions", "device, GB", "host tier, GB", "times", "mean, s", "p99, s", "misses per call",
        "loads from disk per call", "prefetch: mean",
    ]  # fmt: skip
    figures = {"seeds": seeds - 1, "nodes": NODES, "devices": DEVICES, "minutes": PAPER_MINUTES, "share": SHARE}
    lines = [INTRODUCTION.strip().format(**figures)]
    for policy in SPECS:
        of = [each for each in found if each.cell.policy == policy]
        gains = [ratio(each, TIERS, WITHOUT) for each in of]
        more = [ratio(each, PREFETCH, TIERS) for each in of]
        lines.append(f"## `{policy}`")
        lines.append(table(heads, [row(each) for each in of]))
        lines.append(
            f"Mean latency with host tiers: {min(gains):.2f} to {max(gains):.2f} times that without. With prefetch: "
            f"{min(more):.2f} to {max(more):.2f} times that with\nhost tiers alone."
        )
    return "\n\n".join(lines)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--trace", type=Path, help="Azure Functions 2019 trace, or a sample of it")
    arguments.add_argument("--parked", action="store_true", help="what parked copies give, and nothing else")
    arguments.add_argument("--seeds", type=int, default=8, help="how many")
    arguments.add_argument("--jobs", type=int, default=1, help="processes")
    arguments.add_argument("--write", type=Path, help="this file, in place of what it says now")
    options = arguments.parse_args()
    if options.parked:
        paper = PAPER_MEMORY / MB / 1000
        sizes = product((35, 60), (paper,), (30, 60, 120))
        some = [Cell("least-wait", "power law", *each, heavy=True) for each in sizes]
        with multiprocessing.Pool(options.jobs) as pool:
            of_parked = parked_text(pool.map(functools.partial(measure_parked, seeds=options.seeds), some, 1))
        if options.write is None:
            print(of_parked)
        else:
            write_part(options.write, "parked", of_parked)
        return 0
    with multiprocessing.Pool(options.jobs) as pool:
        measuring = functools.partial(measure, trace=options.trace, seeds=options.seeds)
        found = pool.map(measuring, cells(options.trace is not None), chunksize=1)
    said = text(found, options.seeds)
    if options.write is None:
        print(said)
    else:
        write_part(options.write, "tiers", said, HEAD)
    worse = [
        f"{each.cell}: {way} {ratio(each, way, to):.3f}"
        for each in found
        for way, to in ((TIERS, WITHOUT), (PREFETCH, TIERS))
        if ratio(each, way, to) > TIE
    ]
    for each in worse:
        print(f"worse: {each}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
