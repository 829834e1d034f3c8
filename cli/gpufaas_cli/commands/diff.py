"""``gpufaas diff``: what the next deploy would change."""

from collections.abc import Mapping
from typing import Any, Final

import click

from gpufaas import DEFAULT_NAMESPACE
from gpufaas_cli import declare, flags, output
from gpufaas_cli.pipeline import BUNDLE_ANNOTATION, Overrides, deployment, image_of

_FIELDS: Final = ("image", "envProcess", "readOnlyRootFilesystem")
_MAPS: Final = ("envVars", "labels", "annotations", "limits", "requests")
_LISTS: Final = ("constraints", "secrets")
_ADDED: Final = {"labels": {"faas_function", "uid", "app"}, "annotations": {BUNDLE_ANNOTATION}}
"""Keys that gateways and builds add to what the stack file says."""


@declare.command("diff")
@flags.stack
@click.option("--env", "compared", type=click.Choice(["local", "remote", "all"]), default="local", show_default=True,
              help="Environment variables to compare: those of the stack file, those that are deployed, or "
              "both.")  # fmt: skip
@flags.tag
@flags.namespace
@flags.gateway
@declare.as_json
def command(
    selection: flags.Selection, compared: str, tag: str, namespace: str | None, gateway: str | None, as_json: bool
) -> None:
    """
    Compare the stack file with what is deployed. It ends with 1 when they differ.

    Code is compared by the image's tag only: 'gpufaas up' finds what has changed there.

    Examples:
      gpufaas diff
      gpufaas diff digits --env all
      gpufaas diff --json || gpufaas up
    """
    found: dict[str, list[tuple[str, str, str]]] = {}
    with selection.opened(gateway) as (stack, functions, client):
        spaces = dict.fromkeys(namespace or each.namespace for each in functions)
        deployed = {space: {each.get("name"): each for each in client.functions(space)} for space in spaces}
    for each in functions:
        body = deployment(each, Overrides(namespace=namespace), None, image_of(stack, each, tag))
        there = deployed[namespace or each.namespace].get(each.name)
        differences = [("function", each.name, "")] if there is None else _differences(body, there, compared)
        if differences:
            found[each.name] = differences
    if as_json:
        keys = ("field", "stack", "deployed")
        output.show_json({name: [dict(zip(keys, each, strict=True)) for each in found[name]] for name in found})
    else:
        for name, differences in found.items():
            output.show(f"{name}:")
            rows = [(f"- {key}: {ours}" if ours else "", f"+ {key}: {theirs}" if theirs else "")
                    for key, ours, theirs in differences]  # fmt: skip
            output.table((stack.path.name, "deployed"), rows)
            output.show()
        output.show("Differences found" if found else "No differences found")
    if found:
        raise click.exceptions.Exit(1)


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], compared: str) -> list[tuple[str, str, str]]:
    """Return what differs: the field, and what each side has; empty where a side does not have it."""
    found = [(key, _text(ours.get(key)), _text(theirs.get(key))) for key in _FIELDS]
    for key in _MAPS:
        here, there = dict(ours.get(key) or {}), dict(theirs.get(key) or {})
        names = {*here, *there} - (_ADDED.get(key, set()) - here.keys())
        if key == "envVars" and compared != "all":
            names = set(here if compared == "local" else there)
        found += [(f"{key}.{name}", _text(here.get(name)), _text(there.get(name))) for name in sorted(names)]
    for key in _LISTS:
        here_list, there_list = list(ours.get(key) or []), list(theirs.get(key) or [])
        found += [(key, each, "") for each in here_list if each not in there_list]
        found += [(key, "", each) for each in there_list if each not in here_list]
    spaces = [str(each.get("namespace") or DEFAULT_NAMESPACE) for each in (ours, theirs)]
    found.append(("namespace", spaces[0], spaces[1]))
    return [each for each in found if each[1] != each[2]]


def _text(value: object) -> str:
    return "" if value is False else output.text(value)
