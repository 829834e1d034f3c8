"""``gpufaas publish``: build and push in one go, as CI does."""

from pathlib import Path
from typing import Any

import click

from gpufaas_cli import declare, flags
from gpufaas_cli.publish import Building, Extra, Steps, needs_gateway, publish, taken
from gpufaas_cli.stack import choose_gateway


@declare.command("publish")
@flags.stack
@click.option("--platforms", metavar="LIST", help="Of images; else the stack file's, else linux/amd64.")
@click.option("--extra-tag", "extra_tags", multiple=True, metavar="TAG", help="Tag images with it too; repeatable.")
@click.option("--reset-qemu", is_flag=True, hidden=True)
@click.option("--shrinkwrap", is_flag=True, help="Only write the build context, in build/.")
@flags.remote_builder
@flags.building
@flags.gateway
@flags.as_json
def command(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool,
    reset_qemu: bool, gateway: str | None, as_json: bool, **given: Any,  # noqa: ARG001
) -> None:  # fmt: skip
    """
    Build and push: bundles to the gateway; images to their registry, with docker's buildx or a remote builder.

    Examples:
      gpufaas publish
      gpufaas publish resize --platforms linux/amd64,linux/arm64 --extra-tag stable
      gpufaas publish --remote-builder http://gateway:8080 --payload-secret payload.txt
    """
    stack, functions = flags.selected(names, yaml_file, glob, regex, envsubst)
    given["remote"] = flags.remote_of(given)
    building, steps = taken(Building, given), Steps(push=True, buildx=True)
    if building.shrinkwrap or not needs_gateway(stack, functions):
        publish(stack, functions, Extra(), building, steps, None, as_json)
        return
    with flags.connect(choose_gateway(gateway, stack.gateway)) as client:
        publish(stack, functions, Extra(), building, steps, client, as_json)
