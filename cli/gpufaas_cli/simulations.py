"""What ``simulate``, ``replay`` and ``what-if`` share: options that name a workload, and how results are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from gpufaas_cli import declare, output
from gpufaas_cli.declare import gathered, needing, option

if TYPE_CHECKING:
    from gpufaas_core.explanation import Explanation
    from gpufaas_simulator.nodes import Noise
    from gpufaas_simulator.noise import Law
    from gpufaas_simulator.record import Record
    from gpufaas_simulator.report import Estimate, Report
    from gpufaas_simulator.timeline import Timeline
    from gpufaas_simulator.trace import Trace
    from gpufaas_simulator.workload import Workload

_SHAPES: Final = ("power-law", "poisson", "bursts", "diurnal")
_DEFAULT_WORKING_SET: Final = 35


_COUNT: Final = click.IntRange(1)
_PATH: Final = click.Path(path_type=Path)
_ABOVE_0: Final = click.FloatRange(0, min_open=True)


def installed(command: str) -> AbstractContextManager[None]:
    """Import the simulator in it: a missing package is an error that says what to install."""
    return needing(command, "simulate")


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """The workload that was asked for, for any working set and seed."""

    file: Path | None
    trace: Path | None
    shape: str | None
    minutes: int
    first_minute: int | None
    working_sets: tuple[int, ...]
    rpm: float
    as_recorded: bool
    skew: float
    devices: int
    memory_mb: float

    def __post_init__(self) -> None:
        self._trace: Trace | None = None
        self._explicit: Workload | None = None
        given = {"--workload": self.file, "--trace": self.trace, "--shape": self.shape}
        named = [option for option, value in given.items() if value is not None]
        if len(named) > 1:
            raise click.UsageError(f"{' and '.join(named)} both name a workload: leave one out")
        if self.as_recorded and self.trace is None:
            raise click.UsageError("--as-recorded is about --trace: name a trace")

    @property
    def title(self) -> str:
        if self.file is not None:
            return str(self.file)
        what = f"{self.shape or 'power law'}" if self.trace is None else str(self.trace)
        rate = "as recorded" if self.as_recorded else f"{self.rpm:g} calls/min"
        return f"{what}, {self.minutes} min, {rate}, {self.devices} devices of {self.memory_mb:g} MB"

    def settings(self) -> tuple[int, ...]:
        """The working sets to go through; 0 for a workload that comes as it is."""
        return (0,) if self.file is not None else self.working_sets or (_DEFAULT_WORKING_SET,)

    def workload(self, working_set: int, seed: int) -> Workload:
        """:raises BadWorkload: the file or the trace is wrong"""
        from gpufaas_simulator.explicit import read_workload
        from gpufaas_simulator.synthetic import devices, make_workload
        from gpufaas_simulator.trace import read_trace, trace_workload
        from gpufaas_simulator.workload import MB

        if self.file is not None:
            self._explicit = self._explicit or read_workload(self.file)
            return self._explicit
        on = devices(self.devices, round(self.memory_mb * MB))
        if self.trace is not None:
            self._trace = self._trace or read_trace(self.trace, minutes=self.minutes, first_minute=self.first_minute)
            rpm = None if self.as_recorded else self.rpm
            return trace_workload(self._trace, working_set=working_set, rpm=rpm, seed=seed, on=on)
        return make_workload(
            self.shape or "power-law", working_set=working_set, rpm=self.rpm, minutes=self.minutes, seed=seed,
            skew=self.skew, on=on,
        )  # fmt: skip


workload = gathered(
    "source", Source,
    option("--workload", "file", type=_PATH, metavar="FILE", says="Explicit workload (docs/simulator.md)."),
    option("--trace", type=_PATH, metavar="FILE",
           says="Azure Functions 2019, calls per minute; the full files or samples of them."),
    option("--shape", type=click.Choice(_SHAPES), says="Draw the workload. [default: power-law, as published]"),
    option("--minutes", type=_COUNT, default=6, metavar="N", says="Length of the workload."),
    option("--first-minute", type=int, metavar="N", says="First minute of --trace. [default: its first]"),
    option("--working-set", "working_sets", type=_COUNT, multiple=True, metavar="N",
           says=f"How many functions, the most called ones; repeatable. [default: {_DEFAULT_WORKING_SET}]"),
    option("--rpm", type=_ABOVE_0, default=325.0, says="Calls a minute, all functions together."),
    option("--as-recorded", is_flag=True, says="With --trace: its own number of calls, whatever --rpm says."),
    option("--skew", type=click.FloatRange(0), default=0.8, says="With --shape: popularity falls as rank^-SKEW."),
    option("--devices", type=_COUNT, default=12, metavar="N", says="How many devices there are."),
    option("--memory-mb", type=_ABOVE_0, default=7800.0, says="Memory of each device."),
)  # fmt: skip
"""Where the workload comes from, as ``source``."""

learn = option("--learn", is_flag=True,
               says="Let the scheduler learn its profiles from what is measured, as serve does; else they are the "
               "truth.")  # fmt: skip

plotting = declare.options(
    option("--plots", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
           says="Draw there the distribution of latency; simulate also misses, and what was resident when."),
    option("--plot-format", type=click.Choice(("svg", "png")), default="svg", says="Format of --plots."),
)  # fmt: skip


@dataclass(frozen=True)
class Deviation:
    """How true times differ from profiles."""

    law: Law | None
    of: str
    drift: float

    @classmethod
    def of_options(cls, noise: float | None, noise_of: str, noise_law: str | None, drift: float) -> Deviation:
        """:raises click.UsageError: they contradict each other"""
        with installed("simulate"):
            from gpufaas_simulator.noise import PARETO_INDEX, bimodal, lognormal, pareto

        law: Law | None
        match noise_law:
            case "pareto":
                if noise is not None and not noise > 1:
                    raise click.UsageError(f"--noise {noise:g} is the index of the Pareto law: give a number above 1")
                law = pareto(PARETO_INDEX if noise is None else noise)
            case "bimodal":
                if noise is not None:
                    raise click.UsageError("the bimodal law of --noise-law has no parameter: leave --noise out")
                law = bimodal()
            case _:
                if noise_law is not None and noise is None:
                    raise click.UsageError("--noise-law lognormal needs --noise: give a coefficient of variation, as 1")
                law = lognormal(noise) if noise else None
        return cls(law, noise_of, drift)

    def noise(self, workload: Workload, seed: int) -> Noise | None:
        """Return a new one for each run."""
        from gpufaas_simulator.nodes import Noise
        from gpufaas_simulator.noise import load_noise, service_noise

        if self.law is None and self.drift == 1.0:
            return None
        return Noise(
            service_noise(workload, self.law if self.of != "load" else None, seed, self.drift),
            load_noise(self.law, seed) if self.law is not None and self.of != "service" else None,
        )


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    policy: str
    working_set: int
    """0: the workload came as it was."""
    seed: int
    report: Report
    record: Record | None = None
    timeline: Timeline | None = None
    explanation: Explanation | None = None


def as_json(runs: Sequence[Run]) -> Any:
    """One run: its report. Several: all of them, and means with confidence intervals over the seeds of a setting."""
    from gpufaas_simulator.report import estimates

    def plain(run: Run) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(run.report)
        explained = {} if run.explanation is None else {"explanation": msgspec.to_builtins(run.explanation)}
        return {**found, "working_set": run.working_set or None, "seed": run.seed, **explained}

    if len(runs) == 1:
        return plain(runs[0])
    summary = [
        {
            "policy": policy,
            "working_set": working_set or None,
            "seeds": len(group),
            "figures": msgspec.to_builtins(estimates(run.report for run in group)),
        }
        for (policy, working_set), group in grouped(runs).items()
    ]
    return {"summary": summary, "runs": [plain(run) for run in runs]}


def grouped(runs: Sequence[Run]) -> dict[tuple[str, int], list[Run]]:
    """Return the runs by setting: within a group, only the seed differs."""
    found: dict[tuple[str, int], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.working_set):
        found.setdefault((run.policy, run.working_set), []).append(run)
    return found


_TIME: Final = "time"
"""As a format: seconds, with the digits that milliseconds need."""

_FIGURES: Final[Sequence[tuple[str, str, str]]] = (
    ("mean s", "mean", _TIME), ("p50", "p50", _TIME), ("p95", "p95", _TIME), ("p99", "p99", _TIME),
    ("variance", "variance", _TIME), ("wait s", "mean_wait_s", _TIME), ("worst wait", "worst_wait_s", _TIME),
    ("overtaken", "most_overtaken", ".0f"), ("misses", "miss_ratio", ".1%"), ("false", "false_miss_ratio", ".1%"),
    ("prefetches", "prefetches", ".0f"), ("evictions", "evictions", ".0f"), ("hottest on", "hottest_copies", ".2f"),
    ("busy", "busy_ratio", ".1%"), ("inference", "utilisation", ".1%"),
    ("in goal", "in_goal", ".1%"), ("goodput /s", "goodput", ".2f"), ("cost", "cost", ".2f"),
)  # fmt: skip
"""Heading, name of the figure, format."""

_WHERE_KNOWN: Final = ("in_goal", "goodput", "cost")
"""Shown only if a setting has them."""


def show(runs: Sequence[Run], title: str) -> None:
    from gpufaas_simulator.report import estimates

    groups = grouped(runs)
    several = len({working_set for _, working_set in groups}) > 1
    _table(
        {
            f"{policy}\n{working_set} functions" if several else policy: estimates(run.report for run in group)
            for (policy, working_set), group in groups.items()
        },
        [(f"{run.policy}, seed {run.seed}", run.report) for run in runs],
        title,
    )
    if len(runs) == 1:
        _show_tenants(runs[0].report)
        _show_functions(runs[0].report)
        _show_fleet(runs[0].report)


def show_reports(found: Mapping[str, Report], title: str) -> None:
    """Each report is a column."""
    from gpufaas_simulator.report import estimates

    _table({name: estimates([each]) for name, each in found.items()}, found.items(), title)
    _show_tenants(list(found.values())[-1])


def _table(columns: Mapping[str, Mapping[str, Estimate]], reports: Iterable[tuple[str, Report]], title: str) -> None:
    """Show figures as rows, since a column for each would be wider than a terminal, and what *reports* have lost."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    for heading, name, form in _FIGURES:
        if name not in _WHERE_KNOWN or any(name in column for column in columns.values()):
            table.add_row(heading, *(_cell(column.get(name), form) for column in columns.values()))
    output.console(width=None if sys.stdout.isatty() else 40 + 24 * len(columns)).print(table)
    for name, found in reports:
        if found.failed or found.rejected or found.unfinished:
            output.show(
                f"{name}: of {found.calls} calls {found.failed} were lost, {found.rejected} rejected, "
                f"{found.unfinished} never served"
            )


