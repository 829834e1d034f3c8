"""``gpufaas up``: build, push, deploy; with ``--watch``, again whenever something changes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from gpufaas_cli import build_flags, declare, flags, following, output, pipeline, removed
from gpufaas_cli.images import Building
from gpufaas_cli.source_files import NOT_HANDLER, Ignored, LeavesOut, is_cache
from gpufaas_cli.stack import Stack, StackFunction
from gpufaas_core.errors import GpufaasError

_Act = Callable[[Stack, list[StackFunction]], None]


@declare.command("up")
@flags.stack
@click.option("--skip-push", is_flag=True, help="Leave images in the engine that built them.")
@click.option("--skip-deploy", is_flag=True, help="Build and push only.")
@click.option("--publish", "buildx", is_flag=True, help="Images: build for several platforms and push, with buildx.")
@click.option("--platforms", metavar="LIST", help="With --publish, as in linux/amd64,linux/arm64.")
@click.option("--watch", "watches", is_flag=True, help="Do it again whenever a file changes, until Ctrl-C.")
@following.option
@build_flags.building
@build_flags.deploying
@flags.gateway
@declare.as_json
def command(
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


def watch(read: Callable[[], tuple[Stack, list[StackFunction]]], act: _Act) -> None:
    """Do *act* with all that *read* gives, then with what has changed, until Ctrl-C."""
    from gpufaas_cli.file_changes import changes

    known = [read()]  # the last that could be read
    try:
        changed_files = changes(lambda: watched(*known[-1]))  # what is written while the first is built counts, too
        _attempt(act, *known[-1])
        for changed in changed_files:
            try:
                known[:] = [read()]
            except GpufaasError as exc:
                output.note(f"gpufaas: {exc}")
                continue
            stack, functions = known[-1]
            _attempt(act, stack, concerned(stack, functions, changed))
    except KeyboardInterrupt:
        output.note("Stopped watching.")


def watched(stack: Stack, functions: Sequence[StackFunction]) -> list[tuple[Path, LeavesOut]]:
    """Return the files and folders that *functions* are made from, and what is left out of each."""
    if stack.made_of:
        return [(stack.made_of, is_cache)]
    handlers = [each.handler for each in functions if each.handler]
    return [
        *((path, is_cache) for path in (stack.path, *stack.template_dirs())),
        *((path, Ignored(path, NOT_HANDLER)) for path in handlers),
        *((path, Ignored(path)) for path in (stack.root / each for each in stack.copy)),
    ]


def concerned(stack: Stack, functions: Sequence[StackFunction], changed: set[Path]) -> list[StackFunction]:
    """Return those of *functions* with a change in their own folder, without the stack file; all, if one is outside."""
    folders = [each.handler for each in functions if each.handler and not stack.path.is_relative_to(each.handler)]
    if any(not any(path.is_relative_to(folder) for folder in folders) for path in changed):
        return list(functions)
    return [each for each in functions if each.handler and any(path.is_relative_to(each.handler) for path in changed)]


def _attempt(act: _Act, stack: Stack, functions: list[StackFunction]) -> None:
    """Do *act*. A mistake in a function does not end the watch: it waits for the correction."""
    try:
        act(stack, functions)
    except click.exceptions.Exit:
        pass
    except GpufaasError as exc:
        output.note(f"gpufaas: {exc}")
    output.note(f"Watching {stack.made_of or f'{stack.path} and what it names'}; Ctrl-C ends it.")
