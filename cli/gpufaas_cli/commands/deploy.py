"""``gpufaas deploy``. Unlike faas-cli's, it never deploys a bundle that is older than its source."""

from functools import partial
from pathlib import Path

import click

from gpufaas_cli import build_flags, declare, flags, following, one_file, pipeline
from gpufaas_cli.commands.up import watch
from gpufaas_cli.images import Building
from gpufaas_cli.stack import FILE_NAMES, FUNCTION_NAME, Stack, StackFunction, choose_gateway


@declare.command("deploy")
@flags.stack
@click.option("--image", metavar="IMAGE", help="Deploy this image, without a stack file; with --name.")
@click.option("--name", metavar="NAME", help="With --image or a file: the function's name.")
@click.option("--watch", "watches", is_flag=True, help="Do it again whenever a file changes, until Ctrl-C.")
@following.option
@build_flags.building
@build_flags.deploying
@flags.gateway
@declare.as_json
def command(
    selection: flags.Selection, image: str | None, name: str | None, watches: bool, wait: bool,
    building: Building, overrides: pipeline.Overrides, gateway: str | None, as_json: bool,
) -> None:  # fmt: skip
    """
    Upload and deploy functions of the stack file, one by its --image, or one of a single file.

    Functions that run as processes are built first where they were not built yet, or have changed since. Container
    images are deployed as they were built and pushed.

    A FILE.py needs no stack file: it is a model function if it has a load(). Its requirements, and annotations and the
    like below [tool.gpufaas], are in its block `# /// script` (PEP 723).

    Examples:
      gpufaas deploy
      gpufaas deploy digits --annotation gpufaas.memory=512Mi
      gpufaas deploy --label com.openfaas.scale.min=1
      gpufaas deploy handler.py --name digits
      gpufaas deploy sentiment.py --watch
      gpufaas deploy --image ghcr.io/openfaas/nodeinfo:latest --name nodeinfo
    """
    file = next((Path(each) for each in selection.names if each.endswith(".py")), None)
    if file and (len(selection.names) > 1 or image):
        raise click.UsageError(f"a function of one file is deployed by itself: 'gpufaas deploy {file}'")
    read = selection.read
    if file:
        read = partial(one_file.read, file, name or one_file.name_of(file))
    elif image or name:
        read = partial(_by_image, image, name, selection.names)
    stack, functions = read()
    url = flags.gateway_url(gateway, selection.yaml_file) if file or image else choose_gateway(gateway, stack.gateway)
    steps = pipeline.Steps(build=False, push=True, push_images=False, deploy=True, follow=wait)
    with flags.connect(url) as client:

        def act(stack: Stack, functions: list[StackFunction]) -> None:
            pipeline.run(stack, functions, steps, client, building, overrides, as_json=as_json)

        watch(read, act) if watches else act(stack, functions)


def _by_image(image: str | None, name: str | None, names: tuple[str, ...]) -> tuple[Stack, list[StackFunction]]:
    if not image or not name or names:
        raise click.UsageError("a function without a stack file is one FILE.py, or --image and --name")
    if not FUNCTION_NAME.fullmatch(name):
        raise click.UsageError(f"--name {name!r}: use at most 63 of a-z, 0-9 and '-', a letter or digit at both ends")
    function = StackFunction(name=name, where="--image", image=image)
    return Stack(path=Path(FILE_NAMES[0]), gateway=None, functions={name: function}), [function]
