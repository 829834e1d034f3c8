"""
``gpufaas secret``: what functions read as files in /var/openfaas/secrets.

Unlike faas-cli, a failure ends with status 1. A value goes to the gateway and nowhere else: not into a message, not
into an error.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import click

from gpufaas import Client, Refused
from gpufaas_cli import declare, flags, output
from gpufaas_cli.commands.sealed import LOCAL
from gpufaas_core.errors import GpufaasError

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_CHARS: Final = 253
_CONFLICT: Final = 409
_Value: TypeAlias = tuple[str | bytes, bytes | None]


@declare.group("secret")
def command() -> None:
    """
    Secrets: files that only functions can read, as /var/openfaas/secrets/NAME. Keys and sealed files for builds.

    Examples:
      gpufaas secret create api-key --from-file ./key.txt
      gpufaas secret list
      gpufaas secret apply                       every file of ./.secrets
      gpufaas secret generate -o payload.txt     a random one, on this machine
    """


for _local in LOCAL:
    command.add_command(_local)


def _name(_: click.Context, __: click.Parameter, name: str) -> str:
    return _checked(name)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > _NAME_CHARS:
        raise click.BadParameter(f"{name!r} is not the name of a secret: use a-z, 0-9, '-' and '.', as in api-key")
    return name


def _valued(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the value comes from."""
    function = click.option("--trim/--no-trim", default=True, help="Cut space off both ends. [default: trim]")(function)
    function = click.option(
        "--from-file", metavar="FILE", type=click.Path(path_type=Path), help="Take the value from a file."
    )(function)
    function = click.option("--from-literal", metavar="VALUE", help="The value; it stays in your shell's history.")(
        function
    )
    return click.argument("name", callback=_name)(function)


@command.command("create")
@_valued
@click.option("--replace", is_flag=True, help="Update it when it is there.")
@flags.namespace
@flags.client
def create(
    name: str, from_literal: str | None, from_file: Path | None, trim: bool, replace: bool, namespace: str | None,
    client: Client,
) -> None:  # fmt: skip
    """
    Create a secret; its value is read from stdin unless an option says otherwise.

    Examples:
      gpufaas secret create api-key --from-file ./key.txt
      gpufaas secret create api-key --from-literal s3cr3t -n dev
      openssl rand -hex 32 | gpufaas secret create api-key --replace
    """
    value = _value(name, from_literal, from_file, trim)
    output.show(f"Creating secret: {name}.{namespace or ''}")
    try:
        _put(client, name, namespace, value, update=False)
    except Refused as exc:
        if exc.status != _CONFLICT:
            raise
        if not replace:
            raise GpufaasError(
                f"there is a secret {name!r} already: change it with 'gpufaas secret update', or with --replace"
            ) from exc
        output.show(f"Updating secret: {name}")
        _put(client, name, namespace, value, update=True)


@command.command("update")
@_valued
@flags.namespace
@flags.client
def update(
    name: str, from_literal: str | None, from_file: Path | None, trim: bool, namespace: str | None,
    client: Client,
) -> None:  # fmt: skip
    """
    Give a secret another value; its value is read from stdin unless an option says otherwise.

    Examples:
      gpufaas secret update api-key --from-file ./key.txt
      openssl rand -hex 32 | gpufaas secret update api-key
    """
    value = _value(name, from_literal, from_file, trim)
    output.show(f"Updating secret: {name}")
    _put(client, name, namespace, value, update=True)


@command.command("apply")
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path(".secrets"), show_default=True, metavar="DIR",
    help="Its files are the secrets, by name; hidden ones are left out.",
)  # fmt: skip
@click.option("--trim/--no-trim", default=True, help="Cut space off both ends. [default: trim]")
@flags.namespace
@flags.client
def apply(folder: Path, trim: bool, namespace: str | None, client: Client) -> None:
    """
    Create or update a secret of every file in ./.secrets. What is not there is not removed.

    Examples:
      gpufaas secret apply
      gpufaas secret apply -n dev --folder ./secrets-of-dev
    """
    try:
        files = sorted(each for each in folder.iterdir() if not each.name.startswith(".") and each.is_file())
    except OSError as exc:
        raise GpufaasError(f"{folder}: {exc.strerror}: it should have a file for each secret") from exc
    if not files:
        output.show(f"No secrets found in {folder}.")
        return
    failed: list[str] = []
    known = {each.get("name") for each in client.secrets(namespace)}
    for file in files:
        try:
            name = _checked(file.name)
            value = _value(name, None, file, trim)
            update = name in known  # in place: functions that read it never find it gone
            output.show(f"{'Updating' if update else 'Creating'} secret: {name}.{namespace or ''}")
            _put(client, name, namespace, value, update)
        except (Refused, click.UsageError) as exc:
            reason = exc.message if isinstance(exc, click.UsageError) else str(exc)
            output.note(f"gpufaas: {file}: {reason}")
            failed.append(file.name)
    if failed:
        raise GpufaasError(f"{len(failed)} of {len(files)} secrets not applied: {', '.join(failed)}")


@command.command("remove")
@click.argument("name", callback=_name)
@flags.namespace
@flags.client
def remove(name: str, namespace: str | None, client: Client) -> None:
    """
    Remove a secret.

    Examples:
      gpufaas secret remove api-key
      gpufaas secret remove api-key -n dev
    """
    client.remove_secret(name, namespace)
    output.show("Removed.. OK.")


@command.command("list")
@flags.namespace
@declare.as_json
@flags.client
def list_command(namespace: str | None, as_json: bool, client: Client) -> None:
    """
    List the names of secrets. Their values are never told.

    Examples:
      gpufaas secret list
      gpufaas secret list -n dev --json
    """
    found = sorted(client.secrets(namespace), key=lambda each: str(each.get("name")))
    if as_json:
        output.show_json(found)
    elif not found:
        output.show("No secrets found.")
    else:
        output.show("\nNAME")
        for each in found:
            output.show(str(each.get("name")))
        output.show()


def _put(client: Client, name: str, namespace: str | None, value: _Value, update: bool) -> None:
    status, reason = client.put_secret(name, value[0], namespace, update=update, raw=value[1])
    output.show(f"{'Updated' if update else 'Created'}: {status} {reason}")


def _value(name: str, literal: str | None, file: Path | None, trim: bool) -> _Value:
    """
    Return a value, and its bytes where they go along. As faas-cli does, bytes of a file go untrimmed, beside their
    trimmed text; unlike it, bytes that are no text go alone, since the text would be used.
    """
    if literal is not None and file is not None:
        raise click.UsageError("--from-literal and --from-file exclude each other")
    if literal is not None:
        raw = literal.encode(errors="surrogateescape")
    elif file is not None:
        try:
            raw = file.read_bytes()
        except OSError as exc:
            raise GpufaasError(f"--from-file {file}: {exc.strerror}") from exc
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise click.UsageError(f"give the value of {name} with --from-literal, --from-file or on stdin")
        raw = sys.stdin.buffer.read()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return raw, None
    value = text.strip() if trim else text
    if not value:
        raise click.UsageError(f"the value of {name} is empty: give one with --from-literal, --from-file or on stdin")
    return value, raw if file is not None else None
