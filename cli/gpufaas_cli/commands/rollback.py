"""``gpufaas rollback``: an earlier revision, deployed again."""

import click

from gpufaas import Client
from gpufaas_cli import declare, flags, following, output


@declare.command("rollback")
@click.argument("name")
@click.option("--to", metavar="REVISION", help="Of gpufaas history; else the last that has served before.")
@following.option
@flags.namespace
@flags.client
def command(name: str, to: str | None, wait: bool, namespace: str | None, client: Client) -> None:
    """
    Deploy an earlier revision of a function again, as a new revision. While one is pending, go back to the one that
    serves.

    Examples:
      gpufaas rollback digits
      gpufaas rollback digits --to 5b0a7b6c
    """
    found = client.rollback(name, to, namespace)
    note = following.follow(client, name, namespace, found["revision"]) if wait else ""
    output.show(f"Deployed: {name} as in revision {found['to']}. {note}".rstrip())
