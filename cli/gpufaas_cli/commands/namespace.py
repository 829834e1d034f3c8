"""``gpufaas namespace``: groups of functions. ``gpufaas namespaces`` is its ``list``."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, cast

import click

from gpufaas import Client, Quota
from gpufaas_cli import declare, flags, output
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import format_bytes, parse_bytes

_NONE: Final = "none"

_CONFLICT: Final = 409

_described = declare.options(
    click.argument("name"),
    declare.repeated("-l", "--label", "labels", says="Label"),
    declare.repeated("--annotation", "annotations", says="Annotation"),
)


def _of_known(name: str) -> AbstractContextManager[None]:
    return flags.refused_as({404: f"there is no namespace {name}: 'gpufaas namespace list' shows which there are"})


@declare.group("namespace")
def command() -> None:
    """
    Namespaces: groups of functions, openfaas-fn unless another one is named.

    Examples:
      gpufaas namespace create dev
      gpufaas namespace list
      gpufaas namespace quota dev --functions 10 --memory 8Gi
    """


@command.command("create")
@_described
@flags.client
def create(name: str, labels: dict[str, str], annotations: dict[str, str], client: Client) -> None:
    """
    Create a namespace.

    Examples:
      gpufaas namespace create dev
      gpufaas namespace create dev -l team=a --annotation owner=me
    """
    exists = f"there is a namespace {name} already: 'gpufaas namespace update' changes its labels and annotations"
    with flags.refused_as({_CONFLICT: exists}):
        client.put_namespace(name, labels, annotations)
    output.show(f"Namespace: {name} created")


@command.command("update")
@_described
@flags.client
def update(name: str, labels: dict[str, str], annotations: dict[str, str], client: Client) -> None:
    """
    Replace the labels and annotations of a namespace: those that are not given are removed.

    Examples:
      gpufaas namespace update dev -l team=b
    """
    with _of_known(name):
        client.put_namespace(name, labels, annotations, update=True)
    output.show(f"Namespace: {name} updated")


def _show(found: Mapping[str, Any]) -> None:
    output.aligned([("Name", str(found.get("name")))])
    output.section("Labels", found.get("labels") or {})
    output.section("Annotations", found.get("annotations") or {})


@command.command("get")
@click.argument("name")
@declare.shows(_show)
@flags.client
def get(name: str, client: Client) -> Mapping[str, Any]:
    """
    Show a namespace with its labels and annotations.

    Examples:
      gpufaas namespace get dev
      gpufaas namespace get dev --json
    """
    with _of_known(name):
        return {"name": name, **client.namespace(name)}


@command.command("remove")
@click.argument("name")
@flags.client
def remove(name: str, client: Client) -> None:
    """
    Remove a namespace.

    Examples:
      gpufaas namespace remove dev
    """
    with _of_known(name):
        client.remove_namespace(name)
    output.show(f"Namespace: {name} removed")


@command.command("list")
@declare.shows(lambda found: output.show("\n - ".join(["Namespaces:", *found])))
@flags.client
def list_command(client: Client) -> list[str]:
    """
    List the namespaces.

    Examples:
      gpufaas namespace list
      gpufaas namespaces --json
    """
    return client.namespaces()


class _Limit(NamedTuple):
    option: str
    metavar: str
    field: str
    """The field of a `Quota`."""
    used: str
    """The field that says how much of it is used."""
    title: str
    help: str
    parse: Callable[[str], int]
    show: Callable[[int], str]


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidSpec(f"{text!r} is no whole number: write for example 10, or none for no limit")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except InvalidSpec as exc:
        raise InvalidSpec(f"{exc}; none is no limit") from None


_LIMITS: Final = (
    _Limit("--functions", "N", "maxFunctions", "functions", "functions", "Functions at most.", _number, str),
    _Limit("--memory", "SIZE", "maxMemory", "memory", "memory", "Memory that they reserve at most, as 8Gi.", _size,
           format_bytes),
    _Limit("--in-flight", "N", "maxInFlight", "inFlight", "calls in flight",
           "Calls at one time at most, those that wait included; each gateway counts its own.", _number, str),
    _Limit("--waiting", "N", "maxWaiting", "waiting", "calls waiting",
           "Calls that wait for a device at most; each gateway counts its own.", _number, str),
)  # fmt: skip


def _limit(each: _Limit) -> Any:
    read = declare.parsed(lambda text: _NONE if text == _NONE else each.parse(text))
    return click.option(each.option, each.field.lower(), callback=read, metavar=each.metavar, help=each.help)


def _show_quota(found: Mapping[str, Any]) -> None:
    used = found.get("used") or {}
    rows = []
    for each in _LIMITS:
        limit = found.get(each.field)
        has = each.show(used[each.used]) if each.used in used else "-"
        rows.append((each.title, has, _NONE if limit is None else each.show(limit)))
    output.table((str(found["namespace"]), "Used", "Limit"), rows)


@command.command("quota")
@click.argument("name")
@declare.options(*map(_limit, _LIMITS))
@click.option("--clear", is_flag=True, help="Remove all limits.")
@declare.shows(_show_quota)
@flags.client
def quota(name: str, clear: bool, client: Client, **limits: int | str | None) -> Mapping[str, Any]:
    """
    Show the quota of a namespace and what it uses, or set limits. Limits that are not given stay; none removes one.

    What is deployed or runs already stays when a limit is lowered.

    Examples:
      gpufaas namespace quota dev
      gpufaas namespace quota dev --functions 10 --memory 8Gi --in-flight 64 --waiting 200
      gpufaas namespace quota dev --memory none
      gpufaas namespace quota dev --clear
    """
    given = {each.field: value for each in _LIMITS if (value := limits[each.field.lower()]) is not None}
    if clear and given:
        raise click.UsageError("--clear removes all limits: give it alone, or the limits that are to hold")
    with _of_known(name):
        if clear:
            client.remove_quota(name)
        elif given:
            has = client.quota(name)
            wanted = {each.field: given.get(each.field, has.get(each.field)) for each in _LIMITS}
            client.put_quota(
                name, cast(Quota, {field: None if value == _NONE else value for field, value in wanted.items()})
            )
        return {"namespace": name, **client.quota(name)}
