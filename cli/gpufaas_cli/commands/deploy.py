"""``gpufaas deploy``. Unlike faas-cli's it never deploys a bundle that is older than its source: see `up`."""

from pathlib import Path
from typing import Any

import click

from gpufaas_cli import declare, flags
from gpufaas_cli.publish import Building, Steps, publish, taken
from gpufaas_cli.stack import FILE_NAMES, FUNCTION_NAME, Stack, StackFunction, choose_gateway


@declare.command("deploy")
@flags.stack
@click.option("--image", metavar="IMAGE", help="Deploy this image, without a stack file; with --name.")
@click.option("--name", metavar="NAME", help="With --image: what the function is called.")
@flags.building
@flags.deploying
@flags.namespace
@flags.gateway
@flags.as_json
def command(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool,
    image: str | None, name: str | None, gateway: str | None, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """
    Upload and deploy functions of the stack file, or one by its --image.

    Of functions that run as processes, what was not built yet or has changed since is built first: what runs is what
    you see. Container images are deployed as they were built and pushed.

    Examples:
      gpufaas deploy
      gpufaas deploy digits --annotation gpufaas.memory=512Mi
      gpufaas deploy --label com.openfaas.scale.min=1
      gpufaas deploy --image ghcr.io/openfaas/nodeinfo:latest --name nodeinfo
    """
    extra, building = flags.extra_of(given), taken(Building, given)
    if image or name:
        stack, functions = _by_image(image, name, names)
        url = flags.gateway_url(gateway, yaml_file)
    else:
        stack, functions = flags.selected(names, yaml_file, glob, regex, envsubst)
        url = choose_gateway(gateway, stack.gateway)
    with flags.connect(url) as client:
        steps = Steps(build=False, push=True, push_images=False, deploy=True)
        publish(stack, functions, extra, building, steps, client, as_json)


def _by_image(image: str | None, name: str | None, names: tuple[str, ...]) -> tuple[Stack, list[StackFunction]]:
    if not image or not name or names:
        raise click.UsageError("a function without a stack file needs --image and --name, and no other names")
    if not FUNCTION_NAME.fullmatch(name):
        raise click.UsageError(f"--name {name!r}: use at most 63 of a-z, 0-9 and '-', a letter or digit at both ends")
    function = StackFunction(name=name, where="--image", image=image)
    return Stack(path=Path(FILE_NAMES[0]), gateway=None, functions={name: function}), [function]
