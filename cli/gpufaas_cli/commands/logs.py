"""``gpufaas logs``: what a function printed."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from gpufaas import Client, GatewayUnreachable
from gpufaas_cli import declare, flags, output
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import parse_duration

_PLAIN: Final = {"name": "{}", "instance": "({})", "stream": "{}", "callId": "[{}]"}
"""How fields are shown in a line of text."""
_LAST: Final = 100
"""The most lines that are shown where the command does not say which."""


def _lines(text: str) -> int:
    if not re.fullmatch(r"-1|[1-9]\d{0,8}", text):
        raise InvalidSpec(f"{text!r} is no number of lines: write for example 20, or -1 for all")
    return int(text)


def _ago(text: str) -> datetime:
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(text))
    except OverflowError as exc:
        raise InvalidSpec(str(exc)) from exc


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InvalidSpec(f"{text!r} is not a time: write for example 2026-11-20T22:50:53Z") from exc
    return moment if moment.tzinfo else moment.astimezone()


def _fields(show_name: bool, show_instance: bool, show_stream: bool, show_call: bool) -> list[str]:
    shown = {"name": show_name, "instance": show_instance, "stream": show_stream, "callId": show_call}
    return [name for name, is_shown in shown.items() if is_shown]


@declare.command("logs")
@click.argument("name")
@click.option("--since", callback=declare.parsed(_ago), metavar="DURATION",
              help="Only lines that are younger, as in 30s, 5m or 1h30m.")  # fmt: skip
@click.option("--since-time", callback=declare.parsed(_moment), metavar="TIME",
              help="Only lines that are younger than this RFC 3339 time.")  # fmt: skip
@click.option("-t", "--tail", "--lines", "tail", callback=declare.parsed(_lines), metavar="N",
              help="Only the last N lines; -1: all. [default: 100; all of a time, a worker or a call]")  # fmt: skip
@click.option("--follow/--no-follow", help="Show new lines as they are printed, until Ctrl-C.")
@click.option("--from-instance", metavar="ID", help="Only this worker.")
@click.option("--call", metavar="ID", help="Only what this call wrote; its id is X-Call-Id of the answer.")
@declare.gathered(
    "fields",
    _fields,
    click.option("--name", "show_name", is_flag=True, help="Show the function of each line."),
    click.option("--instance", "--show-instance", "show_instance", is_flag=True, help="Show the worker of each line."),
    click.option("--show-call", is_flag=True, help="Show the call that wrote each line, if one did."),
    click.option("--show-stream", is_flag=True, help="Show whether each line came through stdout or stderr."),
)
@click.option("--time-format", metavar="FORMAT", help="Of times, as in strftime: %H:%M:%S. Empty: no times.")
@click.option("-o", "--output", "form", type=click.Choice(["plain", "keyvalue", "json"]), default="plain")
@declare.as_json
@flags.namespace
@flags.client
def command(
    name: str, since: datetime | None, since_time: datetime | None, tail: int | None, follow: bool,
    from_instance: str | None, call: str | None, fields: list[str], time_format: str | None, form: str, as_json: bool,
    namespace: str | None, client: Client,
) -> None:  # fmt: skip
    """
    Show what a function printed, and what went wrong when it was deployed or loaded.

    Examples:
      gpufaas logs digits
      gpufaas logs digits --follow --since 5m
      gpufaas logs digits --tail 20 --json
      gpufaas logs digits --tail -1 > digits.log
      gpufaas logs digits --instance --time-format %H:%M:%S
      gpufaas logs digits --call 0d9e7c54-5b0e-4d35-8c39-5f1d1a9f3c11
    """
    selects = call or since or since_time or from_instance
    last = tail or (-1 if selects else _LAST)
    count = 0
    with client.logs(
        name, namespace, follow=follow, tail=last, since=since or since_time, instance=from_instance, call_id=call
    ) as lines:
        for line in lines:
            if as_json or form == "json":
                click.echo(json.dumps(line, ensure_ascii=False))
            else:
                output.show(_shown(client, line, form, fields, time_format), colours=True)
            count += 1
    if tail is None and count == last:
        output.note(f"gpufaas: the last {count} lines; --tail -1 shows all that are kept")
    if not (count or selects or tail or as_json or form != "plain"):
        output.note(f"gpufaas: {name} has printed nothing yet")
    if call and not count:
        output.note(
            f"gpufaas: call {call} has left no lines in the log of {name}. Lines of loading a model, and of programs "
            f"that the function starts, belong to no call: 'gpufaas logs {name}' shows them"
        )


def _shown(client: Client, entry: Mapping[str, Any], form: str, fields: Sequence[str], time_format: str | None) -> str:
    """:param fields: which to show beside time and text"""
    try:
        time, text = entry["timestamp"], entry["text"].rstrip("\n")
        if time_format is not None:
            time = datetime.fromisoformat(time).strftime(time_format)
    except ValueError as exc:
        raise GatewayUnreachable(f"{client.shown} sends logs that are none: {exc}") from exc
    if form == "keyvalue":
        between = "".join(f' {each}="{entry.get(each, "")}"' for each in fields)
        return f'timestamp="{time}"{between} text="{text}"'
    more = [_PLAIN[each].format(entry[each]) for each in fields if entry.get(each)]
    return " ".join([*filter(None, [time, *more]), text])
