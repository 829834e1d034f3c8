"""What policies make of a workload: ``gpufaas simulate``, ``replay`` on a platform, ``what-if`` of a recorded one."""

import itertools
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gpufaas import GatewayUnreachable
from gpufaas_cli import declare, flags, output, simulations
from gpufaas_cli.commands.explain import show as show_explanation
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import DeviceId
from gpufaas_core.units import parse_bytes
from gpufaas_scheduler.policies import DEFAULT_POLICY, POLICIES, PolicySpec, policy_spec

if TYPE_CHECKING:
    from gpufaas_scheduler.journal import Header
    from gpufaas_simulator.workload import SimulatedDevice, Workload


_STEPS = 1000
"""The steps of the progress bar for each run."""


@dataclass(frozen=True)
class _Wanted:
    """What a run leaves behind beside its report."""

    decisions: Path | None
    save_workload: Path | None
    explain: int | None
    plots: Path | None
    kept: Path | None

    def check(self, workloads: int, policies: int) -> None:
        """:raises click.UsageError: some of it is of one run and there are more, or a file's folder is not there"""
        for option, given, runs in (
            ("--decisions", self.decisions, workloads * policies),
            ("--save-workload", self.save_workload, workloads),
            ("--explain", self.explain, workloads * policies),
        ):
            if given is not None and runs > 1:
                raise click.UsageError(f"{option} is of one run: name one policy, one working set and one seed")
        more = {"--decisions": self.decisions, "--explain": self.explain, "--plots": self.plots}
        if self.kept is not None and (named := [option for option, given in more.items() if given is not None]):
            raise click.UsageError(f"--run keeps reports only: leave {named[0]} out")
        for path in (self.decisions, self.save_workload, self.kept):
            if path is not None and not path.absolute().parent.is_dir():
                raise click.UsageError(f"there is no directory {path.parent}: make it first")
        if self.plots is not None:
            simulations.check_plots()


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
    "deviation", simulations.Deviation.of_options,
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
    declare.option("--run", "kept", type=_FILE, metavar="FILE",
                   says="Keep there what is simulated so far: the same command goes on from it, after Ctrl-C or kill."),
)  # fmt: skip
@declare.as_json
def simulate(
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
      gpufaas simulate --trace azure.csv --minutes 1440 --as-recorded --seeds 5 --run azure.run
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
    from gpufaas_simulator.run_file import RunFile
    from gpufaas_simulator.timeline import Timeline

    explain, runs = wanted.explain, list[simulations.Run]()
    kept = None if wanted.kept is None else RunFile(wanted.kept)
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
                progress = _progress(tell, len(runs), f"{header.policy}, {workload.name}", len(workload))
                noise = deviation.noise(workload, seed)  # drawn anew for each policy: the same factors
                if kept is not None:
                    found = kept.simulate(workload, header, noise, progress)
                    runs.append(simulations.Run(str(header.policy), working_set, seed, found))
                    continue
                with ExitStack() as files:
                    log = DecisionLog(files.enter_context(whole_file(wanted.decisions))) if wanted.decisions else None
                    timeline = Timeline() if wanted.plots is not None and seed == seeds.start else None
                    record, found = simulate(
                        workload,
                        header,
                        noise=noise,
                        observers=[each for each in (log, timeline) if each is not None],
                        explain=explain,
                        progress=progress,
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


_LATE_S = 0.05
"""From here on the load was another one than was asked for, and it is said."""


@declare.command("replay")
@simulations.workload
@declare.option("--seed", type=click.IntRange(0), default=0, says="Seed of all that is drawn.")
@declare.option("--function", "names", multiple=True, metavar="NAME",
                says="Deployed function, for the next one of the workload; repeatable. [default: their own "
                "names]")  # fmt: skip
@declare.option("--rate", type=click.FloatRange(0, min_open=True), default=1.0, metavar="FACTOR",
                says="The same calls, so many times as fast after each other.")  # fmt: skip
@declare.option("-d", "--data", default="", metavar="TEXT", says="Body of every call.")
@click.option("--content-type", default="application/json", show_default=True, metavar="TYPE")
@declare.option("--timeout", type=click.FloatRange(0, min_open=True), default=120.0, metavar="SECONDS",
                says="For one answer.")  # fmt: skip
@simulations.plotting
@declare.as_json
@flags.gateway
@flags.yaml_file
def replay(
    source: simulations.Source, seed: int, names: tuple[str, ...], rate: float, data: str, content_type: str,
    timeout: float, plots: Path | None, plot_format: str, as_json: bool, gateway: str | None, yaml_file: Path | None,
) -> None:  # fmt: skip
    """
    Send a workload to a running platform, each call at its time, and report latency, misses and fairness.

    The workload is what `simulate` takes; its devices and costs are not used. Calls are sent on time, whether or not
    earlier ones were answered, and their latency counts from when they were due.

    Examples:
      gpufaas replay --workload w.json -d '{"seed": 7}'
      gpufaas replay --trace azure.csv --working-set 4 --rpm 120 --function resnet18 --function resnet50 \\
          --function alexnet --function vgg11 -d '{"seed": 7}' --json
      gpufaas replay --workload w.json --rate 0.5 --plots figures
    """
    with simulations.installed("replay"):
        import asyncio

        import httpx

        from gpufaas_simulator.replay import Endpoint, at_rate, named, replay
    if plots is not None:
        simulations.check_plots()
    settings = source.settings()
    if len(settings) > 1:
        raise click.UsageError("one working set at a time: the platform is one")
    workload = at_rate(named(source.workload(settings[0], seed), names), rate)
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        deployed = {each["name"] for each in client.functions()}
        missing = [each.name for each in workload.functions if each.name.partition(".")[0] not in deployed]
        if missing:
            raise click.UsageError(
                f"function {missing[0]} is not deployed: name deployed ones with --function, 'gpufaas list' shows them"
            )
    endpoint = Endpoint(client.gateway, data.encode(), content_type, client.authorization, timeout_s=timeout)
    try:
        with output.progress_bar("replaying", max(1, len(workload))) as tell:
            done = asyncio.run(replay(workload, endpoint, lambda ended: tell(ended, f"replaying, {ended} answered")))
    except (httpx.HTTPError, ExceptionGroup) as exc:
        raise GatewayUnreachable(f"the replay was broken off, {client.shown} does not answer: {exc}") from exc
    run = simulations.Run(done.report.policy, settings[0], seed, done.report, done.record)
    if as_json:
        output.show_json({**simulations.as_json([run]), "late_s": done.late_s, "errors": done.errors})
    else:
        simulations.show([run], f"{client.shown}: {workload.name}")
        for what, count in sorted(done.errors.items()):
            output.show(f"{count} calls: {what}")
    if done.late_s > _LATE_S:
        output.note(f"some calls were sent up to {output.format_seconds(done.late_s)} late: this machine was too busy")
    if plots is not None:
        for path in simulations.draw([run], plots, plot_format):
            output.note(f"wrote {path}")


@declare.command("what-if")
@declare.option("--journal", required=True, type=click.Path(path_type=Path), metavar="FILE",
                says="Journal that gpufaas serve --journal wrote.")  # fmt: skip
@declare.option("--add-device", "added", multiple=True, metavar="[KIND=]SIZE",
                says="One more device, as 24GiB; of the most frequent kind unless one is named. "
                "Repeatable.")  # fmt: skip
@declare.option("--remove-device", "removed", multiple=True, metavar="ID", says="Without this device. Repeatable.")
@declare.option("--policy", callback=declare.parsed(policy_spec), metavar="SPEC",
                says="Instead of the recorded one, as in lalb-o3:o3_limit=10; gpufaas policies lists them."
                )  # fmt: skip
@declare.option("--rate", type=click.FloatRange(0, min_open=True), default=1.0, metavar="FACTOR",
                says="The same calls, so many times as fast after each other.")  # fmt: skip
@declare.as_json
def what_if(
    journal: Path,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    policy: PolicySpec | None,
    rate: float,
    as_json: bool,
) -> None:
    """
    Answer from a recorded journal what would have been otherwise.

    Shows the calls as they were recorded, the simulation of the same cluster beside it (how far it can be trusted), and
    the simulation with the changes. Each call takes what it took then, where all devices are of one kind; else, and for
    loads, it is the mean of what was measured.

    Examples:
      gpufaas serve --journal events.jsonl       record; each event of the scheduler is a line
      gpufaas what-if --journal events.jsonl --add-device 24GiB --add-device 24GiB
      gpufaas what-if --journal events.jsonl --remove-device local/cuda:1 --json
      gpufaas what-if --journal events.jsonl --policy lalb-o3:o3_limit=10 --rate 2
    """
    with simulations.installed("what-if"):
        from gpufaas_simulator.recorded import read_journal
        from gpufaas_simulator.report import report
        from gpufaas_simulator.run import simulate
        from gpufaas_simulator.workload import BadWorkload
    try:
        recorded = read_journal(journal)
    except InvalidSpec as exc:
        raise BadWorkload(str(exc)) from exc
    header = recorded.header if policy is None else msgspec.structs.replace(recorded.header, policy=policy)
    changed = _changed(recorded.workload, added, removed, rate)
    found = {"recorded": report(recorded.record, str(recorded.header.policy))}
    anything = changed is not recorded.workload or header != recorded.header
    calls = max(1, len(changed))
    with output.progress_bar("simulating", 2 * calls) as tell:
        found["simulated"] = simulate(
            recorded.workload, recorded.header, progress=lambda ended: tell(ended, "as recorded")
        )[1]
        if anything:
            found["what if"] = simulate(changed, header, progress=lambda ended: tell(calls + ended, "what if"))[1]
    if as_json:
        output.show_json({name.replace(" ", "_"): msgspec.to_builtins(each) for name, each in found.items()})
        return
    simulations.show_reports(found, f"{journal}: {len(recorded.workload)} calls")


def _changed(workload: "Workload", added: tuple[str, ...], removed: tuple[str, ...], rate: float) -> "Workload":
    from gpufaas_simulator.workload import DeviceJoins, DeviceLeaves, all_fit

    there = [each.id for each in workload.all_devices]
    for device in removed:
        if device not in there:
            raise click.UsageError(f"--remove-device: there is no device {device!r}: choose one of {', '.join(there)}")
    if not (added or removed or rate != 1.0):
        return workload
    new = [_device(text, number, workload) for number, text in enumerate(added)]
    one_kind = len({each.kind for each in (*workload.all_devices, *new)}) == 1
    changes = []
    for change in workload.changes:
        of = change.device.id if isinstance(change, DeviceJoins) else getattr(change, "device", None)
        if isinstance(change, DeviceJoins | DeviceLeaves) and of in removed:
            continue
        changes.append(msgspec.structs.replace(change, at_s=change.at_s / rate))
    return all_fit(
        replace(
            workload,
            devices=[*(each for each in workload.devices if each.id not in removed), *new],
            times=array("d", [time / rate for time in workload.times]),
            changes=changes,
            service_s=workload.service_s if one_kind else None,
        )
    )


def _device(text: str, number: int, workload: "Workload") -> "SimulatedDevice":
    from gpufaas_simulator.workload import SimulatedDevice

    kinds = Counter(each.kind for each in workload.all_devices)
    kind, _, size = text.rpartition("=")
    try:
        memory = parse_bytes(size)
    except InvalidSpec as exc:
        raise click.UsageError(f"--add-device {text}: {exc}") from exc
    kind = kind or kinds.most_common(1)[0][0]
    known = {name for function in workload.functions for name in function.costs}
    if kind not in known and "*" not in known:
        raise click.UsageError(
            f"--add-device {text}: nothing was measured on devices of kind {kind!r}: choose one of {', '.join(kinds)}"
        )
    return SimulatedDevice(DeviceId(f"added/{kind}:{number}"), memory, kind, f"added-{number}")
