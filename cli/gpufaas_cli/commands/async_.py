"""``gpufaas async``: asynchronous calls. faas-cli has no such command."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from gpufaas import Client, GpufaasError, Refused, UnknownCall
from gpufaas_cli import declare, flags, output

_call_ids = click.argument("call_ids", nargs=-1, required=True, metavar="CALL_ID...")


@declare.group("async")
def command() -> None:
    """
    Asynchronous calls: show the state of one, cancel it, list and retry those that have failed for good.

    Examples:
      echo hi | gpufaas invoke hello --async
      gpufaas async status CALL_ID
      gpufaas async cancel CALL_ID
      gpufaas async dead
    """


def _show_call(found: Mapping[str, Any]) -> None:
    output.aligned([(_heading(key), output.text(value)) for key, value in found.items() if _is_short(value)])


@command.command("status")
@click.argument("call_id")
@declare.shows(_show_call)
@flags.client
def status(call_id: str, client: Client) -> Mapping[str, Any]:
    """
    Show the state of a call, by the id that 'invoke --async' shows.

    Examples:
      gpufaas async status dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
      gpufaas async status dcbf8adb-ea70-4fb0-8782-d5aacf82da9a --json
    """
    try:
        return client.call(call_id)
    except Refused as exc:
        raise _known(exc, call_id) from exc


def _show_calls(found: Sequence[Mapping[str, Any]]) -> None:
    if not found:
        output.show("No dead calls.")
        return
    keys = list(dict.fromkeys(key for each in found for key, value in each.items() if _is_short(value)))
    rows = [[output.text(each.get(key)) for key in keys] for each in found]
    output.table([_heading(key).upper() for key in keys], rows)


@command.command("dead")
@declare.shows(_show_calls)
@flags.client
def dead(client: Client) -> Sequence[Mapping[str, Any]]:
    """
    List the dead calls: those whose last attempt has failed.

    Examples:
      gpufaas async dead
      gpufaas async dead --json | jq -r '.[].callId'
    """
    return client.dead_calls()


@command.command("retry")
@_call_ids
@flags.client
def retry(call_ids: tuple[str, ...], client: Client) -> None:
    """
    Queue dead calls again.

    Examples:
      gpufaas async retry dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
      gpufaas async dead --json | jq -r '.[].callId' | xargs gpufaas async retry
    """
    _each(call_ids, client.retry_call, "Queued again")


@command.command("cancel")
@_call_ids
@flags.client
def cancel(call_ids: tuple[str, ...], client: Client) -> None:
    """
    Cancel calls: one that waits is never executed, one that runs is aborted.

    Examples:
      gpufaas async cancel dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
    """
    _each(call_ids, client.cancel_call, "Cancelled")


def _each(call_ids: tuple[str, ...], act: Callable[[str], None], done: str) -> None:
    failed = False
    for each in call_ids:
        try:
            act(each)
        except Refused as exc:
            output.note(f"gpufaas: {each}: {_known(exc, each)}")
            failed = True
        else:
            output.show(f"{done}: {each}")
    if failed:
        raise click.exceptions.Exit(1)


def _known(exc: Refused, call_id: str) -> GpufaasError:
    if not isinstance(exc, UnknownCall):
        return exc
    return GpufaasError(f"the gateway knows no call {call_id}: it was never accepted, or ended too long ago")


def _is_short(value: object) -> bool:
    """Whether a line shows it; the rest is in the JSON."""
    return value is not None and not isinstance(value, dict | list)


def _heading(key: str) -> str:
    """``callId`` and ``call_id`` as ``Call id``."""
    words = "".join(f" {char.lower()}" if char.isupper() else char for char in key).replace("_", " ").strip()
    return words[:1].upper() + words[1:]
