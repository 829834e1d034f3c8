"""``gpufaas new``: a function from a template, and its entry in the stack file."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufaas_cli import declare, output
from gpufaas_cli.files import alone, replace_file
from gpufaas_cli.stack import DEFAULT_GATEWAY, FILE_NAMES, find_stack, is_own
from gpufaas_core.errors import GpufaasError, InvalidSpec

if TYPE_CHECKING:
    from gpufaas_cli.extend import Entry

_IGNORED = ("template", "build", ".secrets")
"""Folders that do not belong into git: what is fetched, what is built, and secrets."""


def _plain(text: str) -> str:
    """What can stand in YAML without quotes."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.:/_-]*", text):
        raise InvalidSpec(f"{text!r} cannot be written to the stack file as it is")
    return text


def _resources(
    memory_limit: str | None, cpu_limit: str | None, memory_request: str | None, cpu_request: str | None
) -> dict[str, dict[str, str]]:
    given = {"limits": (memory_limit, cpu_limit), "requests": (memory_request, cpu_request)}
    return {key: {what: text for what, text in zip(("memory", "cpu"), pair, strict=True) if text}
            for key, pair in given.items()}  # fmt: skip


@declare.command("new")
@click.argument("name", required=False)
@click.option("--lang", metavar="TEMPLATE", help="Template to start from; see --list.")
@click.option("--list", "list_them", is_flag=True, help="List the templates, and write nothing.")
@click.option("-a", "--append", "yaml_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Stack file to add it to. [default: stack.yaml or stack.yml here, else a new "
              "stack.yaml]")  # fmt: skip
@click.option("--handler", metavar="FOLDER", help="The function's folder, beside the stack file. [default: NAME]")
@click.option("-p", "--prefix", envvar="OPENFAAS_PREFIX", metavar="PREFIX", help="Of its image; else OPENFAAS_PREFIX.")
@declare.gathered("resources", _resources, declare.resources(_plain))
@click.option("-g", "--gateway", metavar="URL", callback=declare.parsed(_plain), help="Gateway of a new stack file.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def command(
    name: str | None, lang: str | None, list_them: bool, yaml_file: Path | None, handler: str | None,
    prefix: str | None, resources: dict[str, dict[str, str]], gateway: str | None, quiet: bool,
) -> None:  # fmt: skip
    """
    Write a function NAME that builds, runs and answers as it is, and add it to the stack file.

    What is in the stack file stays as it is, comments too.

    Examples:
      gpufaas new hello --lang python3-torch
      gpufaas new resize --lang python3-http --append other.yaml
      gpufaas new anything --lang dockerfile --prefix ghcr.io/me
      gpufaas new --list
    """
    if list_them:
        from gpufaas_cli.commands.template import show_templates, templates_here

        show_templates(templates_here())
        return
    if not name:
        raise click.UsageError("name the function, as in 'gpufaas new hello --lang python3-torch'")
    if not lang:
        raise click.UsageError(f"say what {name} is made from, as in --lang python3-torch: --list shows all templates")
    if is_own(name):
        raise click.UsageError(f"{name!r} would be passed over: in a stack file, keys that begin with x- are your own")
    file = yaml_file or find_stack() or Path(FILE_NAMES[0])
    folder = (handler or name).removeprefix("./")
    image = f"{prefix.rstrip('/')}/{name}:latest" if prefix else f"{name}:latest"
    try:
        limits, welcome = _template_of(lang, file.parent)
        resources["limits"] = {**limits, **resources["limits"]}
        entry: dict[str, str | dict[str, str]] = {"lang": lang, "handler": f"./{folder}", "image": image}
        entry |= {key: of for key, of in resources.items() if of}
        with alone(file.resolve()):
            existed, written = _write(name, lang, folder, entry, file, gateway or DEFAULT_GATEWAY)
    except InvalidSpec as exc:
        raise click.UsageError(str(exc)) from exc
    if quiet:
        return
    root = file.parent
    output.show("\n  ".join([f"Folder: {root / folder} created.", *map(str, written)]))
    output.show(f"Function created in folder: {root / folder}")
    output.show(f"Stack file {'updated' if existed else 'written'}: {file}")
    if welcome:
        output.show(f"\nNotes:\n{welcome}")
    where = "" if file.name in FILE_NAMES and root == Path() else f" -f {file}"
    output.show(f"\nNext: gpufaas up{where} && echo hi | gpufaas invoke {name} --timing")


def _template_of(lang: str, root: Path) -> tuple[dict[str, str], str]:
    """Return the limits that an entry begins with, and the template's notes."""
    from gpufaas_cli.skeletons import DOCKERFILE
    from gpufaas_templates import find_template

    if lang.lower() == DOCKERFILE:
        return {}, ""
    template = find_template(lang, [root / "template"])
    return template.limits, template.welcome_message


def _write(name: str, lang: str, folder: str, entry: "Entry", file: Path, gateway: str) -> tuple[bool, list[Path]]:
    """Write folder and stack file; return whether that existed, and the files of the function."""
    from gpufaas_cli.extend import extended, lines_of
    from gpufaas_cli.skeletons import new_function

    existed, root = file.exists(), file.parent
    # First the text, which may be refused, then the folder, then the file: nothing is left half done.
    if existed:
        text = extended(file, name, entry)
    else:
        lines = "".join(f"    {each}\n" for each in lines_of(entry))
        text = f"version: 1.0\nprovider:\n  name: openfaas\n  gateway: {gateway}\nfunctions:\n  {name}:\n{lines}"
    written = new_function(name, lang, root, [root / "template"], folder)
    try:
        replace_file(file, text, file.stat().st_mode & 0o777 if existed else 0o644)
    except GpufaasError:
        shutil.rmtree(root / folder)
        raise
    _ignore(root / ".gitignore")
    return existed, written


def _ignore(file: Path) -> None:
    """Keep `_IGNORED` out of git, as faas-cli does."""
    text = file.read_text() if file.exists() else ""
    known = {line.strip().strip("/") for line in text.splitlines()}
    if missing := [each for each in _IGNORED if each not in known]:
        with file.open("a") as out:
            out.write("\n" * (bool(text) and not text.endswith("\n")) + "".join(f"/{each}/\n" for each in missing))
