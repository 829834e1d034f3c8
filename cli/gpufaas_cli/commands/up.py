"""``gpufaas up``: build, push, deploy; with ``--watch``, again whenever something changes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gpufaas_cli import declare, flags, output
from gpufaas_cli.publish import Building, Steps, needs_gateway, publish, taken
from gpufaas_cli.stack import Stack, StackFunction, choose_gateway
from gpufaas_core.errors import GpufaasError


@declare.command("up")
@flags.stack
@click.option("--skip-push", is_flag=True, help="Leave images in the engine that built them.")
@click.option("--skip-deploy", is_flag=True, help="Build and push only.")
@click.option("--publish", "buildx", is_flag=True, help="Images: build for several platforms and push, with buildx.")
@click.option("--platforms", metavar="LIST", help="With --publish, as in linux/amd64,linux/arm64.")
@click.option("--watch", "watches", is_flag=True, help="Do it again whenever a file changes, until Ctrl-C.")
@flags.remote_builder
@flags.building
@flags.deploying
@flags.namespace
@flags.gateway
@flags.as_json
def command(
    names: tuple[str, ...], yaml_file: Path | None, glob: str | None, regex: str | None, envsubst: bool,
    skip_push: bool, skip_deploy: bool, buildx: bool, watches: bool, gateway: str | None, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """
    Build, upload and deploy the functions of the stack file. What the gateway has already is not sent again.

    Examples:
      gpufaas up
      gpufaas up digits -g http://gateway:8080
      gpufaas up --filter 'cnn-*' -e LOG=debug
      gpufaas up --watch
      gpufaas up --publish --remote-builder http://gateway:8080 --payload-secret payload.txt
      gpufaas up -f other.yaml --json
    """
    ctx = click.get_current_context()
    if not buildx:
        if ctx.get_parameter_source("remote_builder") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--remote-builder goes with --publish: 'up' alone builds with docker here")
        given["remote_builder"] = None  # of the environment
    given["remote"] = flags.remote_of(given)
    extra, building = flags.extra_of(given), taken(Building, given)
    steps = Steps(
        push=not skip_push or not skip_deploy, deploy=not skip_deploy, buildx=buildx, push_images=not skip_push
    )

    stack, functions = flags.selected(names, yaml_file, glob, regex, envsubst)
    if skip_deploy and not watches and not needs_gateway(stack, functions):
        publish(stack, functions, extra, building, steps, None, as_json)
        return
    with flags.connect(choose_gateway(gateway, stack.gateway)) as client:
        if not watches:
            publish(stack, functions, extra, building, steps, client, as_json)
            return

        def again(changed: Stack, which: list[StackFunction]) -> None:
            publish(changed, which, extra, building, steps, client)

        watch(lambda: flags.selected(names, yaml_file, glob, regex, envsubst), again)


_Read = Callable[[], tuple[Stack, list[StackFunction]]]


def watch(read: _Read, again: Callable[[Stack, list[StackFunction]], None]) -> None:
    """Do *again* with all that *read* gives, then with what has changed, until Ctrl-C."""
    from gpufaas_cli.watch import changes

    known = [read()]  # the last that could be read
    try:
        changed_files = changes(lambda: watched(*known[-1]))  # what is written while the first is built counts, too
        _attempt(again, *known[-1])
        for changed in changed_files:
            try:
                known[:] = [read()]
            except GpufaasError as exc:
                output.note(f"gpufaas: {exc}")
                continue
            stack, functions = known[-1]
            _attempt(again, stack, concerned(functions, changed))
    except KeyboardInterrupt:
        output.note("Stopped watching.")


def watched(stack: Stack, functions: Sequence[StackFunction]) -> list[Path]:
    """Return the files and folders that *functions* are made from."""
    handlers = [each.handler for each in functions if each.handler]
    return [stack.path, *handlers, *(stack.root / each for each in stack.copy), *stack.template_dirs()]


def concerned(functions: Sequence[StackFunction], changed: set[Path]) -> list[StackFunction]:
    """Return those of *functions* whose own folder has something *changed* in it; all, when anything else has."""
    folders = [each.handler for each in functions if each.handler]
    if any(not any(path.is_relative_to(folder) for folder in folders) for path in changed):
        return list(functions)
    return [each for each in functions if each.handler and any(path.is_relative_to(each.handler) for path in changed)]


def _attempt(again: Callable[[Stack, list[StackFunction]], None], stack: Stack, functions: list[StackFunction]) -> None:
    """A function with a mistake in it is why one watches: it ends nothing."""
    try:
        again(stack, functions)
    except click.exceptions.Exit:
        pass
    except GpufaasError as exc:
        output.note(f"gpufaas: {exc}")
    output.note(f"Watching {stack.path} and what it names; Ctrl-C ends it.")
