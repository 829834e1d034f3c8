"""``gpufaas cost``: what was paid for nodes that were ordered."""

import csv
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from gpufaas import Client
from gpufaas_cli import declare, flags, output
from gpufaas_core.units import Seconds, parse_duration

_FIELDS: Final = ("name", "node_s", "cost", "unpriced_s")


def _show(found: Sequence[Mapping[str, Any]]) -> None:
    total = {"name": "total", **{field: sum(each[field] for each in found) for field in _FIELDS[1:]}}
    rows = [(each["name"], f"{each['node_s'] / 3600:.3f}", f"{each['cost']:.4f}") for each in (*found, total)]
    output.table(("Name", "Node hours", "Cost"), rows)
    if total["unpriced_s"]:
        output.show(f"{total['unpriced_s'] / 3600:.3f} node hours are of offers without a price, and cost 0")


@declare.command("cost")
@declare.option("--since", default="24h", callback=declare.parsed(parse_duration), metavar="DURATION",
                says="How far to look back, as 24h or 90m.")  # fmt: skip
@declare.option("--by", type=click.Choice(("function", "namespace", "offer")), default="function",
                says="What to divide it among. Time in which nobody used a node is (idle).")  # fmt: skip
@declare.option("--csv", "as_csv", is_flag=True, says="Print CSV, in seconds.")
@declare.as_json
@flags.client
def command(since: Seconds, by: str, as_csv: bool, as_json: bool, client: Client) -> None:
    """
    Show what was paid for nodes that were ordered. Nodes that people start cost nothing here.

    Examples:
      gpufaas cost --since 24h
      gpufaas cost --since 7d --by offer --json
      gpufaas cost --by namespace --csv
    """
    found = client.cost(since, by)
    if as_csv:
        table = csv.DictWriter(sys.stdout, _FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows(found)
    else:
        (output.show_json if as_json else _show)(found)
