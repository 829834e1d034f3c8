"""``gpufaas async``: what became of calls that nobody waited for. No other OpenFaaS client can ask."""

from pathlib import Path
from typing import Any, Final

import click

from gpufaas_cli import flags, output
from gpufaas_cli.client import Refused
from gpufaas_core.errors import GpufaasError

_NOT_FOUND: Final = 404


@click.group(
    "async",
    epilog="""
\b
Examples:
  echo hi | gpufaas invoke hello --async
  gpufaas async status CALL_ID
  gpufaas async cancel CALL_ID
  gpufaas async dead
""",
)
def command() -> None:
    """Asynchronous calls: what became of one, taking one back, and those that were given up."""


@command.command(
    "status",
    epilog="""
\b
Examples:
  gpufaas async status dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
  gpufaas async status dcbf8adb-ea70-4fb0-8782-d5aacf82da9a --json
""",
)
@click.argument("call_id")
@flags.as_json
@flags.gateway
@flags.yaml_file
def status(call_id: str, as_json: bool, gateway: str | None, yaml_file: Path | None) -> None:
    """Show what became of a call, by the id that 'invoke --async' told."""
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        try:
            found = client.call(call_id)
        except Refused as exc:
            raise _unknown(exc, call_id) from exc
    _show(found, as_json)


@command.command(
    "dead",
    epilog="""
\b
Examples:
  gpufaas async dead
  gpufaas async dead --json | jq -r '.[].callId'
""",
)
@flags.as_json
@flags.gateway
@flags.yaml_file
def dead(as_json: bool, gateway: str | None, yaml_file: Path | None) -> None:
    """List the calls that were given up after their last attempt."""
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        found = client.dead_calls()
    if as_json:
        output.show_json(found)
    elif not found:
        output.show("No dead calls.")
    else:
        keys = list(dict.fromkeys(key for each in found for key, value in each.items() if _is_short(value)))
        rows = [[_text(each.get(key)) for key in keys] for each in found]
        output.table([_heading(key).upper() for key in keys], rows)


@command.command(
    "retry",
    epilog="""
\b
Examples:
  gpufaas async retry dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
  gpufaas async dead --json | jq -r '.[].callId' | xargs gpufaas async retry
""",
)
@click.argument("call_ids", nargs=-1, required=True, metavar="CALL_ID...")
@flags.gateway
@flags.yaml_file
def retry(call_ids: tuple[str, ...], gateway: str | None, yaml_file: Path | None) -> None:
    """Queue dead calls again."""
    failed = 0
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        for each in call_ids:
            try:
                client.retry_call(each)
            except Refused as exc:
                output.note(f"gpufaas: {each}: {_unknown(exc, each)}")
                failed += 1
            else:
                output.show(f"Queued again: {each}")
    if failed:
        raise click.exceptions.Exit(1)


@command.command(
    "cancel",
    epilog="""
\b
Examples:
  gpufaas async cancel dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
""",
)
@click.argument("call_ids", nargs=-1, required=True, metavar="CALL_ID...")
@flags.gateway
@flags.yaml_file
def cancel(call_ids: tuple[str, ...], gateway: str | None, yaml_file: Path | None) -> None:
    """Take calls back: one that waits is never executed, one that runs is aborted."""
    failed = 0
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        for each in call_ids:
            try:
                client.cancel_call(each)
            except Refused as exc:
                output.note(f"gpufaas: {each}: {_unknown(exc, each)}")
                failed += 1
            else:
                output.show(f"Cancelled: {each}")
    if failed:
        raise click.exceptions.Exit(1)


def _unknown(exc: Refused, call_id: str) -> GpufaasError:
    if exc.status != _NOT_FOUND:
        return exc
    return GpufaasError(f"the gateway knows no call {call_id}: it was never accepted, or is long done, or forgotten")


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.show_json(found)
        return
    output.aligned([(_heading(key), _text(value)) for key, value in found.items() if _is_short(value)])


def _is_short(value: object) -> bool:
    """Whether people read it in a line; the rest is in the JSON."""
    return value is not None and not isinstance(value, dict | list)


def _heading(key: str) -> str:
    """``callId`` and ``call_id`` as ``Call id``."""
    words = "".join(f" {char.lower()}" if char.isupper() else char for char in key).replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _text(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
