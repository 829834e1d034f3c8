"""``gpufaas push``."""

from gpufaas_cli import build_flags, declare, flags, pipeline
from gpufaas_cli.stack import choose_gateway


@declare.command("push")
@flags.stack
@build_flags.building
@flags.gateway
@declare.as_json
def command(selection: flags.Selection, building: pipeline.Building, gateway: str | None, as_json: bool) -> None:
    """
    Upload what was built: bundles to the gateway, images to their registry. Nothing is deployed.

    Examples:
      gpufaas push
      gpufaas push resize --tag sha
    """
    stack, functions = selection.read()
    connect = flags.connector(choose_gateway(gateway, stack.gateway))
    steps = pipeline.Steps(build=False, push=True)
    pipeline.run(stack, functions, steps, connect, building, as_json=as_json)
