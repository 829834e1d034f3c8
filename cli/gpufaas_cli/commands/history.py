"""``gpufaas history`` and ``rollback``: the revisions of a function."""

from datetime import UTC, datetime
from typing import Any

import click

from gpufaas import Client
from gpufaas_cli import declare, flags, following, output


def _show(found: list[dict[str, Any]]) -> None:
    rows = []
    for each in found:
        status = "gone" if each.get("gone") else each["status"]
        status += f": {' '.join(each['reason'].split())}" if each.get("reason") else ""
        when = f"{datetime.fromtimestamp(each['at'], UTC):%Y-%m-%d %H:%M:%S} UTC"
        what = each.get("digest", "")[:12] or each["spec"]["image"]
        rows.append((each["revision"], when, each.get("by", ""), what, status))
    output.table(("Revision", "Deployed", "By", "Bundle", "Status"), rows)


@declare.command("history")
@click.argument("name")
@flags.namespace
@declare.shows(_show)
@flags.client
def history(name: str, namespace: str | None, client: Client) -> list[dict[str, Any]]:
    """
    Show the last deployments of a function, newest first. Those that are gone cannot be rolled back to.

    Examples:
      gpufaas history digits
      gpufaas history digits --json
    """
    return [{"status": "serving", **each} for each in client.history(name, namespace)]


@declare.command("rollback")
@click.argument("name")
@click.option("--to", metavar="REVISION", help="Of gpufaas history; else the last that has served before.")
@following.option
@flags.namespace
@flags.client
def rollback(name: str, to: str | None, wait: bool, namespace: str | None, client: Client) -> None:
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
