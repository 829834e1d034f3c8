"""``gpufaas explain``: what the scheduler weighed for one call, what it chose and why."""

from pathlib import Path

import click

from gpufaas_cli import explanations, flags, output
from gpufaas_cli.client import Refused
from gpufaas_core.errors import GpufaasError

_NOT_FOUND = 404


@click.command(
    "explain",
    epilog="""
\b
Examples:
  gpufaas explain dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
  gpufaas explain dcbf8adb-ea70-4fb0-8782-d5aacf82da9a --json
""",
)
@click.argument("call_id")
@flags.as_json
@flags.gateway
@flags.yaml_file
def command(call_id: str, as_json: bool, gateway: str | None, yaml_file: Path | None) -> None:
    """
    Say why a call of a model function was started where and when it was, or why it still waits.

    CALL_ID is X-Call-Id of the answer, or what was sent under that name. The last calls are remembered.
    """
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        try:
            found = client.explain(call_id)
        except Refused as exc:
            if exc.status == _NOT_FOUND:
                raise GpufaasError(str(exc)) from exc
            raise
    if as_json:
        output.show_json(found)
    else:
        explanations.show(found, call_id)