def _show_tenants(found: Report) -> None:
    if not found.tenants:
        return
    output.show()
    output.table(
        ("TENANT", "CALLS", "MEAN S", "P99 S", "MISSES", "WORST WAIT S"),
        [
            (name, str(each.calls), f"{each.latency.mean:.2f}", f"{each.latency.p99:.2f}",
             f"{each.miss_ratio:.1%}", f"{each.worst_wait_s:.1f}")
            for name, each in found.tenants.items()
        ],
    )  # fmt: skip


def _show_functions(found: Report) -> None:
    """Of those with a goal: how many calls were in it, and where the time of the others went."""
    rows = [
        (name, str(each.calls), f"{each.in_goal:.1%}", f"{each.goodput or 0.0:.2f}", *(f"{part:.3g}" for part in parts))
        for name, each in found.functions.items()
        if each.in_goal is not None and each.segments is not None
        for parts in [msgspec.structs.astuple(each.segments)]
    ]
    if rows:
        output.show()
        headings = ("FUNCTION", "CALLS", "IN GOAL", "GOODPUT /S", "QUEUE S", "HOLD S", "LOAD S", "RUN S", "SLOWED S")
        output.table(headings, rows)


def _show_fleet(found: Report) -> None:
    if found.fleet is None:
        return
    output.show()
    output.table(
        ("NODE", "KIND", "ORDERED", "JOINED", "LEFT", "COST"),
        [
            (each.node, each.kind, f"{each.asked_s:.1f}", "-" if each.joined_s is None else f"{each.joined_s:.1f}",
             "-" if each.left_s is None else f"{each.left_s:.1f}", f"{each.cost:.2f}")
            for each in found.fleet.nodes
        ],
    )  # fmt: skip


