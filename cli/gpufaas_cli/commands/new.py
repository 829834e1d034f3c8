"""``gpufaas new``: a function from a template, and its entry in the stack file."""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufaas_cli import declare, output
from gpufaas_cli.stack import DEFAULT_GATEWAY, FILE_NAMES, BadStack, find_stack, is_own
from gpufaas_core.errors import InvalidSpec

if TYPE_CHECKING:
    from gpufaas_cli.extend import Entry

_IGNORED = ("template", "build", ".secrets")
"""What does not belong into git: what is fetched, what is made, and what nobody else is to see."""


def _plain(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """What goes into YAML without quotes."""
    if text is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.:/_-]*", text):
        raise click.BadParameter(f"{text!r} cannot be written to the stack file as it is")
    return text


@declare.command("new")
@click.argument("name", required=False)
@click.option("--lang", metavar="TEMPLATE", help="Template to start from; see --list.")
@click.option("--list", "list_them", is_flag=True, help="List the templates, and write nothing.")
@click.option(
    "-a", "--append", "yaml_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="Stack file to add it to. [default: stack.yaml or stack.yml here, else a new stack.yaml]",
)  # fmt: skip
@click.option("--handler", metavar="FOLDER", help="The function's folder, beside the stack file. [default: NAME]")
@click.option(
    "-p",
    "--prefix",
    envvar="OPENFAAS_PREFIX",
    metavar="PREFIX",
    help="Of its image; else OPENFAAS_PREFIX.",
)
@click.option("--memory-limit", metavar="SIZE", callback=_plain, help="Memory limit, as in 128Mi.")
@click.option("--cpu-limit", metavar="CORES", callback=_plain, help="CPU limit, as in 100m.")
@click.option("--memory-request", metavar="SIZE", callback=_plain, help="Memory request, as in 128Mi.")
@click.option("--cpu-request", metavar="CORES", callback=_plain, help="CPU request, as in 100m.")
@click.option("-g", "--gateway", metavar="URL", callback=_plain, help="Gateway that a new stack file names.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
def command(
    name: str | None, lang: str | None, list_them: bool, yaml_file: Path | None, handler: str | None,
    prefix: str | None, memory_limit: str | None, cpu_limit: str | None, memory_request: str | None,
    cpu_request: str | None, gateway: str | None, quiet: bool,
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
    image = f"{prefix.rstrip('/')}/{name}:latest" if prefix else f"{name}:latest"
    folder = (handler or name).removeprefix("./")
    entry: dict[str, str | dict[str, str]] = {"lang": lang, "handler": f"./{folder}", "image": image}
    for key, memory, cpu in (("limits", memory_limit, cpu_limit), ("requests", memory_request, cpu_request)):
        if given := {what: value for what, value in (("memory", memory), ("cpu", cpu)) if value}:
            entry[key] = given
    _new(name, lang, folder, entry, yaml_file or find_stack() or Path(FILE_NAMES[0]), gateway, quiet)


def _new(name: str, lang: str, folder: str, entry: "Entry", file: Path, gateway: str | None, quiet: bool) -> None:
    from gpufaas_cli.extend import extended
    from gpufaas_cli.skeletons import new_function

    existed = file.exists()
    root = file.parent
    # First the text, which may be refused, then the folder, then the file: nothing is half done.
    entry = _with_limits(entry, lang, root)
    text = extended(file, name, entry) if existed else _first(name, entry, gateway or DEFAULT_GATEWAY)
    try:
        written = new_function(name, lang, root, [root / "template"], folder)
    except InvalidSpec as exc:
        raise click.UsageError(str(exc)) from exc
    try:
        _replace(file, text)
    except BadStack:
        shutil.rmtree(root / folder)
        raise
    _ignore(root / ".gitignore")
    if quiet:
        return
    output.show(f"Folder: {root / folder} created.")
    for each in written:
        output.show(f"  {each}")
    output.show(f"Function created in folder: {root / folder}")
    output.show(f"Stack file {'updated' if existed else 'written'}: {file}")
    if welcome := _welcome(lang, root):
        output.show(f"\nNotes:\n{welcome}")
    where = "" if file.name in FILE_NAMES and root == Path() else f" -f {file}"
    output.show(f"\nNext: gpufaas up{where} && echo hi | gpufaas invoke {name} --timing")


def _with_limits(entry: "Entry", lang: str, root: Path) -> "Entry":
    """What is given goes before what the template says."""
    from gpufaas_cli.skeletons import DOCKERFILE
    from gpufaas_templates import find_template

    try:
        limits = find_template(lang, [root / "template"]).limits if lang.lower() != DOCKERFILE else {}
    except InvalidSpec as exc:
        raise click.UsageError(str(exc)) from exc
    given = entry.get("limits")
    assert not isinstance(given, str)
    return {**entry, "limits": {**limits, **(given or {})}} if limits else entry


def _first(name: str, entry: "Entry", gateway: str) -> str:
    from gpufaas_cli.extend import lines_of

    lines = "".join(f"    {each}\n" for each in lines_of(entry))
    return f"version: 1.0\nprovider:\n  name: openfaas\n  gateway: {gateway}\nfunctions:\n  {name}:\n{lines}"


def _welcome(lang: str, root: Path) -> str:
    from gpufaas_cli.skeletons import DOCKERFILE
    from gpufaas_templates import find_template

    if lang.lower() == DOCKERFILE:
        return ""

    return find_template(lang, [root / "template"]).welcome_message


def _replace(file: Path, text: str) -> None:
    """Write aside, then rename: a full disk leaves the old file."""
    file = file.resolve()
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, newline="", encoding="utf-8", delete=False) as aside:
            aside.write(text)
        os.chmod(aside.name, file.stat().st_mode & 0o777 if file.exists() else 0o644)
        os.replace(aside.name, file)
    except OSError as exc:
        raise BadStack(f"{file}: cannot be written: {exc.strerror}") from exc


def _ignore(file: Path) -> None:
    """Keep `_IGNORED` out of git, as faas-cli does."""
    text = file.read_text() if file.exists() else ""
    known = {line.strip().strip("/") for line in text.splitlines()}
    if missing := [each for each in _IGNORED if each not in known]:
        with file.open("a") as out:
            out.write("\n" * (bool(text) and not text.endswith("\n")) + "".join(f"{each}/\n" for each in missing))
