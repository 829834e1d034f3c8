"""``gpufaas namespace``: groups of functions. ``gpufaas namespaces`` is its ``list``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from gpufaas_cli import flags, output
from gpufaas_cli.publish import pairs

_OURS: Final[Mapping[str, str]] = {"openfaas": "1"}
"""What makes a namespace one for functions, in OpenFaaS: every client sends it, so every gateway sees it."""


@click.group(
    "namespace",
    epilog="""
\b
Examples:
  gpufaas namespace create dev
  gpufaas namespace list
""",
)
def command() -> None:
    """Namespaces: groups of functions, openfaas-fn unless another one is named."""


def _described(function: Callable[..., Any]) -> Callable[..., Any]:
    function = flags.yaml_file(flags.gateway(function))
    function = click.option(
        "--annotation", "annotations", multiple=True, callback=pairs, metavar="K=V", help="Annotation; repeatable."
    )(function)
    function = click.option(
        "-l", "--label", "labels", multiple=True, callback=pairs, metavar="K=V", help="Label; repeatable."
    )(function)
    return click.argument("name")(function)


@command.command(
    "create",
    epilog="""
\b
Examples:
  gpufaas namespace create dev
  gpufaas namespace create dev -l team=a --annotation owner=me
""",
)
@_described
def create(
    name: str, labels: dict[str, str], annotations: dict[str, str], gateway: str | None, yaml_file: Path | None
) -> None:
    """Create a namespace."""
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        client.put_namespace(_whole(name, labels, annotations), update=False)
    output.show(f"Namespace: {name} created")


@command.command(
    "update",
    epilog="""
\b
Examples:
  gpufaas namespace update dev -l team=b
""",
)
@_described
def update(
    name: str, labels: dict[str, str], annotations: dict[str, str], gateway: str | None, yaml_file: Path | None
) -> None:
    """Give a namespace other labels and annotations: these, and no others."""
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        client.put_namespace(_whole(name, labels, annotations), update=True)
    output.show(f"Namespace: {name} updated")


@command.command(
    "get",
    epilog="""
\b
Examples:
  gpufaas namespace get dev
  gpufaas namespace get dev --json
""",
)
@click.argument("name")
@flags.as_json
@flags.gateway
@flags.yaml_file
def get(name: str, as_json: bool, gateway: str | None, yaml_file: Path | None) -> None:
    """Show a namespace with its labels and annotations."""
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        found = client.namespace(name)
    if as_json:
        output.show_json(found)
        return
    output.aligned([("Name", str(found.get("name", name)))])
    for title, key in (("Labels", "labels"), ("Annotations", "annotations")):
        if entries := sorted((found.get(key) or {}).items()):
            output.show(f"\n{title}:")
            output.aligned(entries, indent=1)


@command.command(
    "remove",
    epilog="""
\b
Examples:
  gpufaas namespace remove dev
""",
)
@click.argument("name")
@flags.gateway
@flags.yaml_file
def remove(name: str, gateway: str | None, yaml_file: Path | None) -> None:
    """Remove a namespace."""
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        client.remove_namespace(name)
    output.show(f"Namespace: {name} removed")


@command.command(
    "list",
    epilog="""
\b
Examples:
  gpufaas namespace list
  gpufaas namespaces --json
""",
)
@flags.as_json
@flags.gateway
@flags.yaml_file
def list_command(as_json: bool, gateway: str | None, yaml_file: Path | None) -> None:
    """List the namespaces."""
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        found = client.namespaces()
    if as_json:
        output.show_json(found)
        return
    output.show("Namespaces:")
    for each in found:
        output.show(f" - {each}")


def _whole(name: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> dict[str, object]:
    return {"name": name, "annotations": {**_OURS, **annotations}, "labels": {**_OURS, **labels}}
