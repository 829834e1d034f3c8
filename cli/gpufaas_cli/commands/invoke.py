"""Calls: ``gpufaas invoke``, whose answer comes on stdout and all about it on stderr, and ``async``."""

import codecs
import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import click

from gpufaas import BrokeOff, Client, GpufaasError, Refused, Stream, Timing, UnknownCall
from gpufaas_cli import declare, flags, output
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import Seconds

_ACCEPTED = 202
_CHUNK = 1 << 16
_WHOLE = 1 << 20  # bytes; a piped body up to this size is sent with its length, which old functions need
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def _headers(given: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for each in given:
        key, sign, value = [*re.split("([:=])", each, maxsplit=1), "", ""][:3]
        if sign == "=":
            output.note(f"WARNING! -H '{key}=...' is the old form: write -H '{key}: ...'")
        if not sign or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", key.strip()):
            raise InvalidSpec(f"{each!r} is not 'NAME: VALUE'")
        if any(ord(char) < 32 and char != "\t" for char in value):
            raise InvalidSpec(f"the value of {key!r} has a line break or control character")
        found.append((key.strip(), value.strip()))
    return found


def _query(given: tuple[str, ...]) -> list[tuple[str, str]]:
    if wrong := next((each for each in given if "=" not in each), None):
        raise InvalidSpec(f"{wrong!r} is not KEY=VALUE")
    return [(key, value) for key, _, value in (each.partition("=") for each in given)]


@declare.command("invoke")
@click.argument("name", metavar="NAME[/PATH]")
@click.option("-d", "--data", metavar="TEXT", help="Body, instead of stdin.")
@click.option("-m", "--method", type=click.Choice(_METHODS, case_sensitive=False), default="POST", show_default=True)
@click.option("--content-type", default="text/plain", show_default=True, metavar="TYPE")
@declare.repeated("-H", "--header", "headers", says="Header", metavar="'K: V'", reads=_headers)
@declare.repeated("--query", says="Parameter of the URL", reads=_query)
@click.option("--timing", is_flag=True, help="Show on stderr hit or miss, the device, and the time of each phase.")
@click.option("-a", "--async", "asynchronous", is_flag=True, help="Have it called later; show the call's id.")
@click.option("--sign", metavar="HEADER", help="Sign the body with --key, by HMAC-SHA256, in this header.")
@click.option("--key", metavar="KEY", help="The key for --sign.")
@click.option("--auth", "sends_login", is_flag=True, help="Send the login or token to the function too.")
@declare.as_json
@flags.namespace
@flags.client
def invoke(
    name: str, data: str | None, method: str, content_type: str, headers: list[tuple[str, str]],
    query: list[tuple[str, str]], timing: bool, asynchronous: bool, sign: str | None, key: str | None,
    sends_login: bool, as_json: bool, namespace: str | None, client: Client,
) -> None:  # fmt: skip
    """
    Call a function and write its answer to stdout as it comes. The body is stdin, unless that is a terminal.

    With --json, the answer is in an object with its status, device and times, which are in seconds.

    An answer of status 300 or more is written too; then the status goes to stderr, and the exit code is 1.

    Examples:
      echo -n hi | gpufaas invoke hello --timing
      gpufaas invoke digits --content-type image/png < three.png
      gpufaas invoke embed -d '{"text": "a sentence"}' --content-type application/json
      gpufaas invoke hello/some/path -m GET --query a=1 -H "X-Foo: bar"
      gpufaas invoke report --async -H "X-Callback-Url: http://gateway:8080/function/done" < year.csv
      gpufaas invoke hook --sign X-Hub-Signature-256 --key "$SECRET" < event.json
    """
    if bool(sign) != bool(key) or sign == "" or key == "":
        raise click.UsageError("--sign HEADER and --key KEY go together")
    content, size = (data.encode(), None) if data is not None else _stdin()
    if content is not None and not any(key.lower() == "content-type" for key, _ in headers):
        headers.append(("Content-Type", content_type))
    if size is not None:
        headers.append(("Content-Length", str(size)))
    if sign and key:
        content = content if isinstance(content, bytes) else b"".join(content or ())  # the signature is sent before it
        headers.append((sign, f"sha256={hmac.new(key.encode(), content, hashlib.sha256).hexdigest()}"))
    if sends_login and client.authorization:
        headers.append(("Authorization", client.authorization))
    began = time.perf_counter()
    with client.stream(
        name, content, namespace=namespace, method=method.upper(), query=query, headers=headers, later=asynchronous,
        check=False,
    ) as answer:  # fmt: skip
        first_s = (_write_json if as_json else _write)(answer, began)
    total_s = time.perf_counter() - began
    if asynchronous and not as_json and answer.status == _ACCEPTED:
        output.note("Function submitted asynchronously.")
        if answer.call_id:
            output.note(f"Call id: {answer.call_id}")
        return
    if timing:
        output.note(describe_timing(answer.headers, total_s, total_s if first_s is None else first_s))
    logs = f"gpufaas logs {name.partition('/')[0]}" + (f" -n {namespace}" if namespace else "")
    if first_s is None:
        call = f", call {answer.call_id}" if answer.call_id else ""
        output.note(f"gpufaas: the answer of {name} broke off after it had begun{call}: {logs!r} says why")
        raise click.exceptions.Exit(1)
    if answer.status >= 300:
        hint = ""
        if answer.headers.get("X-OpenFaaS-Internal") and answer.status == 404:
            hint = ": 'gpufaas list' shows what is deployed"
        elif answer.headers.get("X-Gpufaas-Error") in ("load-failed", "worker-crashed"):
            hint = f": {logs!r} shows what it printed"
        output.note(f"gpufaas: {name} answered {answer.status} {answer.reason}".rstrip() + hint)
        raise click.exceptions.Exit(1)


_STARTS: Final = {
    "hit": "hit (its worker was there)",
    "parked": "parked (its worker was woken)",
    "host": "host (its worker was started; its weights were in the node's memory)",
    "peer": "peer (its worker was started; its weights came from another node)",
    "disk": "disk (its worker was started)",
    "store": "store (its worker was started; its weights came from the object store)",
}
"""In words, by X-Gpufaas-Start."""


def describe_timing(headers: Mapping[str, str], total_s: Seconds, first_s: Seconds) -> str:
    """
    Return a line for people, such as ``disk on local/cpu:0: 1.96 s = queue 0.1 ms + load 1.90 s + run 58 ms + rest
    1.2 ms``. The rest is the network, and the time that gateway and node need themselves.

    :param total_s: from sending the request to the end of the answer
    :param first_s: from sending the request to the first byte of the answer's body
    """
    timing = Timing.of(headers)
    # True of functions with and without a model, and of a hit on a worker that is still loading.
    what = _STARTS.get(timing.start or "", timing.start)
    where = " on ".join(filter(None, (what, timing.device)))
    if where and (share := headers.get("X-Gpufaas-Share")):
        where += f" (a share of {share} %)"
    if where and (batch := headers.get("X-Gpufaas-Batch")):
        where += f" in a batch of {batch} calls"
    if not where:
        own = headers.get("X-OpenFaaS-Internal")
        where = "answered by the platform, not by the function" if own else "no word from the platform about its start"
    phases = list(timing.phases.items())
    if not phases:
        return f"{where}: {output.format_seconds(total_s)}"
    # An answer that streams goes on after its phases were told; that time is the function's, not overhead.
    phases.append(("rest", max(0.0, first_s - sum(seconds for _, seconds in phases))))
    if total_s - first_s >= 0.001:
        phases.append(("answer", total_s - first_s))
    shown = " + ".join(_phase(name, seconds, timing.parts.get(name, {})) for name, seconds in phases)
    return f"{where}: {output.format_seconds(total_s)} = {shown}"


def _phase(name: str, seconds: Seconds, parts: Mapping[str, Seconds]) -> str:
    # Parts under a tenth of a millisecond tell nothing.
    shown = [f"{part} {output.format_seconds(took)}" for part, took in parts.items() if took >= 0.0001]
    return f"{name} {output.format_seconds(seconds)}" + (f" ({', '.join(shown)})" if shown else "")


def _stdin() -> tuple[bytes | Iterator[bytes] | None, int | None]:
    """Return the body and, where it is a large regular file, its size; None: stdin is a terminal, closed or empty."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None, None
    stream = sys.stdin.buffer
    start = bytearray()
    while len(start) < _WHOLE and (chunk := stream.read(_WHOLE - len(start))):
        start += chunk
    if len(start) < _WHOLE:
        return bytes(start) or None, None
    try:
        status = os.fstat(stream.fileno())
        size = status.st_size - (stream.tell() - _WHOLE) if stat.S_ISREG(status.st_mode) else None
    except (OSError, ValueError):
        size = None

    def whole() -> Iterator[bytes]:
        yield bytes(start)
        while chunk := stream.read(_CHUNK):
            yield chunk

    return whole(), size


def _write_json(answer: Stream, began: Seconds) -> Seconds | None:
    """As `_write`, with the body as JSON, if it is, else as text."""
    try:
        text = b"".join(answer).decode(errors="replace")
    except BrokeOff:
        return None
    found = {"status": answer.status, "call": answer.call_id, **dataclasses.asdict(answer.timing)}
    with contextlib.suppress(ValueError):
        text = json.loads(text)
    output.show_json({**found, "answer": text})
    return time.perf_counter() - began


def _write(answer: Stream, began: Seconds) -> Seconds | None:
    """Write the body as it comes; return when its first byte came, in seconds. None: it broke off."""
    first_s: Seconds | None = None
    out = sys.stdout.buffer
    text = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        for part in answer:
            if first_s is None:
                first_s = time.perf_counter() - began
            out.write(output.plain(text.decode(part), colours=True).encode() if sys.stdout.isatty() else part)
            out.flush()
    except BrokeOff:
        return None
    if answer.status >= 300 and sys.stdout.isatty():
        click.echo()
    return first_s if first_s is not None else time.perf_counter() - began


_call_ids = click.argument("call_ids", nargs=-1, required=True, metavar="CALL_ID...")


@declare.group("async")
def async_calls() -> None:
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


@async_calls.command("status")
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


@async_calls.command("dead")
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


@async_calls.command("retry")
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


@async_calls.command("cancel")
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
