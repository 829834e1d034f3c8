"""``gpufaas ready``: for scripts that begin where a deployment ends."""

import time

import click

from gpufaas import Client, GatewayUnreachable, Refused
from gpufaas_cli import declare, flags, output
from gpufaas_core.errors import GpufaasError
from gpufaas_core.units import Seconds, parse_duration


@declare.command("ready")
@click.argument("name", required=False)
@click.option("--attempts", type=click.IntRange(1), default=60, show_default=True, help="How often to look.")
@click.option("--interval", "interval_s", default="1s", show_default=True, callback=declare.parsed(parse_duration),
              metavar="DURATION", help="Between two looks.")  # fmt: skip
@flags.namespace
@flags.client
def command(name: str | None, attempts: int, interval_s: Seconds, namespace: str | None, client: Client) -> None:
    """
    Wait until the gateway is ready, or a function of it. It ends with 1 after the last attempt.

    Examples:
      gpufaas ready
      gpufaas ready digits --attempts 120 --interval 500ms
      gpufaas serve & gpufaas ready && gpufaas up
    """
    what = f"function {name}" if name else "gateway"
    for attempt in range(attempts):
        if attempt:
            time.sleep(interval_s)
        output.show(f"[{attempt + 1}/{attempts}] Waiting for {what}")
        if _function_is_ready(client, name, namespace) if name else client.is_ready():
            output.show(f"{what[:1].upper()}{what[1:]} is ready")
            return
    hint = f"'gpufaas describe {name}' says why" if name else f"looked at {client.shown}/healthz"
    raise GpufaasError(f"{'' if name else 'the '}{what} is not ready after {attempts} attempts: {hint}")


def _function_is_ready(client: Client, name: str, namespace: str | None) -> bool:
    try:
        return int(client.function(name, namespace).get("availableReplicas") or 0) > 0
    except (Refused, GatewayUnreachable):
        return False
