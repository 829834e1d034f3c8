"""``gpufaas list``, in faas-cli's layout."""

from datetime import UTC, datetime

import click

from gpufaas import Client, Function
from gpufaas_cli import declare, flags, output

_SORTS = {
    "name": lambda each: (each.get("name", ""),),
    "invocations": lambda each: (-int(each.get("invocationCount") or 0), each.get("name", "")),
    "creation": lambda each: (each.get("createdAt") or "", each.get("name", "")),
}

_REASON_CHARS = 160
"""All of it is in ``gpufaas describe``."""


@declare.command("list")
@click.option("-v", "--verbose", is_flag=True, help="Image and time of creation as well.")
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@click.option("--sort", type=click.Choice(list(_SORTS)), default="name", show_default=True)
@flags.namespace
@declare.as_json
@flags.client
def command(
    verbose: bool, quiet: bool, sort: str, namespace: str | None, as_json: bool, client: Client,
) -> None:  # fmt: skip
    """
    List the functions that are deployed.

    Examples:
      gpufaas list
      gpufaas list -v --sort invocations
      gpufaas ls -q | xargs -n1 gpufaas describe
      gpufaas list --json
    """
    functions = sorted(client.functions(namespace), key=_SORTS[sort])
    if as_json:
        output.show_json(functions)
    elif quiet:
        for each in functions:
            output.show(each["name"])
    else:
        _layout(functions, verbose)


def _layout(functions: list[Function], verbose: bool) -> None:
    image = max([40, *(len(each.get("image", "")) for each in functions)])

    def row(name: str, picture: str, invocations: object, replicas: object, created: str) -> str:
        if verbose:
            return f"{name:<30}\t{picture:<{image}}\t{invocations:<15}\t{replicas:<5}\t{created}"
        return f"{name:<30}\t{invocations:<15}\t{replicas:<5}"

    states = [_state(each) for each in functions]
    head = row("Function", "Image", "Invocations", "Replicas", "CreatedAt")
    output.show(f"{head}\t{'State'}" if any(states) else head)
    for each, state in zip(functions, states, strict=True):
        count, replicas = int(each.get("invocationCount") or 0), int(each.get("replicas") or 0)
        line = row(each["name"], each.get("image", ""), count, replicas, _time(each.get("createdAt")))
        output.show(f"{line}\t{state}" if state else line)


def _state(function: Function) -> str:
    """In one line; empty: the gateway does not say, as OpenFaaS's does not."""
    ours = function.get("gpufaas") or {}
    state, wanted, ready = str(ours.get("state") or ""), int(function.get("replicas") or 0), ours.get("ready") or 0
    if state in ("failed", "unavailable"):
        since = f" since {_time(ours['since'])}" if ours.get("since") else ""
        reason = " ".join(str(ours.get("reason") or "").split())
        return f"{state}{since}: {reason[:_REASON_CHARS]}{'…' if len(reason) > _REASON_CHARS else ''}"
    if state == "resident":
        state = f"resident on {', '.join(ours.get('devices') or [])}"
    return f"{state} ({ready} of {wanted} copies)" if state and wanted > 1 else state


def _time(text: object) -> str:
    """To the second, in UTC."""
    try:
        return f"{datetime.fromisoformat(str(text)).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if text else ""
    except ValueError:
        return str(text)
