"""``gpufaas profile``: what batches of a function take, measured on a device on purpose."""

import json
import mimetypes
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final

import click

from gpufaas import Client
from gpufaas_cli import declare, flags, output
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import format_bytes


class _Group(declare.Group):
    """``profile F`` is ``profile take F``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if known else ["take", *args])


@click.group("profile", cls=_Group, no_args_is_help=True)
def command() -> None:
    """
    Measure what batches of a function take, how much of a device they use, its load, and its memory.

    Calls that wait run between the batches. Solvers plan with what was measured; docs/placing.md says more.

    Examples:
      gpufaas profile digits
      gpufaas profile digits --batches 1,4,16 --device local/cuda:0 --input digit.json
      gpufaas profile show digits --json
    """


def _of(found: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """Return the profile for *kind*, else the one that was taken last, and what concerns it."""
    kind = kind or [*found["profiles"]][-1]
    if kind not in found["profiles"]:
        raise InvalidSpec(f"no profile was taken on {kind}, but on {', '.join(found['profiles'])}")
    stale = found.get("stale", {}).get(kind, "")
    return {"function": found["function"], "kind": kind, **found["profiles"][kind], "stale": stale}


def _show(found: dict[str, Any]) -> None:
    versions = "".join(f", {name} {found[name]}" for name in ("torch", "driver") if found.get(name))
    taken = f"{datetime.fromtimestamp(found['at'], UTC):%Y-%m-%d %H:%M:%S} UTC of revision {found['revision']}"
    output.aligned([
        ("Function", found["function"]), ("Kind", found["kind"]), ("Taken", taken + versions),
        ("Load", output.format_seconds(found["load_s"])), ("Memory", format_bytes(found["memory"])),
    ])  # fmt: skip
    if found["stale"]:
        output.show(f"Stale, and not planned with: {found['stale']}. Take it anew: gpufaas profile {found['function']}")
    rows = [
        (size, at_once, *(output.format_seconds(each[name]) for name in ("p50_s", "p95_s")),
         f"{each['uses']:.0f} %" if "uses" in each else "", str(each["timed"]))
        for at_once, batches in (("1", found["batches"]), (str(found.get("at_once")), found.get("together") or {}))
        for size, each in batches.items()
    ]  # fmt: skip
    output.table(("Batch", "At once", "Median", "p95", "Uses", "Timed"), rows)


_shown: Final = declare.options(click.argument("function"), flags.namespace, declare.shows(_show), flags.client)


@command.command("take")
@click.option("--batches", metavar="N,N...", help="Sizes. [default: powers of two that it may have]")
@click.option("--device", metavar="ID", help="Where; else where it has a copy, or one that is idle.")
@click.option("--input", "file", type=click.File("rb"), help="The input; else its sample.json or sample.bin.")
@click.option("--together", type=click.IntRange(1), metavar="K", help="So many batches at once. [default: its slots]")
@click.option("--quick", is_flag=True, help="Time few batches of each size.")
@_shown
def take(function: str, file: BinaryIO | None, namespace: str | None, client: Client, **how: object) -> dict[str, Any]:
    """
    Take a profile of a function: the same as profile FUNCTION.

    Examples:
      gpufaas profile digits --quick
      gpufaas profile take show      of a function that is called like one of these commands
    """
    body, media_type = (file.read(), mimetypes.guess_type(file.name)[0]) if file is not None else (b"", "")
    if file is not None and not body:
        raise InvalidSpec(f"{file.name} is empty: a profile needs an input")
    return _of(client.take_profile(function, namespace, body=body, content_type=media_type or "", **how))


@command.command("show")
@click.option("--kind", metavar="KIND", default="", help="Of device. [default: where one was taken last]")
@_shown
def show(function: str, kind: str, namespace: str | None, client: Client) -> dict[str, Any]:
    """
    Show the profile that was taken of a function last.

    Examples:
      gpufaas profile show digits
      gpufaas profile show digits --json
    """
    return _of(client.profiles(function, namespace), kind)


@command.command("export")
@click.argument("function")
@flags.namespace
@flags.client
def export(function: str, namespace: str | None, client: Client) -> None:
    """
    Write all profiles that were taken of a function to stdout, for profile import.

    Examples:
      gpufaas profile export digits > digits.profile.json
    """
    output.show_json(client.profiles(function, namespace))


@command.command("import")
@click.argument("file", type=click.File("rb"))
@click.argument("function", required=False)
@flags.namespace
@flags.client
def import_(file: BinaryIO, function: str | None, namespace: str | None, client: Client) -> None:
    """
    Take over the profiles in FILE, for FUNCTION or the function that FILE names. - is stdin.

    Examples:
      gpufaas profile import digits.profile.json
      gpufaas profile export digits | gpufaas profile import - digits -g http://other:8080
    """
    try:
        content = json.load(file)
        name = function or content["function"]
    except (ValueError, KeyError, TypeError):
        raise InvalidSpec(f"{file.name} is not what 'gpufaas profile export' writes") from None
    found = client.put_profiles(name, content, namespace)
    output.show(f"Imported: profiles of {found['function']} for {', '.join(found['profiles'])}")
