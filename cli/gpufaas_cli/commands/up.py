"""Deploying: ``gpufaas up``, ``deploy`` and ``run``; with ``--watch``, again whenever something changes."""

import contextlib
import secrets
from functools import partial
from pathlib import Path

import click

from gpufaas import UnknownFunction
from gpufaas_cli import build_flags, declare, flags, following, one_file, output, pipeline, removed
from gpufaas_cli.commands import invoke
from gpufaas_cli.images import Building
from gpufaas_cli.stack import FILE_NAMES, FUNCTION_NAME, Stack, StackFunction, choose_gateway
from gpufaas_cli.watching import watch
from gpufaas_core.files import remove_tree

_how = declare.options(
    click.option("--watch", "watches", is_flag=True, help="Do it again whenever a file changes, until Ctrl-C."),
    following.option, build_flags.building, build_flags.deploying, flags.gateway, declare.as_json,
)  # fmt: skip


@declare.command("up")
@flags.stack
@click.option("--skip-push", is_flag=True, help="Leave images in the engine that built them.")
@click.option("--skip-deploy", is_flag=True, help="Build and push only.")
@click.option("--publish", "buildx", is_flag=True, help="Images: build for several platforms and push, with buildx.")
@click.option("--platforms", metavar="LIST", help="With --publish, as in linux/amd64,linux/arm64.")
@_how
def up(
    selection: flags.Selection, skip_push: bool, skip_deploy: bool, buildx: bool, watches: bool, wait: bool,
    building: Building, overrides: pipeline.Overrides, gateway: str | None, as_json: bool,
) -> None:  # fmt: skip
    """
    Build, upload and deploy the functions of the stack file. What the gateway has already is not sent again.

    Examples:
      gpufaas up
      gpufaas up digits -g http://gateway:8080
      gpufaas up --filter 'cnn-*' -e LOG=debug
      gpufaas up --watch
      gpufaas up -f other.yaml --json
    """
    if buildx:
        removed.check_environment()
    steps = pipeline.Steps(
        push=not skip_push or not skip_deploy,
        deploy=not skip_deploy,
        buildx=buildx,
        push_images=not skip_push,
        follow=wait,
    )
    with selection.opened(gateway) as (stack, functions, client):

        def act(stack: Stack, functions: list[StackFunction]) -> None:
            pipeline.run(stack, functions, steps, client, building, overrides, as_json)

        watch(selection.read, act) if watches else act(stack, functions)


@declare.command("deploy")
@flags.stack
@click.option("--image", metavar="IMAGE", help="Deploy this image, without a stack file; with --name.")
@click.option("--name", metavar="NAME", help="With --image or a file: the function's name.")
@_how
def deploy(
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


@declare.command("run")
@click.argument("file", metavar="FILE.py", type=click.Path(path_type=Path))
@click.option("-d", "--data", metavar="TEXT", help="Body, instead of stdin.")
@click.option("--content-type", default="text/plain", show_default=True, metavar="TYPE")
@click.option("--timing", is_flag=True, help="Show on stderr the device, and the time of each phase.")
@declare.gathered("overrides", pipeline.Overrides, build_flags.env, build_flags.annotation, build_flags.secret,
                  flags.namespace)  # fmt: skip
@flags.gateway
@declare.as_json
@click.pass_context
def run(
    ctx: click.Context, file: Path, data: str | None, content_type: str, timing: bool, overrides: pipeline.Overrides,
    gateway: str | None, as_json: bool,
) -> None:  # fmt: skip
    """
    Deploy FILE.py under a random name, call it once, show its answer, and remove it, on Ctrl-C as well.

    Its answer is on stdout, and what it printed on stderr. What the file says of itself: 'gpufaas deploy --help'.

    Examples:
      gpufaas run handler.py -d hello
      gpufaas run sentiment.py --timing < review.txt
      gpufaas run handler.py -d '{"n": 3}' --content-type application/json -e LOG=debug
      gpufaas run handler.py -d hello --json | jq .phases
    """
    name = f"{one_file.name_of(file)[:50]}-{secrets.token_hex(4)}".lstrip("-")
    stack, functions = one_file.read(file, name)
    steps, url = pipeline.Steps(push=True, deploy=True), flags.gateway_url(gateway)
    with flags.connect(url) as client:
        try:
            pipeline.run(stack, functions, steps, client, overrides=overrides, quiet=True)
            ctx.invoke(
                invoke.invoke, name=name, data=data, content_type=content_type, timing=timing, headers=[], query=[],
                namespace=overrides.namespace, gateway=url, as_json=as_json,
            )  # fmt: skip
        finally:
            with contextlib.suppress(UnknownFunction), client.logs(name, overrides.namespace) as lines:
                for line in lines:
                    output.note(line["text"].rstrip("\n"))
            client.remove(name, overrides.namespace)
            for folder in (stack.folder / name, stack.folder / "build" / name):
                remove_tree(folder)
