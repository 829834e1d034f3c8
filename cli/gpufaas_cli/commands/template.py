"""``gpufaas template``: lists those that are here, pulls more from git, and finds them in a store."""

from pathlib import Path
from typing import Any, Final

import click

from gpufaas_cli import declare, flags, output
from gpufaas_core.errors import GpufaasError

_HERE: Final = Path("template")
_overwrite = declare.options(
    click.option("--overwrite/--no-overwrite", default=True,
                 help="Replace templates of the same name. [default: overwrite]"),
    click.option("--debug", is_flag=True, hidden=True, expose_value=False),  # faas-cli's
)  # fmt: skip
_url = click.option("-u", "--url", metavar="URL|FILE", help="Store; else OPENFAAS_TEMPLATE_STORE_URL, else OpenFaaS's.")


@declare.group("template")
def command() -> None:
    """
    The templates that functions are made from: the packaged ones, and your own in template/.

    Examples:
      gpufaas template list
      gpufaas template pull https://github.com/openfaas/python-flask-template
      gpufaas template store pull golang-middleware
    """


def show_templates(found: list[dict[str, Any]]) -> None:
    rows = [(each["name"], each["language"], each["kind"] or "image", each["description"]) for each in found]
    output.table(("NAME", "LANGUAGE", "KIND", "DESCRIPTION"), rows)


def templates_here() -> list[dict[str, Any]]:
    from gpufaas_templates import list_templates

    keys = ("name", "language", "kind", "description")
    return [{key: getattr(each, key) for key in keys} for each in list_templates([_HERE])]


@command.command("list")
@declare.shows(show_templates)
def list_command() -> list[dict[str, Any]]:
    """
    List the templates that functions can be made from.

    Examples:
      gpufaas template list
      gpufaas template list --json
    """
    return templates_here()


@command.command("pull")
@click.argument("source", required=False, metavar="[URL[#REF]|stack]")
@_overwrite
@flags.yaml_file
def pull(source: str | None, overwrite: bool, yaml_file: Path | None) -> None:
    """
    Copy the templates of a git repository into template/. REF is a branch, a tag or sha-COMMIT.

    Without a URL it is that of OPENFAAS_TEMPLATE_URL, else OpenFaaS's own. A path on this disk is a URL as well.

    Examples:
      gpufaas template pull
      gpufaas template pull https://github.com/openfaas/python-flask-template#1.0
      gpufaas template pull ../my-templates
      gpufaas template pull stack                all that stack.yaml names
    """
    from gpufaas_cli import repository, templating
    from gpufaas_cli.stack import read_stack

    if source != "stack":
        _pull(source or repository.default_repository(), _HERE, overwrite)
        return
    stack = read_stack(yaml_file)
    if not stack.templates:
        raise GpufaasError(f"{stack.path} names no templates: list them under configuration.templates")
    for each in stack.templates:
        _pull(templating.source_of(stack, each), stack.folder / _HERE, overwrite, only=templating.bare(each.name))


def _pull(source: str, into: Path, overwrite: bool, only: str | None = None) -> None:
    from gpufaas_cli import repository

    output.note(f"Fetch templates from repository: {source}")
    with output.waiting("Cloning"):
        pulled = repository.pull(source, into, overwrite, only)
    if pulled.kept and not pulled.written:
        kept = " ".join(pulled.kept)
        raise GpufaasError(f"there are {len(pulled.kept)} templates of that name already, and stay: {kept}")
    output.show(f"Wrote {len(pulled.written)} template(s) : [{' '.join(pulled.written)}] from {source}")


@command.group("store")
def store() -> None:
    """
    Templates of others: find and pull them by name.

    Examples:
      gpufaas template store list
      gpufaas template store pull golang-middleware
    """


@store.command("list")
@click.option("-r", "--recommended", is_flag=True, help="Only recommended ones.")
@click.option("-o", "--official", is_flag=True, help="Only official ones.")
@click.option("-p", "--platform", metavar="NAME", help="Only those for this platform.")
@click.option("-v", "--verbose", is_flag=True, help="Language, platform and repository as well.")
@declare.as_json
@_url
def store_list(
    recommended: bool, official: bool, platform: str | None, verbose: bool, as_json: bool, url: str | None
) -> None:
    """
    List the templates of a store.

    Examples:
      gpufaas template store list
      gpufaas template store list --recommended -v
      gpufaas template store list -u ./templates.json
    """
    from gpufaas_cli import stores

    found = [
        each
        for each in stores.templates(url)
        if (each.recommended or not recommended)
        and (each.official or not official)
        and (platform is None or each.platform.lower() == platform.lower())
    ]
    found.sort(key=lambda each: (not each.recommended, each.official, each.name))
    if as_json:
        output.show_json(found)
        return
    headings = ["NAME", "RECOMMENDED", "DESCRIPTION", "SOURCE"]
    rows = [[each.name, f"[{'x' if each.recommended else ' '}]", each.description, each.source] for each in found]
    if verbose:
        headings += ["LANGUAGE", "PLATFORM", "REPOSITORY"]
        for row, each in zip(rows, found, strict=True):
            row += [each.language, each.platform, each.repository]
    output.table(headings, rows)


@store.command("describe")
@click.argument("name")
@_url
@declare.shows(lambda found: output.aligned([(key.capitalize(), output.text(value)) for key, value in found.items()]))
def describe(name: str, url: str | None) -> dict[str, Any]:
    """
    Show all about one template of a store; SOURCE/NAME where several have its name.

    Examples:
      gpufaas template store describe golang-middleware
    """
    import msgspec

    from gpufaas_cli import stores

    return msgspec.structs.asdict(stores.find_template(name, stores.templates(url)))


@store.command("pull")
@click.argument("name", metavar="[SOURCE/]NAME[@REF]")
@_overwrite
@_url
def store_pull(name: str, overwrite: bool, url: str | None) -> None:
    """
    Copy the repository of a template of the store into template/.

    Examples:
      gpufaas template store pull golang-middleware
      gpufaas template store pull openfaas/python3-http@1.0
    """
    from gpufaas_cli import stores

    found = stores.find_template(name, stores.templates(url))
    ref = name.partition("@")[2]
    _pull(f"{found.repository.partition('#')[0]}#{ref}" if ref else found.repository, _HERE, overwrite)
