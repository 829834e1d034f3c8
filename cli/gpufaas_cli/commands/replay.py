"""``gpufaas replay``: sends a workload to a running platform, and reports what ``simulate`` reports."""

from pathlib import Path

import click

from gpufaas import GatewayUnreachable
from gpufaas_cli import declare, flags, output, simulations

_LATE_S = 0.05
"""From here on the load was another one than was asked for, and it is said."""


@declare.command("replay")
@simulations.workload
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of what is drawn.")
@click.option(
    "--function", "names", multiple=True, metavar="NAME",
    help="Deployed function, for the next one of the workload; may be repeated. [default: as the workload has them]",
)  # fmt: skip
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, metavar="FACTOR",
    help="The same calls, so many times as fast after each other.",
)  # fmt: skip
@click.option("-d", "--data", default="", metavar="TEXT", help="Body of every call.")
@click.option("--content-type", default="application/json", show_default=True, metavar="TYPE")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True, metavar="S",
              help="For one answer.")  # fmt: skip
@click.option(
    "--plots", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Draw the distribution of latency."
)
@click.option("--plot-format", type=click.Choice(("svg", "png")), default="svg", show_default=True, help="Of --plots.")
@declare.as_json
@flags.gateway
@flags.yaml_file
def command(
    seed: int, names: tuple[str, ...], rate: float, data: str, content_type: str, timeout: float, plots: Path | None,
    plot_format: str, as_json: bool, gateway: str | None, yaml_file: Path | None, **source: object,
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
    chosen = simulations.Source.of(source)
    settings = chosen.settings()
    if len(settings) > 1:
        raise click.UsageError("one working set at a time: the platform is one")
    workload = at_rate(named(chosen.workload(settings[0], seed), names), rate)
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
