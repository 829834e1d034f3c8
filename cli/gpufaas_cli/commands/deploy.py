"""``gpufaas deploy``. Unlike faas-cli's, it never deploys a bundle that is older than its source."""

from pathlib import Path

import click

from gpufaas_cli import build_flags, declare, flags, pipeline
from gpufaas_cli.stack import FILE_NAMES, FUNCTION_NAME, Stack, StackFunction, choose_gateway


@declare.command("deploy")
@flags.stack
@click.option("--image", metavar="IMAGE", help="Deploy this image, without a stack file; with --name.")
@click.option("--name", metavar="NAME", help="With --image: the function's name.")
@build_flags.building
@build_flags.deploying
@flags.gateway
@declare.as_json
def command(
    selection: flags.Selection, image: str | None, name: str | None, building: pipeline.Building,
    overrides: pipeline.Overrides, gateway: str | None, as_json: bool,
) -> None:  # fmt: skip
    """
    Upload and deploy functions of the stack file, or one by its --image.

    Functions that run as processes are built first where they were not built yet, or have changed since. Container
    images are deployed as they were built and pushed.

    Examples:
      gpufaas deploy
      gpufaas deploy digits --annotation gpufaas.memory=512Mi
      gpufaas deploy --label com.openfaas.scale.min=1
      gpufaas deploy --image ghcr.io/openfaas/nodeinfo:latest --name nodeinfo
    """
    if image or name:
        stack, functions = _by_image(image, name, selection.names)
        url = flags.gateway_url(gateway, selection.yaml_file)
    else:
        stack, functions = selection.read()
        url = choose_gateway(gateway, stack.gateway)
    steps = pipeline.Steps(build=False, push=True, push_images=False, deploy=True)
    pipeline.run(stack, functions, steps, flags.connector(url), building, overrides, as_json=as_json)


def _by_image(image: str | None, name: str | None, names: tuple[str, ...]) -> tuple[Stack, list[StackFunction]]:
    if not image or not name or names:
        raise click.UsageError("a function without a stack file needs --image and --name, and no other names")
    if not FUNCTION_NAME.fullmatch(name):
        raise click.UsageError(f"--name {name!r}: use at most 63 of a-z, 0-9 and '-', a letter or digit at both ends")
    function = StackFunction(name=name, where="--image", image=image)
    return Stack(path=Path(FILE_NAMES[0]), gateway=None, functions={name: function}), [function]
