"""``gpufaas version``: ours and the gateway's."""

from importlib.metadata import version
from pathlib import Path

import click

from gpufaas import GatewayUnreachable, NotAuthorised
from gpufaas_cli import declare, flags, output
from gpufaas_core.revision import git_revision


@declare.command("version")
@click.option("--short-version", "short", is_flag=True, help="Only this CLI's version.")
@declare.as_json
@flags.gateway
@flags.yaml_file
def command(short: bool, as_json: bool, gateway: str | None, yaml_file: Path | None) -> None:
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
            output.show_json({"cli": ours, "gateway": client.shown, "info": info})
            return
        output.show("CLI:")
        output.aligned([("version", ours), ("sha", git_revision())], indent=1)
        if info is None:
            return
        provider = info.get("provider") or {}
        output.show("\nGateway")
        release = info.get("version") or {}
        output.aligned(
            [("uri", client.shown), ("version", release.get("release", "")), ("sha", release.get("sha", ""))], indent=1
        )
        output.show("\nProvider")
        release = provider.get("version") or {}
        output.aligned(
            [
                ("name", provider.get("provider", "")),
                ("orchestration", provider.get("orchestration", "")),
                ("version", release.get("release", "")),
                ("sha", release.get("sha", "")),
            ],
            indent=1,
        )