def _cell(value: Estimate | None, form: str) -> str:
    if value is None:
        return "-"
    shown = _formatted(value.mean, form)
    return f"{shown} ± {_formatted(value.half_width, form)}" if value.half_width else shown


def _formatted(value: float, form: str) -> str:
    return format(value, form if form != _TIME else ".2f" if value >= 1 or not value else ".3g")


# --- plots ------------------------------------------------------------------------------------------------------------


def check_plots() -> None:
    """Before anything is run."""
    with installed("simulate --plots"):
        import matplotlib  # noqa: F401


def draw(runs: Sequence[Run], folder: Path, form: str) -> list[Path]:
    """Draw what `Run.record` and `Run.timeline` hold; return the files. Distributions and timelines are of one seed."""
    from gpufaas_simulator import plots
    from gpufaas_simulator.report import answered, estimates

    groups = grouped(runs)
    bars = {setting: estimates(run.report for run in group) for setting, group in groups.items()}
    drawn = [(group[0], setting) for setting, group in groups.items()]
    spread = {setting: answered(run.record) for run, setting in drawn if run.record is not None}
    written = [
        plots.save(plots.latency_and_misses(bars), folder / f"latency.{form}"),
        plots.save(plots.latency_cdf(spread), folder / f"cdf.{form}"),
    ]
    for run, (policy, working_set) in drawn:
        if run.timeline is not None and run.record is not None:
            name = f"{policy}-{working_set}" if working_set else policy
            end_s = run.record.end_s
            figure = plots.residency(run.timeline.stays(end_s), end_s, f"{policy}: {run.report.workload}")
            written.append(plots.save(figure, folder / f"resident-{name}.{form}"))
    return written
