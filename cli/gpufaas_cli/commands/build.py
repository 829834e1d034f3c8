"""``gpufaas build``: bundles on this disk, or images in the local engine."""

from pathlib import Path
from typing import Any

import click

from gpufaas import Client
from gpufaas_cli import declare, flags
from gpufaas_cli.publish import Building, Extra, Steps, publish, taken
from gpufaas_cli.stack import choose_gateway


@declare.command("build")
@flags.stack
@click.option("--shrinkwrap", is_flag=True, help="Only write the build context, in build/.")
@flags.building
@flags.gateway
@flags.as_json
def command(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool,
    gateway: str | None, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """
    Build functions of the stack file, in build/ beside it. What has not changed is not built again.

    What runs as a process becomes a bundle; a function of lang dockerfile, or of a template that only makes images, is
    built by docker. The packages that a bundle needs are chosen for the gateway's nodes: it is asked what they provide.
    Where no gateway answers, this Python's packages are taken for theirs; deploying checks that.

    Examples:
      gpufaas build
      gpufaas build digits embed
      gpufaas build --filter 'cnn-*' -b EPOCHS=3 --parallel 2
      gpufaas build -g http://gateway:8080       for what that gateway's nodes provide
      gpufaas build resize --shrinkwrap          only write build/resize/, for another builder
    """
    stack, functions = flags.selected(names, yaml_file, glob, regex, envsubst)
    url = choose_gateway(gateway, stack.gateway)
    context = click.get_current_context()

    def connect() -> Client:
        with context.scope(cleanup=False):  # of threads that build, it is not the current one
            return flags.connect(url)

    publish(
        stack, functions, Extra(), taken(Building, given), Steps(), client=None, as_json=as_json,
        connect=connect,
    )  # fmt: skip
