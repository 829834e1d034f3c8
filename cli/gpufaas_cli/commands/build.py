"""``gpufaas build``: bundles on this disk, or images in the local engine."""

from gpufaas_cli import build_flags, declare, flags, pipeline
from gpufaas_cli.images import Building


@declare.command("build")
@flags.stack
@build_flags.building
@build_flags.shrinkwrap
@build_flags.lists
@flags.gateway
@declare.as_json
def command(selection: flags.Selection, building: Building, gateway: str | None, as_json: bool) -> None:
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
