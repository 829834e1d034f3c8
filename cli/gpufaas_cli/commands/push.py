"""``gpufaas push``: what was built goes to where it is run from."""

from pathlib import Path
from typing import Any

from gpufaas_cli import declare, flags
from gpufaas_cli.publish import Building, Extra, Steps, needs_gateway, publish, taken
from gpufaas_cli.stack import choose_gateway


@declare.command("push")
@flags.stack
@flags.building
@flags.gateway
@flags.as_json
def command(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool,
    gateway: str | None, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """
    Upload what was built: bundles to the gateway, images to their registry. Nothing is deployed.

    Examples:
      gpufaas push
      gpufaas push resize --tag sha
    """
    stack, functions = flags.selected(names, yaml_file, glob, regex, envsubst)
    building, steps = taken(Building, given), Steps(build=False, push=True)
    if not needs_gateway(stack, functions):
        publish(stack, functions, Extra(), building, steps, None, as_json)
        return
    with flags.connect(choose_gateway(gateway, stack.gateway)) as client:
        publish(stack, functions, Extra(), building, steps, client, as_json)
