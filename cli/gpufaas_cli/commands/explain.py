"""``gpufaas explain``: what the scheduler weighed for one call, what it chose and why."""

import click

from gpufaas import Client
from gpufaas_cli import declare, explanations, flags, output


@declare.command("explain")
@click.argument("call_id")
@declare.as_json
@flags.client
def command(call_id: str, as_json: bool, client: Client) -> None:
    """
    Say why a call of a model function was started where and when it was, or why it still waits.

    CALL_ID is X-Call-Id of the answer, or what was sent under that name. The last calls are remembered.

    Examples:
      gpufaas explain dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
      gpufaas explain dcbf8adb-ea70-4fb0-8782-d5aacf82da9a --json
    """
    found = client.explain(call_id)
    if as_json:
        output.show_json(found)
    else:
        explanations.show(found, call_id)
