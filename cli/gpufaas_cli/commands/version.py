"""``gpufaas version``: ours and the gateway's; and ``completion``: click knows how."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from gpufaas import GatewayUnreachable, NotAuthorised
from gpufaas_cli import declare, flags, output
from gpufaas_core import compiled
from gpufaas_core.revision import git_revision


@declare.command("version")
@click.option("--short-version", "short", is_flag=True, help="Only this CLI's version.")
@click.option("--warn-update", is_flag=True, hidden=True, expose_value=False)  # faas-cli's
@declare.as_json
@flags.gateway
@flags.yaml_file
def show_version(short: bool, as_json: bool, gateway: str | None, yaml_file: Path | None) -> None:
    """
    Show the version of this CLI and of the gateway. A gateway that does not answer is no error here.

    Examples:
      gpufaas version
      gpufaas version --short-version
      gpufaas version --json -g http://gateway:8080
    """
    ours = version("gpufaas")
    if short:
        output.show(ours)
        return
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        try:
            info = client.info()
        except (GatewayUnreachable, NotAuthorised) as exc:
            output.note(str(exc))
            info = None
    if as_json:
        output.show_json({"cli": ours, "engine": compiled.said(), "gateway": client.shown, "info": info})
        return
    output.show("CLI:")
    output.aligned([("version", ours), ("sha", git_revision()), ("engine", compiled.said())], indent=1)
    if info is not None:
        output.show("\nGateway")
        output.aligned([("uri", client.shown), *_release(info)], indent=1)
        provider = info.get("provider") or {}
        named = [("name", provider.get("provider", "")), ("orchestration", provider.get("orchestration", ""))]
        output.show("\nProvider")
        output.aligned([*named, *_release(provider)], indent=1)


def _release(of: Mapping[str, Any]) -> list[tuple[str, str]]:
    release = of.get("version") or {}
    return [("version", release.get("release", "")), ("sha", release.get("sha", ""))]


@declare.command("completion")
@click.option("--shell", type=click.Choice(["bash", "zsh", "fish"]), required=True, help="The shell that you use.")
def completion(shell: str) -> None:
    """
    Write a script to stdout that completes commands and options in your shell.

    Examples:
      gpufaas completion --shell bash > ~/.local/share/bash-completion/completions/gpufaas
      source <(gpufaas completion --shell zsh)
      gpufaas completion --shell fish > ~/.config/fish/completions/gpufaas.fish
    """
    from click.shell_completion import get_completion_class

    from gpufaas_cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    # Not .source(): it starts bash to learn its version, of a machine that may not be the one where this is used.
    complete = found(cli, {}, "gpufaas", "_GPUFAAS_COMPLETE")
    output.show(complete.source_template % complete.source_vars())
