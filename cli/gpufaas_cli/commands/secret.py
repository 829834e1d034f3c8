"""
``gpufaas secret``: values that functions read as files in /var/openfaas/secrets.

Unlike with faas-cli, a failure ends with status 1. A value goes to the gateway only: no message or error contains it.
"""

import re
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from gpufaas import DEFAULT_NAMESPACE, Client, Refused
from gpufaas_cli import declare, flags, output
from gpufaas_core.errors import GpufaasError, InvalidSpec

_NAME: Final = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_CONFLICT: Final = 409


@declare.group("secret")
def command() -> None:
    """
    Secrets: files that only functions can read, as /var/openfaas/secrets/NAME.

    Examples:
      gpufaas secret create api-key --from-file ./key.txt
      gpufaas secret list
      gpufaas secret apply                       every file of ./.secrets
    """


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidSpec(f"{name!r} is not the name of a secret: use a-z, 0-9, '-' and '.', as in api-key")
    return name


class _Value(NamedTuple):
    text: str | bytes
    raw: bytes | None = None
    """The bytes of a file, untrimmed: faas-cli sends them beside their trimmed text."""


def _value(name: str, from_literal: str | None, from_file: Path | None, trim: bool) -> tuple[str, _Value]:
    """Return a name and its value. Bytes that are no text are sent alone: the gateway would use the text."""
    if from_literal is not None and from_file is not None:
        raise click.UsageError("--from-literal and --from-file exclude each other")
    if from_literal is not None:
        raw = from_literal.encode(errors="surrogateescape")
    elif from_file is not None:
        try:
            raw = from_file.read_bytes()
        except OSError as exc:
            raise GpufaasError(f"--from-file {from_file}: {exc.strerror}") from exc
    elif sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError(f"give the value of {name} with --from-literal, --from-file or on stdin")
    else:
        raw = sys.stdin.buffer.read()
    try:
        text = raw.decode().strip() if trim else raw.decode()
    except UnicodeDecodeError:
        return name, _Value(raw)
    if not text:
        raise click.UsageError(f"the value of {name} is empty: give one with --from-literal, --from-file or on stdin")
    return name, _Value(text, raw if from_file is not None else None)


_name = click.argument("name", callback=declare.parsed(_checked))
_trim = click.option("--trim/--no-trim", default=True, help="Cut space off both ends. [default: trim]")
_valued = declare.gathered(
    "secret", _value,
    _name,
    click.option("--from-literal", metavar="VALUE", help="The value; it stays in your shell's history."),
    click.option("--from-file", metavar="FILE", type=click.Path(path_type=Path), help="Take the value from a file."),
    _trim,
)  # fmt: skip


@command.command("create")
@_valued
@click.option("--replace", is_flag=True, help="Update it when it exists.")
@flags.namespace
@flags.client
def create(secret: tuple[str, _Value], replace: bool, namespace: str | None, client: Client) -> None:
    """
    Create a secret; its value is read from stdin unless an option says otherwise.

    Examples:
      gpufaas secret create api-key --from-file ./key.txt
      gpufaas secret create api-key --from-literal s3cr3t -n dev
      openssl rand -hex 32 | gpufaas secret create api-key --replace
    """
    name, value = secret
    output.show(f"Creating secret: {name}.{namespace or ''}")
    exists = f"there is a secret {name!r} already: change it with 'gpufaas secret update', or with --replace"
    try:
        with flags.refused_as({} if replace else {_CONFLICT: exists}):
            _put(client, name, namespace, value, update=False)
    except Refused as exc:
        if exc.status != _CONFLICT:
            raise
        output.show(f"Updating secret: {name}")
        _put(client, name, namespace, value, update=True)


@command.command("update")
@_valued
@flags.namespace
@flags.client
def update(secret: tuple[str, _Value], namespace: str | None, client: Client) -> None:
    """
    Give a secret another value; it is read from stdin unless an option says otherwise.

    Examples:
      gpufaas secret update api-key --from-file ./key.txt
      openssl rand -hex 32 | gpufaas secret update api-key
    """
    name, value = secret
    output.show(f"Updating secret: {name}")
    with flags.refused_as({404: f"{_missing(name, namespace)}: 'gpufaas secret create' makes one"}):
        _put(client, name, namespace, value, update=True)


@command.command("apply")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".secrets"), show_default=True, metavar="DIR",
              help="Its files are the secrets, by name; hidden ones are left out.")  # fmt: skip
@_trim
@flags.namespace
@flags.client
def apply(folder: Path, trim: bool, namespace: str | None, client: Client) -> None:
    """
    Create or update a secret for each file in ./.secrets. Other secrets stay.

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
            name, value = _value(_checked(file.name), None, file, trim)
            update = name in known  # in place: functions that read it never find it gone
            output.show(f"{'Updating' if update else 'Creating'} secret: {name}.{namespace or ''}")
            _put(client, name, namespace, value, update)
        except (Refused, InvalidSpec, click.UsageError) as exc:
            output.note(f"gpufaas: {file}: {exc.message if isinstance(exc, click.UsageError) else exc}")
            failed.append(file.name)
    if failed:
        raise GpufaasError(f"{len(failed)} of {len(files)} secrets not applied: {', '.join(failed)}")


@command.command("remove")
@_name
@flags.namespace
@flags.client
def remove(name: str, namespace: str | None, client: Client) -> None:
    """
    Remove a secret.

    Examples:
      gpufaas secret remove api-key
      gpufaas secret remove api-key -n dev
    """
    with flags.refused_as({404: f"{_missing(name, namespace)}: 'gpufaas secret list' shows which there are"}):
        client.remove_secret(name, namespace)
    output.show("Removed.. OK.")


def _missing(name: str, namespace: str | None) -> str:
    return f"there is no secret {name!r} in namespace {namespace or DEFAULT_NAMESPACE}"


def _show(found: list[dict[str, Any]]) -> None:
    names = "\n".join(str(each.get("name")) for each in found)
    output.show(f"\nNAME\n{names}\n" if found else "No secrets found.")


@command.command("list")
@flags.namespace
@declare.shows(_show)
@flags.client
def list_command(namespace: str | None, client: Client) -> list[Any]:
    """
    List the names of secrets. Their values are never shown.

    Examples:
      gpufaas secret list
      gpufaas secret list -n dev --json
    """
    return sorted(client.secrets(namespace), key=lambda each: str(each.get("name")))


def _put(client: Client, name: str, namespace: str | None, value: _Value, update: bool) -> None:
    outcome = client.put_secret(name, value.text, namespace, update=update, raw=value.raw)
    output.show(f"{'Updated' if update else 'Created'}: {outcome.status} {outcome.reason}")
