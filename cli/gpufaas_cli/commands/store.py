"""``gpufaas store``: functions that others have made, by name, from a JSON file at a URL or on this disk."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufaas_cli import build_flags, declare, flags, output, pipeline
from gpufaas_cli.stack import FILE_NAMES, FUNCTION_NAME, Stack, StackFunction

if TYPE_CHECKING:
    from gpufaas_cli.stores import StoreFunction

_DESCRIPTION_CHARS = 60

_url = click.option("-u", "--url", metavar="URL|FILE", help="Store; else OPENFAAS_STORE, else OpenFaaS's.")
_platform = click.option("-p", "--platform", metavar="NAME", help="x86_64, arm64 or armhf. [default: this machine's]")


@declare.group("store")
def command() -> None:
    """
    Functions of others, to be deployed by name.

    Examples:
      gpufaas store list
      gpufaas store deploy nodeinfo
    """


@command.command("list")
@click.option("-v", "--verbose", is_flag=True, help="Descriptions in full, and images.")
@_platform
@declare.as_json
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
        output.show_json(found)
        return
    rows = []
    for each in found:
        text = each.description
        if not verbose and len(text) > _DESCRIPTION_CHARS:
            text = text[: _DESCRIPTION_CHARS - 1] + "…"
        rows.append([each.name, each.author, text, *([each.images.get(wanted, "")] if verbose else [])])
    output.show()
    output.table(["FUNCTION", "AUTHOR", "DESCRIPTION", *(["IMAGE"] if verbose else [])], rows)
    output.show()


def _show(found: "StoreFunction", platform: str) -> None:
    image = found.images.get(platform) or f"none for {platform}; some for {', '.join(sorted(found.images))}"
    output.aligned(
        [("Title", found.title or found.name), ("Name", found.name), ("Author", found.author),
         ("Description", found.description), ("Image", image), ("Process", found.fprocess or "<default>"),
         ("Repo URL", found.repo_url)]
    )  # fmt: skip
    output.section("Environment", found.environment)
    output.section("Labels", found.labels)
    output.section("Annotations", found.annotations)


@command.command("describe")
@click.argument("name")
@_platform
@declare.as_json
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
    output.show_json(found) if as_json else _show(found, platform or stores.this_platform())


command.add_command(describe, "inspect")


@command.command("deploy")
@click.argument("name")
@click.option("--name", "called", metavar="NAME", help="The function's name here. [default: as in the store]")
@_platform
@_url
@build_flags.deploying
@flags.gateway
@flags.yaml_file
@declare.as_json
def deploy(
    name: str, called: str | None, platform: str | None, url: str | None, overrides: pipeline.Overrides,
    gateway: str | None, yaml_file: Path | None, as_json: bool,
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
    connect = flags.connector(flags.gateway_url(gateway, yaml_file))
    steps = pipeline.Steps(build=False, deploy=True)
    pipeline.run(stack, [function], steps, connect, overrides=overrides, as_json=as_json)
