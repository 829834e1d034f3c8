"""``gpufaas push``."""

from gpufaas_cli import build_flags, declare, flags, pipeline
from gpufaas_cli.images import Building


@declare.command("push")
@flags.stack
@build_flags.building
@flags.gateway
@declare.as_json
def command(selection: flags.Selection, building: Building, gateway: str | None, as_json: bool) -> None:
    """
    Upload what was built: bundles to the gateway, images to their registry. Nothing is deployed.

    Examples:
      gpufaas push
      gpufaas push resize --tag sha
    """
    with selection.opened(gateway) as (stack, functions, client):
        pipeline.run(stack, functions, pipeline.Steps(build=False, push=True), client, building, as_json=as_json)
