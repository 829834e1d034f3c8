"""``gpufaas async``: what became of calls that nobody waited for. No other OpenFaaS client can ask."""

from collections.abc import Callable

import click

from gpufaas import Client, GpufaasError, Refused, UnknownCall
from gpufaas_cli import declare, flags, output


@declare.group("async")
def command() -> None:
    """
    Asynchronous calls: what became of one, taking one back, and those that were given up.

    Examples:
      echo hi | gpufaas invoke hello --async
      gpufaas async status CALL_ID
      gpufaas async cancel CALL_ID
      gpufaas async dead
    """


@command.command("status")
@click.argument("call_id")
@flags.as_json
@flags.client
def status(call_id: str, as_json: bool, client: Client) -> None:
    """
    Show what became of a call, by the id that 'invoke --async' told.

    Examples:
      gpufaas async status dcbf8adb-ea70-4fb0-8782-d5aacf82da9a
      gpufaas async status dcbf8adb-ea70-4fb0-8782-d5aacf82da9a --json
    """
    try:
        found = client.call(call_id)
    except Refused as exc:
        raise _known(exc, call_id) from exc
    if as_json:
        output.show_json(found)
    else:
        output.aligned([(_heading(key), _text(value)) for key, value in found.items() if _is_short(value)])


@command.command("dead")
@flags.as_json
@flags.client
def dead(as_json: bool, client: Client) -> None:
    """
    List the calls that were given up after their last attempt.

    Examples:
      gpufaas async dead
      gpufaas async dead --json | jq -r '.[].callId'
    """
    found = client.dead_calls()
    if as_json:
        output.show_json(found)
    elif not found:
        output.show("No dead calls.")
    else:
        keys = list(dict.fromkeys(key for each in found for key, value in each.items() if _is_short(value)))
        rows = [[_text(each.get(key)) for key in keys] for each in found]
        output.table([_heading(key).upper() for key in keys], rows)


@command.command("retry")
@click.argument("call_ids", nargs=-1, required=True, metavar="CALL_ID...")
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
@click.argument("call_ids", nargs=-1, required=True, metavar="CALL_ID...")
@flags.client
def cancel(call_ids: tuple[str, ...], client: Client) -> None:
    """
    Take calls back: one that waits is never executed, one that runs is aborted.

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
    return GpufaasError(f"the gateway knows no call {call_id}: it was never accepted, or is long done, or forgotten")


def _is_short(value: object) -> bool:
    """Whether people read it in a line; the rest is in the JSON."""
    return value is not None and not isinstance(value, dict | list)


def _heading(key: str) -> str:
    """``callId`` and ``call_id`` as ``Call id``."""
    words = "".join(f" {char.lower()}" if char.isupper() else char for char in key).replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _text(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
