"""``gpufaas list``, in faas-cli's layout."""

from datetime import UTC, datetime
from typing import Final

import click

from gpufaas import Client, Function
from gpufaas_cli import declare, flags, output

_SORTS = {
    "name": lambda each: (each.get("name", ""),),
    "invocations": lambda each: (-int(each.get("invocationCount") or 0), each.get("name", "")),
    "creation": lambda each: (each.get("createdAt") or "", each.get("name", "")),
}
_REASON_CHARS: Final = 160
"""``gpufaas describe`` shows all of a reason."""


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
        return
    if quiet:
        for each in functions:
            output.show(each["name"])
        return
    width = max([40, *(len(each.get("image", "")) for each in functions)])
    form = f"{{0:<30}}\t{{1:<{width}}}\t{{2:<15}}\t{{3:<5}}\t{{4}}" if verbose else "{0:<30}\t{2:<15}\t{3:<5}"
    states = [_state(each) for each in functions]
    head = form.format("Function", "Image", "Invocations", "Replicas", "CreatedAt")
    output.show(f"{head}\tState" if any(states) else head)
    for each, state in zip(functions, states, strict=True):
        counts = int(each.get("invocationCount") or 0), int(each.get("replicas") or 0)
        line = form.format(each["name"], each.get("image", ""), *counts, _time(each.get("createdAt")))
        output.show(f"{line}\t{state}" if state else line)


def _state(function: Function) -> str:
    """Return the state in one line; empty: the gateway does not say, as OpenFaaS's does not."""
    ours = function.get("gpufaas") or {}
    state, wanted = str(ours.get("state") or ""), int(function.get("replicas") or 0)
    if state in ("failed", "unavailable"):
        since = f" since {_time(ours['since'])}" if ours.get("since") else ""
        reason = " ".join(str(ours.get("reason") or "").split())
        return f"{state}{since}: {reason[:_REASON_CHARS]}{'…' if len(reason) > _REASON_CHARS else ''}"
    if state == "resident":
        state = f"resident on {', '.join(ours.get('devices') or [])}"
    state += output.format_age(ours.get("age"))
    if not state or wanted <= 1:
        return state
    lacks = f": {' '.join(str(ours['lacks']).split())[:_REASON_CHARS]}" if ours.get("lacks") else ""
    return f"{state} ({ours.get('ready') or 0} of {wanted} copies{lacks})"


def _time(text: object) -> str:
    """Return the time to the second, in UTC."""
    try:
        return f"{datetime.fromisoformat(str(text)).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if text else ""
    except ValueError:
        return str(text)
