"""``gpufaas build``, ``push`` and ``publish``: bundles and images, which nobody deploys yet."""

import click

from gpufaas_cli import build_flags, declare, flags, pipeline, removed
from gpufaas_cli.images import Building


@declare.command("build")
@flags.stack
@build_flags.building
@build_flags.shrinkwrap
@build_flags.lists
@flags.gateway
@declare.as_json
def build(selection: flags.Selection, building: Building, gateway: str | None, as_json: bool) -> None:
    """
    Build functions of the stack file, in build/ beside it. What has not changed is not built again.

    A function that runs as a process becomes a bundle. One of lang dockerfile, or of a template that only makes images,
    is built by docker. The gateway is asked which packages its nodes provide, and a bundle gets those that are missing.
    Where no gateway answers, the packages of this Python are assumed; the deployment checks that.

    Examples:
      gpufaas build
      gpufaas build digits embed
      gpufaas build --filter 'cnn-*' -b EPOCHS=3 --parallel 2
      gpufaas build -g http://gateway:8080       for what that gateway's nodes provide
      gpufaas build --list                       what would be packed, with sizes, and what is left out and why
      gpufaas build resize --shrinkwrap          only write build/resize/, for another builder
    """
    with selection.opened(gateway) as (stack, functions, client):
        pipeline.run(stack, functions, pipeline.Steps(), client, building, as_json=as_json)


@declare.command("push")
@flags.stack
@build_flags.building
@flags.gateway
@declare.as_json
def push(selection: flags.Selection, building: Building, gateway: str | None, as_json: bool) -> None:
    """
    Upload what was built: bundles to the gateway, images to their registry. Nothing is deployed.

    Examples:
      gpufaas push
      gpufaas push resize --tag sha
    """
    with selection.opened(gateway) as (stack, functions, client):
        pipeline.run(stack, functions, pipeline.Steps(build=False, push=True), client, building, as_json=as_json)


@declare.command("publish")
@flags.stack
@click.option("--platforms", metavar="LIST", help="Of images; else the stack file's, else linux/amd64.")
@click.option("--extra-tag", "extra_tags", multiple=True, metavar="TAG", help="Tag images with it too; repeatable.")
@click.option("--reset-qemu", is_flag=True, hidden=True, expose_value=False)  # faas-cli's: buildx needs nothing here
@build_flags.shrinkwrap
@build_flags.building
@flags.gateway
@declare.as_json
def publish(selection: flags.Selection, building: Building, gateway: str | None, as_json: bool) -> None:
    """
    Build and push: bundles to the gateway; images to their registry, with docker's buildx.

    Examples:
      gpufaas publish
      gpufaas publish resize --platforms linux/amd64,linux/arm64 --extra-tag stable
    """
    removed.check_environment()
    with selection.opened(gateway) as (stack, functions, client):
        pipeline.run(stack, functions, pipeline.Steps(push=True, buildx=True), client, building, as_json=as_json)
