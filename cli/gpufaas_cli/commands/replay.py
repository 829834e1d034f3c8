"""``gpufaas replay``: sends a workload to a running platform, and reports what ``simulate`` reports."""

from pathlib import Path

import click

from gpufaas import GatewayUnreachable
from gpufaas_cli import declare, flags, output, simulations

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
def command(
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
