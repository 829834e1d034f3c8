"""``gpufaas plugin``: commands that others wrote."""

import hashlib
import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click

from gpufaas_cli import output, plugins
from gpufaas_cli.client import LOOPBACK
from gpufaas_cli.fetch import fetch_bytes
from gpufaas_core.errors import GpufaasError

_MOST: Final = 512 << 20


@click.group(
    "plugin",
    epilog="""
\b
Examples:
  gpufaas plugin list
  gpufaas plugin get hello --from ./hello.sh
  gpufaas hello --its --own flags
""",
)
def command() -> None:
    """Plugins: a program in ~/.gpufaas/plugins or ~/.openfaas/plugins is a command, by its name."""


@command.command("list")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON, for machines.")
def list_command(as_json: bool) -> None:
    """List the plugins that are here."""
    found = plugins.installed()
    if as_json:
        output.show_json([{"name": name, "path": str(path)} for name, path in found.items()])
    elif not found:
        output.show("No plugins found.")
    else:
        output.table(("NAME", "PATH"), [(name, str(path)) for name, path in found.items()])


@command.command(
    "get",
    epilog="""
\b
Examples:
  gpufaas plugin get hello --from ./hello.sh
  gpufaas plugin get hello --from https://example.com/hello --sha256 9f86d0...
""",
)
@click.argument("name")
@click.option("--from", "place", metavar="FILE|URL", help="The program.")
@click.option("--sha256", metavar="HEX", help="Refuse a program that has another digest.")
@click.option("--path", "folder", type=click.Path(path_type=Path), metavar="DIR", help="[default: ~/.gpufaas/plugins]")
def get(name: str, place: str | None, sha256: str | None, folder: Path | None) -> None:
    """Install a program as a plugin. There is no registry of plugins: say where it comes from."""
    from gpufaas_cli.main import COMMANDS

    if not plugins.is_name(name) or name in COMMANDS:
        why = "there is a command of that name" if name in COMMANDS else "use letters, digits, '.', '_' and '-'"
        raise click.UsageError(f"{name!r} cannot be a plugin's name: {why}")
    if place is None:
        raise click.UsageError(
            f"there is no registry of plugins to get {name} from: name its program with --from FILE or --from URL; "
            f"what 'faas-cli plugin get {name}' has installed is found as it is"
        )
    parts = urlsplit(place)
    if parts.scheme == "http" and parts.hostname not in LOOPBACK and not sha256:
        raise click.UsageError(f"{place} is not encrypted, and a program is run: use https://, or give its --sha256")
    content = fetch_bytes(place, _MOST)
    digest = hashlib.sha256(content).hexdigest()
    if sha256 and digest != sha256.lower():
        raise GpufaasError(f"{place} has the sha256 {digest}, not {sha256}: it is not installed")
    if not content.startswith((b"\x7fELF", b"#!")):
        raise GpufaasError(f"{place} is no program: it begins neither as an ELF file nor with #!")
    folder = (folder or plugins.own_dir()).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{name}.new"
        aside.write_bytes(content)
        aside.chmod(0o755)
        os.replace(aside, folder / name)
    except OSError as exc:
        raise GpufaasError(f"{folder / name} cannot be written: {exc.strerror}") from exc
    output.show(f"Wrote: {folder / name}\n\nUsage:\n  gpufaas {name}")
