"""``gpufaas namespace``: groups of functions. ``gpufaas namespaces`` is its ``list``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import click

from gpufaas import Client, Quota
from gpufaas_cli import declare, flags, output
from gpufaas_cli.publish import pairs
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import format_bytes, parse_bytes

_NONE: Final = "none"
_FIELDS: Final[Mapping[str, str]] = {
    "max_functions": "maxFunctions", "max_memory": "maxMemory", "max_in_flight": "maxInFlight",
    "max_waiting": "maxWaiting",
}  # fmt: skip
"""Of a quota: options, and what they are called on the wire."""


@declare.group("namespace")
def command() -> None:
    """
    Namespaces: groups of functions, openfaas-fn unless another one is named.

    Examples:
      gpufaas namespace create dev
      gpufaas namespace list
      gpufaas namespace quota dev --functions 10 --memory 8Gi
    """


def _described(function: Callable[..., Any]) -> Callable[..., Any]:
    function = flags.yaml_file(flags.gateway(function))
    function = click.option(
        "--annotation", "annotations", multiple=True, callback=pairs, metavar="K=V", help="Annotation; repeatable."
    )(function)
    function = click.option(
        "-l", "--label", "labels", multiple=True, callback=pairs, metavar="K=V", help="Label; repeatable."
    )(function)
    return click.argument("name")(function)


@command.command("create")
@_described
def create(
    name: str, labels: dict[str, str], annotations: dict[str, str], gateway: str | None, yaml_file: Path | None
) -> None:
    """
    Create a namespace.

    Examples:
      gpufaas namespace create dev
      gpufaas namespace create dev -l team=a --annotation owner=me
    """
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        client.put_namespace(name, labels, annotations)
    output.show(f"Namespace: {name} created")


@command.command("update")
@_described
def update(
    name: str, labels: dict[str, str], annotations: dict[str, str], gateway: str | None, yaml_file: Path | None
) -> None:
    """
    Give a namespace other labels and annotations: these, and no others.

    Examples:
      gpufaas namespace update dev -l team=b
    """
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        client.put_namespace(name, labels, annotations, update=True)
    output.show(f"Namespace: {name} updated")


@command.command("get")
@click.argument("name")
@flags.as_json
@flags.client
def get(name: str, as_json: bool, client: Client) -> None:
    """
    Show a namespace with its labels and annotations.

    Examples:
      gpufaas namespace get dev
      gpufaas namespace get dev --json
    """
    found: Mapping[str, Any] = client.namespace(name)
    if as_json:
        output.show_json(found)
        return
    output.aligned([("Name", str(found.get("name", name)))])
    for title, key in (("Labels", "labels"), ("Annotations", "annotations")):
        if entries := sorted((found.get(key) or {}).items()):
            output.show(f"\n{title}:")
            output.aligned(entries, indent=1)


@command.command("remove")
@click.argument("name")
@flags.client
def remove(name: str, client: Client) -> None:
    """
    Remove a namespace.

    Examples:
      gpufaas namespace remove dev
    """
    client.remove_namespace(name)
    output.show(f"Namespace: {name} removed")


@command.command("list")
@flags.as_json
@flags.client
def list_command(as_json: bool, client: Client) -> None:
    """
    List the namespaces.

    Examples:
      gpufaas namespace list
      gpufaas namespaces --json
    """
    found = client.namespaces()
    if as_json:
        output.show_json(found)
        return
    output.show("Namespaces:")
    for each in found:
        output.show(f" - {each}")


def _number(_: click.Context, param: click.Parameter, text: str | None) -> int | str | None:
    if text is None or text == _NONE:
        return text
    if not text.isascii() or not text.isdigit():
        raise click.BadParameter(
            f"{text!r} is no whole number: write for example 10, or none for no limit", param=param
        )
    return int(text)


def _size(_: click.Context, param: click.Parameter, text: str | None) -> int | str | None:
    if text is None or text == _NONE:
        return text
    try:
        return parse_bytes(text)
    except InvalidSpec as exc:
        raise click.BadParameter(f"{exc}; none is no limit", param=param) from None


@command.command("quota")
@click.argument("name")
@click.option("--functions", "max_functions", callback=_number, metavar="N", help="Functions at most.")
@click.option(
    "--memory", "max_memory", callback=_size, metavar="SIZE", help="Memory that they reserve at most, as 8Gi."
)
@click.option(
    "--in-flight", "max_in_flight", callback=_number, metavar="N",
    help="Calls at one time at most, those that wait included; each gateway counts its own.",
)  # fmt: skip
@click.option(
    "--waiting", "max_waiting", callback=_number, metavar="N",
    help="Calls that wait for a device at most; each gateway counts its own.",
)  # fmt: skip
@click.option("--clear", is_flag=True, help="Let it have no limits.")
@flags.as_json
@flags.client
def quota(name: str, clear: bool, as_json: bool, client: Client, **limits: int | str | None) -> None:
    """
    Show what a namespace may use and uses, or set it: limits that are not given stay, none takes one away.

    What is deployed or runs already stays when a limit is lowered.

    Examples:
      gpufaas namespace quota dev
      gpufaas namespace quota dev --functions 10 --memory 8Gi --in-flight 64 --waiting 200
      gpufaas namespace quota dev --memory none
      gpufaas namespace quota dev --clear
    """
    given = {
        field: None if limits[each] == _NONE else limits[each]
        for each, field in _FIELDS.items()
        if limits[each] is not None
    }
    if clear and given:
        raise click.UsageError("--clear takes all limits away: give it alone, or the limits that are to be")
    if clear:
        client.remove_quota(name)
    elif given:
        has = client.quota(name)
        client.put_quota(name, cast(Quota, {field: has.get(field) for field in _FIELDS.values()} | given))
    found: Mapping[str, Any] = client.quota(name)
    if as_json:
        output.show_json(found)
        return
    used = found.get("used") or {}
    rows = []
    for title, field, count, show in (
        ("functions", "maxFunctions", "functions", str),
        ("memory", "maxMemory", "memory", format_bytes),
        ("calls in flight", "maxInFlight", "inFlight", str),
        ("calls waiting", "maxWaiting", "waiting", str),
    ):
        limit = found.get(field)
        rows.append((title, show(used[count]) if count in used else "-", _NONE if limit is None else show(limit)))
    output.table((name, "Used", "Limit"), rows)
