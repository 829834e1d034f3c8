"""``gpufaas ready``: for scripts that begin where a deployment ends."""

import time

import click

from gpufaas import Client, GatewayUnreachable, Refused
from gpufaas_cli import declare, flags, output
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.units import Seconds, parse_duration


def _seconds(_: click.Context, __: click.Parameter, text: str) -> Seconds:
    try:
        return parse_duration(text)
    except InvalidSpec as exc:
        raise click.BadParameter(str(exc)) from exc


@declare.command("ready")
@click.argument("name", required=False)
@click.option("--attempts", type=click.IntRange(1), default=60, show_default=True, help="How often to look.")
@click.option("--interval", "interval_s", default="1s", callback=_seconds, metavar="DURATION", help="[default: 1s]")
@flags.namespace
@flags.client
def command(
    name: str | None, attempts: int, interval_s: Seconds, namespace: str | None, client: Client,
) -> None:  # fmt: skip
    """
    Wait until the gateway is ready, or a function of it. It ends with 1 when that does not come about.

    Examples:
      gpufaas ready
      gpufaas ready digits --attempts 120 --interval 500ms
      gpufaas serve & gpufaas ready && gpufaas up
    """
    what = f"Function {name}" if name else "Gateway"
    for attempt in range(attempts):
        output.show(f"[{attempt + 1}/{attempts}] Waiting for {f'function {name}' if name else 'gateway'}")
        if _function_is_ready(client, name, namespace) if name else client.is_ready():
            output.show(f"{what} is ready")
            return
        if attempt + 1 < attempts:
            time.sleep(interval_s)
    shown = client.shown
    hint = f"'gpufaas describe {name}' says why" if name else f"looked at {shown}/healthz"
    raise GpufaasError(
        f"{f'function {name}' if name else 'the gateway'} is not ready after {attempts} attempts: {hint}"
    )


def _function_is_ready(client: Client, name: str, namespace: str | None) -> bool:
    try:
        return int(client.function(name, namespace).get("availableReplicas") or 0) > 0
    except (Refused, GatewayUnreachable):
        return False
