"""``gpufaas publish``: build and push in one go, as CI does."""

import click

from gpufaas_cli import build_flags, declare, flags, pipeline, removed
from gpufaas_cli.images import Building


@declare.command("publish")
@flags.stack
@click.option("--platforms", metavar="LIST", help="Of images; else the stack file's, else linux/amd64.")
@click.option("--extra-tag", "extra_tags", multiple=True, metavar="TAG", help="Tag images with it too; repeatable.")
@click.option("--reset-qemu", is_flag=True, hidden=True, expose_value=False)  # faas-cli's: buildx needs nothing here
@build_flags.shrinkwrap
@build_flags.building
@flags.gateway
@declare.as_json
def command(selection: flags.Selection, building: Building, gateway: str | None, as_json: bool) -> None:
    """
    Build and push: bundles to the gateway; images to their registry, with docker's buildx.

    Examples:
      gpufaas publish
      gpufaas publish resize --platforms linux/amd64,linux/arm64 --extra-tag stable
    """
    removed.check_environment()
    with selection.opened(gateway) as (stack, functions, client):
        pipeline.run(stack, functions, pipeline.Steps(push=True, buildx=True), client, building, as_json=as_json)
