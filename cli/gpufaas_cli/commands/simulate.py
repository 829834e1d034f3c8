"""``gpufaas simulate``: reads its options, runs each policy over the same workloads, and shows what came of it."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gpufaas_cli import declare, output, simulations
from gpufaas_cli.commands.explain import show as show_explanation
from gpufaas_scheduler.policies import DEFAULT_POLICY, POLICIES, PolicySpec, policy_spec

if TYPE_CHECKING:
    from gpufaas_scheduler.journal import Header

_STEPS = 1000
"""The steps of the progress bar for each run."""


@dataclass(frozen=True)
class _Wanted:
    """What a run leaves behind beside its report."""

    decisions: Path | None
    save_workload: Path | None
    explain: int | None
    plots: Path | None

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
        if self.plots is not None:
            simulations.check_plots()


def _deviation(noise: float | None, noise_of: str, noise_law: str | None, drift: float) -> simulations.Deviation:
    with simulations.installed("simulate"):
        return simulations.Deviation.of_options(noise, noise_of, noise_law, drift)


def _specs(given: tuple[str, ...]) -> tuple[PolicySpec, ...]:
    return tuple(policy_spec(each) for each in given)


_FILE = click.Path(dir_okay=False, path_type=Path)
_ANY = click.FloatRange(0, max_open=True, max=float("inf"))


@declare.command("simulate")
@simulations.workload
@declare.option(
    "--policy", "policies", multiple=True, metavar="SPEC", callback=declare.parsed(_specs),
    says=f"{', '.join(POLICIES)}, or one that is installed; with options, as in lalb-o3:o3_limit=10 (gpufaas policies "
    f"lists them); repeatable. [default: {DEFAULT_POLICY}, as serve]",
)  # fmt: skip
@simulations.learn
@declare.option("--seed", type=click.IntRange(0), default=0, says="Seed of all that is drawn.")
@declare.option("--seeds", type=click.IntRange(1), default=1, metavar="N",
                says="Run with N seeds, and show means with 95 % confidence intervals.")  # fmt: skip
@declare.gathered(
    "deviation", _deviation,
    declare.option("--noise", type=_ANY, metavar="SPREAD",
                   says="How far true times are from their profiles, as 0.1: the coefficient of variation; of pareto, "
                   "the index."),
    declare.option("--noise-of", type=click.Choice(("service", "load", "both")), default="both",
                   says="Which times deviate."),
    declare.option("--noise-law", type=click.Choice(("lognormal", "pareto", "bimodal")),
                   says="How they are distributed, always with the profile as mean. [default: lognormal]"),
    declare.option("--drift", type=click.FloatRange(0, min_open=True, max_open=True, max=float("inf")), default=1.0,
                   metavar="FACTOR", says="Calls of the second half take so many times as long."),
)  # fmt: skip
@declare.gathered(
    "wanted", _Wanted,
    declare.option("--decisions", type=_FILE, metavar="FILE",
                   says="Write each start of service there, as JSON lines."),
    declare.option("--save-workload", type=_FILE, metavar="FILE", says="Write the workload there, for --workload."),
    simulations.plotting,
    declare.option("--explain", type=click.IntRange(0), metavar="CALL",
                   says="Show for this call, by its index among the arrivals, the options, the choice and its reason."),
)  # fmt: skip
@declare.as_json
def command(
    source: simulations.Source, policies: tuple[PolicySpec, ...], learn: bool, seed: int, seeds: int,
    deviation: simulations.Deviation, wanted: _Wanted, plot_format: str, as_json: bool,
) -> None:  # fmt: skip
    """
    Run a workload through the scheduler of `gpufaas serve`, in simulated time and on simulated devices.

    The workload is a file (--workload), a trace (--trace), or is drawn (--shape). The same engine and policies decide
    as in the service; times and sizes come from profiles.

    Examples:
      gpufaas simulate
      gpufaas simulate --policy lb --policy lalb --policy lalb-o3 --working-set 15 --working-set 35 --seeds 5
      gpufaas simulate --policy lalb-o3:o3_limit=0 --policy lalb-o3 --policy least-wait+replacement=cost-aware
      gpufaas simulate --trace azure.csv --minutes 6 --working-set 35 --rpm 325 --plots figures
      gpufaas simulate --workload w.json --policy lalb-o3 --decisions d.jsonl --json
    """
    with simulations.installed("simulate"):
        from gpufaas_simulator.run import engine_header

        headers = [engine_header(each, learn=learn) for each in policies or (PolicySpec(DEFAULT_POLICY),)]
    wanted.check(workloads=len(source.settings()) * seeds, policies=len(headers))
    runs = _run(source, headers, range(seed, seed + seeds), deviation, wanted)
    if as_json:
        output.show_json(simulations.as_json(runs))
    else:
        simulations.show(runs, source.title)
        if wanted.explain is not None:
            show_explanation(msgspec.to_builtins(runs[0].explanation), str(wanted.explain))
    if wanted.plots is not None:
        for path in simulations.draw(runs, wanted.plots, plot_format):
            output.note(f"wrote {path}")


def _run(
    source: simulations.Source, headers: "list[Header]", seeds: range, deviation: simulations.Deviation, wanted: _Wanted
) -> list[simulations.Run]:
    """Run each policy over each workload: a working set drawn with a seed."""
    from gpufaas_simulator.decisions import DecisionLog, whole_file
    from gpufaas_simulator.entries import workload_json
    from gpufaas_simulator.run import simulate
    from gpufaas_simulator.timeline import Timeline

    explain, runs = wanted.explain, list[simulations.Run]()
    settings = source.settings()
    total = len(settings) * len(seeds) * len(headers)
    with output.progress_bar("simulating", _STEPS * total) as tell:
        for working_set, seed in itertools.product(settings, seeds):
            workload = source.workload(working_set, seed)
            if explain is not None and explain >= len(workload):
                raise click.UsageError(f"--explain {explain}: the workload has calls 0 to {len(workload) - 1}")
            if wanted.save_workload is not None:
                with whole_file(wanted.save_workload) as file:
                    file.write(workload_json(workload))
            for header in headers:
                with ExitStack() as files:
                    log = DecisionLog(files.enter_context(whole_file(wanted.decisions))) if wanted.decisions else None
                    timeline = Timeline() if wanted.plots is not None and seed == seeds.start else None
                    record, found = simulate(
                        workload,
                        header,
                        noise=deviation.noise(workload, seed),  # drawn anew for each policy: the same factors
                        observers=[each for each in (log, timeline) if each is not None],
                        explain=explain,
                        progress=_progress(tell, len(runs), f"{header.policy}, {workload.name}", len(workload)),
                    )
                run = simulations.Run(str(header.policy), working_set, seed, found)
                if explain is not None:
                    run.explanation = record.explanation
                if wanted.plots is not None:
                    run.record, run.timeline = record, timeline
                runs.append(run)
    return runs


def _progress(tell: Callable[[int, str], object], run: int, what: str, calls: int) -> Callable[[int], object]:
    """Return what shows the progress of all runs, when one of them says how many of its calls have ended."""
    return lambda ended: tell(_STEPS * run + _STEPS * ended // max(1, calls), what)
