"""``gpufaas invoke``: the answer on stdout as it comes, everything about it on stderr."""

import hashlib
import hmac
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import click

from gpufaas import BrokeOff, Client, Stream, Timing
from gpufaas_cli import declare, flags, output
from gpufaas_core.units import Seconds

_ACCEPTED = 202
_CHUNK = 1 << 16
_WHOLE = 1 << 20  # up to here a piped body is sent with its length, as functions of old like it
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def _header_pairs(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for each in given:
        key, colon, value = each.partition(":")
        if not colon:
            key, colon, value = each.partition("=")
            if colon:
                output.note(f"WARNING! -H '{key}=...' is how it was written of old: write -H '{key}: ...'")
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", key.strip()):
            raise click.BadParameter(f"{each!r} is not 'NAME: VALUE'", param=parameter)
        if any(ord(char) < 32 and char != "\t" for char in value):
            raise click.BadParameter(f"the value of {key!r} has a line break or control character", param=parameter)
        found.append((key.strip(), value.strip()))
    return found


def _query_pairs(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for each in given:
        key, equals, value = each.partition("=")
        if not equals:
            raise click.BadParameter(f"{each!r} is not KEY=VALUE", param=parameter)
        found.append((key, value))
    return found


@declare.command("invoke")
@click.argument("name", metavar="NAME[/PATH]")
@click.option("-d", "--data", metavar="TEXT", help="Body, instead of stdin.")
@click.option("-m", "--method", type=click.Choice(_METHODS, case_sensitive=False), default="POST", show_default=True)
@click.option("--content-type", default="text/plain", show_default=True, metavar="TYPE")
@click.option("-H", "--header", "headers", multiple=True, callback=_header_pairs, metavar="'K: V'", help="Repeatable.")
@click.option("--query", multiple=True, callback=_query_pairs, metavar="K=V", help="Repeatable.")
@click.option("--timing", is_flag=True, help="Say on stderr where the time went, hit or miss, and which device.")
@click.option("-a", "--async", "asynchronous", is_flag=True, help="Have it called later; say by which id to ask.")
@click.option("--sign", metavar="HEADER", help="Sign the body with --key, by HMAC-SHA256, in this header.")
@click.option("--key", metavar="KEY", help="The key for --sign.")
@click.option("--auth", "says_who", is_flag=True, help="Send the login or token to the function too.")
@flags.namespace
@flags.client
def command(
    name: str, data: str | None, method: str, content_type: str, headers: list[tuple[str, str]],
    query: list[tuple[str, str]], timing: bool, asynchronous: bool, sign: str | None, key: str | None, says_who: bool,
    namespace: str | None, client: Client,
) -> None:  # fmt: skip
    """
    Call a function and write its answer to stdout as it comes. The body is stdin, unless that is a terminal.

    An answer of status 300 or more is written too; then the status goes to stderr, and the exit code is 1.

    Examples:
      echo -n hi | gpufaas invoke hello --timing
      gpufaas invoke digits --content-type image/png < three.png
      gpufaas invoke embed -d '{"text": "a sentence"}' --content-type application/json
      gpufaas invoke hello/some/path -m GET --query a=1 -H "X-Foo: bar"
      gpufaas invoke report --async -H "X-Callback-Url: http://gateway:8080/function/done" < year.csv
      gpufaas invoke hook --sign X-Hub-Signature-256 --key "$SECRET" < event.json
    """
    if (sign is None) != (key is None) or sign == "" or key == "":
        raise click.UsageError("--sign HEADER and --key KEY go together")
    content, size = (data.encode(), None) if data is not None else _stdin()
    if content is not None and not any(key.lower() == "content-type" for key, _ in headers):
        headers.append(("Content-Type", content_type))
    if size is not None:
        headers.append(("Content-Length", str(size)))
    if sign and key:
        content = _whole(content)
        headers.append((sign, f"sha256={hmac.new(key.encode(), content, hashlib.sha256).hexdigest()}"))
    if says_who and client.authorization:
        headers.append(("Authorization", client.authorization))
    began = time.perf_counter()
    broke_off = False
    with client.stream(
        name, content, namespace=namespace, method=method.upper(), query=query, headers=headers, later=asynchronous,
        check=False,
    ) as answer:  # fmt: skip
        try:
            first_s = _write(answer, began)
        except BrokeOff:
            broke_off, first_s = True, time.perf_counter() - began
    total_s = time.perf_counter() - began
    if asynchronous and answer.status == _ACCEPTED:
        output.note("Function submitted asynchronously.")
        if call_id := answer.headers.get("X-Call-Id"):
            output.note(f"Call id: {call_id}")
        return
    if timing:
        output.note(describe_timing(answer.headers, total_s, first_s))
    logs = f"gpufaas logs {name.partition('/')[0]}" + (f" -n {namespace}" if namespace else "")
    if broke_off:
        call = f", call {answer.headers['X-Call-Id']}" if "X-Call-Id" in answer.headers else ""
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


def describe_timing(headers: Mapping[str, str], total_s: Seconds, first_s: Seconds) -> str:
    """
    Return a line for people, such as ``miss on local/cpu:0: 1.96 s = queue 0.1 ms + load 1.90 s + run 58 ms + rest
    1.2 ms``. The rest is the network, and what gateway and node need for themselves.

    :param total_s: from sending the request to the end of the answer
    :param first_s: ... to the first byte of its body
    """
    timing = Timing.of(headers)
    start, device, phases = timing.start, timing.device, list(timing.phases.items())
    # True of functions with and without a model, and of a hit on a worker that is still loading.
    what = {"hit": "hit (its worker was there)", "miss": "miss (its worker was started)"}.get(start or "", start or "")
    where = " on ".join(filter(None, (what, device)))
    if not where:
        own = headers.get("X-OpenFaaS-Internal")
        where = "answered by the platform, not by the function" if own else "no word from the platform about its start"
    if not phases:
        return f"{where}: {output.format_seconds(total_s)}"
    known = sum(seconds for _, seconds in phases)
    # An answer that streams goes on after its phases were told; that time is the function's, not overhead.
    phases.append(("rest", max(0.0, first_s - known)))
    if total_s - first_s >= 0.001:
        phases.append(("answer", total_s - first_s))
    told = " + ".join(_told(name, seconds, timing.parts.get(name, {})) for name, seconds in phases)
    return f"{where}: {output.format_seconds(total_s)} = {told}"


def _told(name: str, seconds: Seconds, parts: Mapping[str, Seconds]) -> str:
    # Parts under a tenth of a millisecond would only be read.
    shown = [f"{part} {output.format_seconds(took)}" for part, took in parts.items() if took >= 0.0001]
    return f"{name} {output.format_seconds(seconds)}" + (f" ({', '.join(shown)})" if shown else "")


def _stdin() -> tuple[bytes | Iterator[bytes] | None, int | None]:
    """Return the body and, where it is an iterator of known length, its size; None when there is nobody to give one."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None, None
    stream = sys.stdin.buffer
    start = _read(stream, _WHOLE)
    if len(start) < _WHOLE:
        return start or None, None
    size = _size_of_file(stream)

    def rest() -> Iterator[bytes]:
        yield start
        while chunk := stream.read(_CHUNK):
            yield chunk

    return rest(), size


def _whole(content: bytes | Iterator[bytes] | None) -> bytes:
    """All of a body: its signature is sent before it."""
    return content if isinstance(content, bytes) else b"".join(content or ())


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read *size* bytes, or to the end."""
    parts = bytearray()
    while len(parts) < size and (chunk := stream.read(size - len(parts))):
        parts += chunk
    return bytes(parts)


def _size_of_file(stream: BinaryIO) -> int | None:
    """The whole size of a regular file, whose beginning has been read."""
    try:
        status = os.fstat(stream.fileno())
        return status.st_size - (stream.tell() - _WHOLE) if stat.S_ISREG(status.st_mode) else None
    except (OSError, ValueError):
        return None


def _write(answer: Stream, began: Seconds) -> Seconds:
    """Write the body as it comes; return when its first byte came."""
    first_s: Seconds | None = None
    out = sys.stdout.buffer
    for part in answer:
        if first_s is None:
            first_s = time.perf_counter() - began
        out.write(part)
        out.flush()
    if answer.status >= 300 and sys.stdout.isatty():
        click.echo()
    return first_s if first_s is not None else time.perf_counter() - began
