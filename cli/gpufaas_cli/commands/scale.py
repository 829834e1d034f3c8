"""``gpufaas scale``: so many copies of a function."""

import click

from gpufaas import Client
from gpufaas_cli import declare, flags, output


@declare.command("scale")
@click.argument("name")
@click.argument("copies", type=click.IntRange(0))
@flags.namespace
@flags.client
def command(name: str, copies: int, namespace: str | None, client: Client) -> None:
    """
    Set the number of copies of a function, within its bounds, until its next update. 0 ends those that are idle.

    Examples:
      gpufaas scale digits 2
    """
    client.scale(name, copies, namespace)
    output.show(f"Scaling: {name} to {copies}.")
