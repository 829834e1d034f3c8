"""
Those of ``gpufaas secret`` that ask no gateway: random values, keys, and files of build secrets that are sealed for a
builder (`gpufaas_core.sealing`). A value is told by `generate` and `unseal` only, which are asked for it.
"""

import base64
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from gpufaas_cli import declare, output
from gpufaas_core import sealing
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.remote_build import SECRETS

_PATH: Final = click.Path(path_type=Path)


@declare.command("generate")
@click.option("--length", type=click.IntRange(1, 4096), default=32, show_default=True, metavar="BYTES")
@click.option("-o", "--output", "file", type=_PATH, metavar="FILE", help="Write it there, for its owner only.")
@click.option("--overwrite", is_flag=True, help="Even if the file is there.")
def generate(length: int, file: Path | None, overwrite: bool) -> None:
    """
    Make a random value, as base64: to sign builds with, or for anything else.

    Examples:
      gpufaas secret generate
      gpufaas secret generate -o payload.txt --length 64
    """
    made = base64.b64encode(secrets.token_bytes(length)).decode()
    if file is None:
        output.show(made)
        return
    _write(file, made, 0o600, overwrite)
    output.show(f"Wrote {length}-byte secret to {file}")


@declare.command("keygen")
@click.option(
    "-o", "--output", "file", type=_PATH, default=Path("key"), show_default=True, metavar="FILE",
    help="The private key; the public one is beside it, with .pub.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Even if there is one: what was sealed for it is lost.")
def keygen(file: Path, overwrite: bool) -> None:
    """
    Make a pair of keys to seal build secrets with (Curve25519).

    Examples:
      gpufaas secret keygen
      gpufaas secret keygen -o ./keys/builder
    """
    public = file.with_name(f"{file.name}.pub")
    keys = sealing.make_keys()
    _write(file, keys.private, 0o600, overwrite)
    _write(public, keys.public, 0o644, overwrite=True)
    output.show(f"Wrote private key: {file}")
    output.show(f"Wrote public key:  {public}")
    output.show(f"Key ID:            {sealing.key_id(keys.public)}")


@declare.command("seal")
@click.argument("public_key", type=_PATH, metavar="PUBLIC-KEY-FILE")
@click.option(
    "--from-literal", "literals", multiple=True, metavar="NAME=VALUE", help="It stays in your shell's history."
)
@click.option("--from-file", "files", multiple=True, metavar="NAME=FILE", help="The value is what is in the file.")
@click.option("--key-id", metavar="ID", help="What the file says of the key; else the beginning of the key.")
@click.option("-o", "--output", "file", type=_PATH, default=Path(SECRETS), show_default=True, metavar="FILE")
def seal(public_key: Path, literals: tuple[str, ...], files: tuple[str, ...], key_id: str | None, file: Path) -> None:
    """
    Seal values for the owner of a key, in a file that may be committed.

    Examples:
      gpufaas secret seal key.pub --from-file ca.crt=./ca.crt
      gpufaas secret seal key.pub --from-literal pip_token=s3cr3t -o build/com.openfaas.secrets
    """
    if not literals and not files:
        raise click.UsageError("there is nothing to seal: give --from-literal NAME=VALUE or --from-file NAME=FILE")
    values = {
        name: value.encode(errors="surrogateescape") for name, value in _pairs("--from-literal", literals).items()
    }
    for name, path in _pairs("--from-file", files).items():
        values[name] = _read(Path(path))
    sealed = sealing.seal(_key(public_key), values, key_id)
    _write(file, sealed, 0o600, overwrite=True)
    output.show(f"Sealed {len(values)} secret(s) to {file}")


@declare.command("unseal")
@click.argument("private_key", type=_PATH, metavar="PRIVATE-KEY-FILE")
@click.option("--in", "file", type=_PATH, default=Path(SECRETS), show_default=True, metavar="FILE")
@click.option("--key", "name", metavar="NAME", help="Only the value of this one, as it is.")
def unseal(private_key: Path, file: Path, name: str | None) -> None:
    """
    Show what is in a sealed file, as NAME=VALUE.

    Examples:
      gpufaas secret unseal key
      gpufaas secret unseal key --key pip_token --in build/com.openfaas.secrets
    """
    text = _read(file).decode(errors="replace")
    try:
        values = sealing.unseal(_key(private_key), text)
    except InvalidSpec as exc:
        raise InvalidSpec(f"{file}: {exc}") from exc
    if name is None:
        for each, value in values.items():
            output.show(f"{each}={_shown(each, value)}")
        return
    if name not in values:
        raise GpufaasError(f"{file} has no {name!r}; it has {', '.join(values) or 'nothing'}")
    sys.stdout.buffer.write(values[name])
    sys.stdout.buffer.flush()


LOCAL: Final = (generate, keygen, seal, unseal)


def _shown(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"<{len(value)} bytes that are no text: --key {name} writes them>"


def _pairs(option: str, given: tuple[str, ...]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            # Not as it was written: what is no pair may be the value.
            raise click.UsageError(f"{option} is NAME=VALUE, as in {option} pip_token=...")
        found[name] = value
    return found


def _key(file: Path) -> str:
    return _read(file).decode(errors="replace")


def _read(file: Path) -> bytes:
    try:
        return file.expanduser().read_bytes()
    except OSError as exc:
        raise GpufaasError(f"{file}: {exc.strerror}") from exc


def _write(file: Path, text: str, mode: int, overwrite: bool) -> None:
    """Never open to others, not for a moment; an earlier one is replaced whole."""
    file = file.expanduser()
    if file.exists() and not overwrite:
        raise GpufaasError(f"{file} is there already: name another with -o, or add --overwrite")
    aside = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside.unlink(missing_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as made:
            made.write(text)
        os.replace(aside, file)
    except OSError as exc:
        raise GpufaasError(f"{file} cannot be written: {exc.strerror}") from exc
