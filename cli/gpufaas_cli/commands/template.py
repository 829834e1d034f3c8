"""``gpufaas template``: lists those that are here, and pulls more from git."""

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


@declare.group("template")
def command() -> None:
    """
    The templates that functions are made from: the packaged ones, and your own in template/.

    Examples:
      gpufaas template list
      gpufaas template pull https://github.com/openfaas/python-flask-template
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
    from gpufaas_cli import repository
    from gpufaas_cli.stack import read_stack

    if source != "stack":
        _pull(source or repository.default_repository(), _HERE, overwrite)
        return
    stack = read_stack(yaml_file)
    if not stack.templates:
        raise GpufaasError(f"{stack.path} names no templates: list them under configuration.templates")
    # What is wrong is said before any is pulled.
    sources = [repository.source_of(stack, each) for each in stack.templates]
    for each, source in zip(stack.templates, sources, strict=True):
        _pull(source, stack.folder / _HERE, overwrite, only=repository.bare(each.name))


def _pull(source: str, into: Path, overwrite: bool, only: str | None = None) -> None:
    from gpufaas_cli import repository

    output.note(f"Fetch templates from repository: {source}")
    with output.waiting("Cloning"):
        pulled = repository.pull(source, into, overwrite, only)
    if pulled.kept and not pulled.written:
        kept = " ".join(pulled.kept)
        raise GpufaasError(f"there are {len(pulled.kept)} templates of that name already, and stay: {kept}")
    output.show(f"Wrote {len(pulled.written)} template(s) : [{' '.join(pulled.written)}] from {source}")
