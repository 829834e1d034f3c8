"""``gpufaas list``, in faas-cli's layout."""

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from gpufaas_cli import flags, output
from gpufaas_cli.go_time import STRING, format_time

_SORTS = {
    "name": lambda each: (each.get("name", ""),),
    "invocations": lambda each: (-int(each.get("invocationCount") or 0), each.get("name", "")),
    "creation": lambda each: (each.get("createdAt") or "", each.get("name", "")),
}


@click.command(
    "list",
    epilog="""
\b
Examples:
  gpufaas list
  gpufaas list -v --sort invocations
  gpufaas ls -q | xargs -n1 gpufaas describe
  gpufaas list --json
""",
)
@click.option("-v", "--verbose", is_flag=True, help="Image and time of creation as well.")
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@click.option("--sort", type=click.Choice(list(_SORTS)), default="name", show_default=True)
@flags.namespace
@flags.as_json
@flags.gateway
@flags.yaml_file
def command(
    verbose: bool, quiet: bool, sort: str, namespace: str | None, as_json: bool, gateway: str | None,
    yaml_file: Path | None,
) -> None:  # fmt: skip
    """List the functions that are deployed."""
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        functions = sorted(client.functions(namespace), key=_SORTS[sort])
    if as_json:
        output.show_json(functions)
    elif quiet:
        for each in functions:
            output.show(each["name"])
    else:
        _layout(functions, verbose)


def _layout(functions: list[dict[str, Any]], verbose: bool) -> None:
    image = max([40, *(len(each.get("image", "")) for each in functions)])

    def row(name: str, picture: str, invocations: object, replicas: object, created: str) -> str:
        if verbose:
            return f"{name:<30}\t{picture:<{image}}\t{invocations:<15}\t{replicas:<5}\t{created}"
        return f"{name:<30}\t{invocations:<15}\t{replicas:<5}"

    output.show(row("Function", "Image", "Invocations", "Replicas", "CreatedAt"))
    for each in functions:
        count, replicas = int(each.get("invocationCount") or 0), int(each.get("replicas") or 0)
        output.show(row(each["name"], each.get("image", ""), count, replicas, _time(each.get("createdAt"))))


def _time(text: object) -> str:
    """As faas-cli prints it."""
    try:
        return format_time(datetime.fromisoformat(str(text)), STRING) if text else ""
    except ValueError:
        return str(text)
