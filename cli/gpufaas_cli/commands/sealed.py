"""
The commands of ``gpufaas secret`` that ask no gateway: random values, keys, and sealed files of build secrets
(`gpufaas_core.sealing`). Only `generate` and `unseal` print a value.
"""

import base64
import secrets
import sys
from pathlib import Path
from typing import Final

import click

from gpufaas_cli import declare, output
from gpufaas_cli.files import replace_file
from gpufaas_core import sealing
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.remote_build import SECRETS

_PATH: Final = click.Path(path_type=Path)


@declare.command("generate")
@click.option("--length", type=click.IntRange(1, 4096), default=32, show_default=True, metavar="BYTES")
@click.option("-o", "--output", "file", type=_PATH, metavar="FILE", help="Write it there, for its owner only.")
@click.option("--overwrite", is_flag=True, help="Replace a file that exists.")
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
    _write(file, made, overwrite)
    output.show(f"Wrote {length}-byte secret to {file}")


@declare.command("keygen")
@click.option("-o", "--output", "file", type=_PATH, default=Path("key"), show_default=True, metavar="FILE",
              help="The private key; the public one is beside it, with .pub.")  # fmt: skip
@click.option("--overwrite", is_flag=True,
              help="Replace a key that exists: nothing that was sealed for it can be read.")  # fmt: skip
def keygen(file: Path, overwrite: bool) -> None:
    """
    Make a pair of keys to seal build secrets with (Curve25519).

    Examples:
      gpufaas secret keygen
      gpufaas secret keygen -o ./keys/builder
    """
    public = file.with_name(f"{file.name}.pub")
    keys = sealing.make_keys()
    _write(file, keys.private, overwrite)
    replace_file(public.expanduser(), keys.public, 0o644)
    output.show(f"Wrote private key: {file}")
    output.show(f"Wrote public key:  {public}")
    output.show(f"Key ID:            {sealing.key_id(keys.public)}")


@declare.command("seal")
@click.argument("public_key", type=_PATH, metavar="PUBLIC-KEY-FILE")
@click.option("--from-literal", "literals", multiple=True, metavar="NAME=VALUE",
              help="It stays in your shell's history.")  # fmt: skip
@click.option("--from-file", "files", multiple=True, metavar="NAME=FILE", help="The value is the content of the file.")
@click.option("--key-id", metavar="ID", help="Name of the key in the file; else the beginning of the key.")
@click.option("-o", "--output", "file", type=_PATH, default=Path(SECRETS), show_default=True, metavar="FILE")
def seal(public_key: Path, literals: tuple[str, ...], files: tuple[str, ...], key_id: str | None, file: Path) -> None:
    """
    Seal values for the owner of a key, in a file that may be committed.

    Examples:
      gpufaas secret seal key.pub --from-file ca.crt=./ca.crt
      gpufaas secret seal key.pub --from-literal pip_token=s3cr3t -o build/com.openfaas.secrets
    """
    values = {name: value.encode(errors="surrogateescape") for name, value in _pairs("--from-literal", literals)}
    values |= {name: _read(Path(path)) for name, path in _pairs("--from-file", files)}
    if not values:
        raise click.UsageError("there is nothing to seal: give --from-literal NAME=VALUE or --from-file NAME=FILE")
    replace_file(file.expanduser(), sealing.seal(_read(public_key).decode(errors="replace"), values, key_id))
    output.show(f"Sealed {len(values)} secret(s) to {file}")


@declare.command("unseal")
@click.argument("private_key", type=_PATH, metavar="PRIVATE-KEY-FILE")
@click.option("--in", "file", type=_PATH, default=Path(SECRETS), show_default=True, metavar="FILE")
@click.option("--key", "name", metavar="NAME", help="Write only the value of this one, byte by byte.")
def unseal(private_key: Path, file: Path, name: str | None) -> None:
    """
    Show what is in a sealed file, as NAME=VALUE.

    Examples:
      gpufaas secret unseal key
      gpufaas secret unseal key --key pip_token --in build/com.openfaas.secrets
    """
    text, key = (_read(each).decode(errors="replace") for each in (file, private_key))
    try:
        values = sealing.unseal(key, text)
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


def _pairs(option: str, given: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [each.partition("=") for each in given]
    if not all(name and equals for name, equals, _ in pairs):
        # The message does not repeat what was given: that may be the value.
        raise click.UsageError(f"{option} is NAME=VALUE, as in {option} pip_token=...")
    return [(name, value) for name, _, value in pairs]


def _read(file: Path) -> bytes:
    try:
        return file.expanduser().read_bytes()
    except OSError as exc:
        raise GpufaasError(f"{file}: {exc.strerror}") from exc


def _write(file: Path, text: str, overwrite: bool) -> None:
    file = file.expanduser()
    if file.exists() and not overwrite:
        raise GpufaasError(f"{file} is there already: name another with -o, or add --overwrite")
    replace_file(file, text)
