"""``gpufaas simulate``: reads its options, runs each policy over the same workloads, and shows what came of it."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gpufaas_cli import declare, explanations, output, simulations
from gpufaas_core.errors import InvalidSpec
from gpufaas_scheduler.policies import DEFAULT_POLICY, POLICIES

if TYPE_CHECKING:
    from gpufaas_scheduler.journal import Header

_STEPS = 1000
"""Of the progress bar, for each run."""


@declare.command("simulate")
@simulations.workload
@simulations.engine
@click.option(
    "--policy", "policies", multiple=True, metavar="NAME",
    help=f"{', '.join(POLICIES)}, or one that is installed; may be repeated. [default: {DEFAULT_POLICY}, as serve]",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of what is drawn.")
@click.option(
    "--seeds", type=click.IntRange(1), default=1, show_default=True, metavar="N",
    help="Run with N seeds, and show means with 95 % confidence intervals.",
)  # fmt: skip
@click.option(
    "--noise", type=click.FloatRange(0, max_open=True, max=float("inf")), metavar="SPREAD",
    help="How far true times are from their profiles, as 0.1: the coefficient of variation; of pareto, the index.",
)  # fmt: skip
@click.option(
    "--noise-of", type=click.Choice(("service", "load", "both")), default="both", show_default=True,
    help="Which times deviate.",
)  # fmt: skip
@click.option(
    "--noise-law", type=click.Choice(("lognormal", "pareto", "bimodal")),
    help="How they are distributed, always with the profile as mean. [default: lognormal]",
)  # fmt: skip
@click.option(
    "--drift", type=click.FloatRange(0, min_open=True, max_open=True, max=float("inf")), default=1.0, metavar="FACTOR",
    help="Calls of the second half take so many times as long.",
)  # fmt: skip
@click.option(
    "--decisions", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write each start of service there, as JSON lines.",
)  # fmt: skip
@click.option(
    "--save-workload", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the workload there, for --workload.",
)  # fmt: skip
@click.option(
    "--plots", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Draw latency and misses, the distribution of latency, and what was resident when.",
)  # fmt: skip
@click.option("--plot-format", type=click.Choice(("svg", "png")), default="svg", show_default=True, help="Of --plots.")
@click.option(
    "--explain", type=click.IntRange(0), metavar="CALL",
    help="Say of this call, by its index among the arrivals, what was weighed, what was chosen and why.",
)  # fmt: skip
@declare.as_json
def command(
    policies: tuple[str, ...], seed: int, seeds: int, noise: float | None, noise_of: str, noise_law: str | None,
    drift: float, decisions: Path | None, save_workload: Path | None, plots: Path | None, plot_format: str,
    explain: int | None, as_json: bool, o3_limit: int, wait_bound: float, replacement: str, learn: bool,
    **source: object,
) -> None:  # fmt: skip
    """
    Run a workload through the scheduler of `gpufaas serve`, in simulated time and on simulated devices.

    The workload is a file (--workload), a trace (--trace), or is drawn (--shape). The same engine and policies decide
    as in the service; times and sizes come from profiles.

    Examples:
      gpufaas simulate
      gpufaas simulate --policy lb --policy lalb --policy lalb-o3 --working-set 15 --working-set 35 --seeds 5
      gpufaas simulate --trace azure.csv --minutes 6 --working-set 35 --rpm 325 --plots figures
      gpufaas simulate --workload w.json --policy lalb-o3 --decisions d.jsonl --json
    """
    with simulations.installed("simulate"):
        from gpufaas_simulator.run import engine_header
    deviates = simulations.Deviation.of_options(noise, noise_of, noise_law, drift)
    try:
        headers = [
            engine_header(each, o3_limit, replacement, learn=learn, wait_bound_s=wait_bound)
            for each in policies or (DEFAULT_POLICY,)
        ]
        for header in headers:
            header.engine()
    except InvalidSpec as exc:
        raise click.UsageError(str(exc)) from exc
    chosen = simulations.Source.of(source)
    wanted = _Wanted(decisions, save_workload, explain, draws=plots is not None)
    wanted.check(workloads=len(chosen.settings()) * seeds, policies=len(headers))
    runs = _run(chosen, headers, range(seed, seed + seeds), deviates, wanted)
    if as_json:
        output.show_json(simulations.as_json(runs))
    else:
        simulations.show(runs, chosen.title)
        if explain is not None:
            explanations.show(msgspec.to_builtins(runs[0].explanation), str(explain))
    if plots is not None:
        for path in simulations.draw(runs, plots, plot_format):
            output.note(f"wrote {path}")


@dataclass(frozen=True)
class _Wanted:
    """What a run is to leave behind beside its report."""

    decisions: Path | None
    save_workload: Path | None
    explain: int | None
    draws: bool

    def check(self, workloads: int, policies: int) -> None:
        """:raises click.UsageError: some of it is of one run and there are more, or a file's folder is not there"""
        for option, given, runs in (
            ("--decisions", self.decisions, workloads * policies),
            ("--save-workload", self.save_workload, workloads),
            ("--explain", self.explain, workloads * policies),
        ):
            if given is not None and runs > 1:
                raise click.UsageError(f"{option} is of one run: name one policy, one working set and one seed")
        for path in (self.decisions, self.save_workload):
            if path is not None and not path.absolute().parent.is_dir():
                raise click.UsageError(f"there is no directory {path.parent}: make it first")
        if self.draws:
            simulations.check_plots()


def _run(
    chosen: simulations.Source, headers: "list[Header]", seeds: range, deviates: simulations.Deviation, wanted: _Wanted
) -> list[simulations.Run]:
    """Run each policy over each workload: a working set drawn with a seed."""
    from gpufaas_simulator.decisions import DecisionLog, whole_file
    from gpufaas_simulator.explicit import workload_json
    from gpufaas_simulator.run import simulate

    explain, runs = wanted.explain, list[simulations.Run]()
    settings = chosen.settings()
    total = len(settings) * len(seeds) * len(headers)
    with output.progress_bar("simulating", _STEPS * total) as tell:
        for working_set, seed in itertools.product(settings, seeds):
            workload = chosen.workload(working_set, seed)
            if explain is not None and explain >= len(workload):
                raise click.UsageError(f"--explain {explain}: the workload has calls 0 to {len(workload) - 1}")
            if wanted.save_workload is not None:
                with whole_file(wanted.save_workload) as file:
                    file.write(workload_json(workload))
            for header in headers:
                with ExitStack() as files:
                    log = DecisionLog(files.enter_context(whole_file(wanted.decisions))) if wanted.decisions else None
                    timeline = simulations.timeline() if wanted.draws and seed == seeds.start else None
                    record, found = simulate(
                        workload,
                        header,
                        noise=deviates.noise(workload, seed),  # drawn anew for each policy: the same factors
                        observer=simulations.both(log, timeline),
                        explain=explain,
                        progress=_progress(tell, len(runs), f"{header.policy}, {workload.name}", len(workload)),
                    )
                run = simulations.Run(header.policy, working_set, seed, found)
                if explain is not None:
                    run.explanation = record.explanation
                if wanted.draws:
                    run.record, run.timeline = record, timeline
                runs.append(run)
    return runs


def _progress(tell: Callable[[int, str], object], run: int, what: str, calls: int) -> Callable[[int], object]:
    """Say how far all runs are when one of them says how many of its calls have ended."""
    return lambda ended: tell(_STEPS * run + _STEPS * ended // max(1, calls), what)
