"""``gpufaas store``: functions that others have made, by name, from a JSON file at a URL or on this disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpufaas_cli import declare, flags, output
from gpufaas_cli.publish import Building, Steps, publish
from gpufaas_cli.stack import FILE_NAMES, FUNCTION_NAME, Stack, StackFunction


@declare.group("store")
def command() -> None:
    """
    Functions of others, to be deployed by name.

    Examples:
      gpufaas store list
      gpufaas store deploy nodeinfo
    """


def _url(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("-u", "--url", metavar="URL|FILE", help="Store; else OPENFAAS_STORE, else OpenFaaS's.")(
        function
    )


def _platform(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("-p", "--platform", metavar="NAME", help="x86_64, arm64 or armhf. [default: this machine's]")(
        function
    )


@command.command("list")
@click.option("-v", "--verbose", is_flag=True, help="Descriptions in full, and images.")
@_platform
@flags.as_json
@_url
def list_command(verbose: bool, platform: str | None, as_json: bool, url: str | None) -> None:
    """
    List the functions of a store that have an image for the platform.

    Examples:
      gpufaas store list
      gpufaas store list --platform arm64 -v
      gpufaas store list -u ./functions.json --json
    """
    from gpufaas_cli import stores

    wanted = platform or stores.this_platform()
    found = [each for each in stores.functions(url) if wanted in each.images or not each.images]
    if as_json:
        output.show_json([_as_json(each) for each in found])
        return
    headings = ["FUNCTION", "AUTHOR", "DESCRIPTION", *(["IMAGE"] if verbose else [])]
    rows = []
    for each in found:
        text = each.description if verbose or len(each.description) <= 60 else each.description[:59] + "…"
        rows.append([each.name, each.author, text, *([each.images.get(wanted, "")] if verbose else [])])
    output.show()
    output.table(headings, rows)
    output.show()


@declare.command("describe")
@click.argument("name")
@_platform
@flags.as_json
@_url
def describe(name: str, platform: str | None, as_json: bool, url: str | None) -> None:
    """
    Show all about one function of a store, by its name or title.

    Examples:
      gpufaas store describe nodeinfo
      gpufaas store inspect nodeinfo --json
    """
    from gpufaas_cli import stores

    found = stores.find_function(name, stores.functions(url))
    if as_json:
        output.show_json(_as_json(found))
        return
    wanted = platform or stores.this_platform()
    output.aligned(
        [
            ("Title", found.title),
            ("Name", found.name),
            ("Author", found.author),
            ("Description", found.description),
            ("Image", found.images.get(wanted) or f"none for {wanted}; some for {', '.join(sorted(found.images))}"),
            ("Process", found.fprocess or "<default>"),
            ("Repo URL", found.repo_url),
        ]
    )
    for title, entries in (
        ("Environment", found.environment),
        ("Labels", found.labels),
        ("Annotations", found.annotations),
    ):
        if entries:
            output.show(f"\n{title}:")
            output.aligned(sorted(entries.items()), indent=1)


command.add_command(describe)
command.add_command(describe, "inspect")


@command.command("deploy")
@click.argument("name")
@click.option("--name", "called", metavar="NAME", help="What the function is called here. [default: as in the store]")
@_platform
@_url
@flags.deploying
@flags.namespace
@flags.gateway
@flags.yaml_file
@flags.as_json
def deploy(
    name: str, called: str | None, platform: str | None, url: str | None, gateway: str | None, yaml_file: Path | None,
    as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """
    Deploy a function of a store, by its name or title.

    Examples:
      gpufaas store deploy nodeinfo
      gpufaas store deploy figlet --name banner -l team=a
      gpufaas store deploy nodeinfo --platform arm64 -n dev
    """
    from gpufaas_cli import stores

    found = stores.find_function(name, stores.functions(url))
    called = called or found.name
    if not FUNCTION_NAME.fullmatch(called):
        raise click.UsageError(f"{called!r} is no function name: choose one with --name, of a-z, 0-9 and '-'")
    function = StackFunction(
        name=called,
        where="the store",
        image=found.image(platform or stores.this_platform()),
        fprocess=found.fprocess or None,
        environment=found.environment,
        labels=found.labels,
        annotations=found.annotations,
        readonly_root_filesystem=found.readonly_root_filesystem,
    )
    stack = Stack(path=Path(FILE_NAMES[0]), gateway=None, functions={called: function})
    with flags.connect(flags.gateway_url(gateway, yaml_file)) as client:
        steps = Steps(build=False, deploy=True)
        publish(stack, [function], flags.extra_of(given), Building(), steps, client, as_json)


def _as_json(function: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(function)
