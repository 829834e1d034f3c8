"""Functions from templates: ``gpufaas new``, with its entry in the stack file; ``template`` lists and pulls them."""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from gpufaas_cli import declare, flags, output, repository
from gpufaas_cli.bundles import check_name
from gpufaas_cli.files import alone, replace_file
from gpufaas_cli.source_files import NOT_HANDLER, copy_tree
from gpufaas_cli.stack import DEFAULT_GATEWAY, FILE_NAMES, find_stack, is_own, read_stack
from gpufaas_cli.stack_text import BadStack, compose, read_text
from gpufaas_core.errors import GpufaasError, InvalidSpec, StorageFailed
from gpufaas_templates import find_template, list_templates

Entry = Mapping[str, str | Mapping[str, str]]
"""Keys and values of a function's entry; values are plain words."""
_EMPTY: Final = "version: 1.0\nprovider:\n  name: openfaas\n"
_IGNORED: Final = ("template", "build", ".secrets")
"""Folders that do not belong into git: what is fetched, what is built, and secrets."""
_IMAGE_SKELETON: Final[Mapping[str, str]] = {
    "Dockerfile": """\
# Anything that serves HTTP on port 8080 is a function; SIGTERM asks it to end.
FROM docker.io/library/python:3.13-alpine
COPY server.py /home/app/
USER 65534
EXPOSE 8080
CMD ["python3", "/home/app/server.py"]
""",
    "server.py": """\
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = b"" if self.path.startswith("/_/") else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_GET


signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the first process of a container has no such default
ThreadingHTTPServer(("", 8080), Handler).serve_forever()
""",
}


def _plain(text: str) -> str:
    """What can stand in YAML without quotes."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.:/_-]*", text):
        raise InvalidSpec(f"{text!r} cannot be written to the stack file as it is")
    return text


@declare.command("new")
@click.argument("name", required=False)
@click.option("--lang", metavar="TEMPLATE", help="Template to start from; see --list.")
@click.option("--list", "list_them", is_flag=True, help="List the templates, and write nothing.")
@click.option("-a", "--append", "yaml_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Stack file to add it to. [default: stack.yaml or stack.yml here, else a new "
              "stack.yaml]")  # fmt: skip
@click.option("--handler", metavar="FOLDER", help="The function's folder, beside the stack file. [default: NAME]")
@click.option("-p", "--prefix", envvar="OPENFAAS_PREFIX", metavar="PREFIX", help="Of its image; else OPENFAAS_PREFIX.")
@declare.resources(_plain)
@click.option("-g", "--gateway", metavar="URL", callback=declare.parsed(_plain), help="Gateway of a new stack file.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def new(
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
    if lang.lower() == repository.DOCKERFILE:
        return {}, ""
    template = find_template(lang, [root / "template"])
    return template.limits, template.welcome_message


def _write(name: str, lang: str, folder: str, entry: Entry, file: Path, gateway: str) -> tuple[bool, list[Path]]:
    """Write folder and stack file; return whether that existed, and the files of the function."""
    existed, root = file.exists(), file.parent
    # First the text, which may be refused, then the folder, then the file: nothing is left half done.
    text = extended(file, name, entry, _EMPTY if existed else f"{_EMPTY}  gateway: {gateway}\n")
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


# --- the folder -------------------------------------------------------------------------------------------------------


def new_function(
    name: str, lang: str, root: Path, template_dirs: Sequence[Path] = (Path("template"),), place: str | None = None
) -> list[Path]:
    """
    Write the skeleton of template *lang* to the new folder ``root/name``, or *place* in *root*; return the files
    written, sorted.

    :raises InvalidSpec: a name that cannot be deployed, an unknown template, or the folder exists
    :raises StorageFailed: *root* cannot be written
    """
    check_name(name)
    place = place or name
    if place in NOT_HANDLER:
        raise InvalidSpec(f"a folder {place}/ has a meaning of its own here: choose another name for the function")
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise InvalidSpec(f"{place!r} is no folder beside the stack file: name one like ./src/{name}")
    folder = root / place
    template = None if lang.lower() == repository.DOCKERFILE else find_template(lang, template_dirs)
    if folder.exists() or folder.is_symlink():
        raise InvalidSpec(f"{folder} exists already: choose another name, or remove it first")
    if template is not None and not template.skeleton.is_dir():
        raise InvalidSpec(f"template {template.name} has no folder {template.handler_folder}/ in {template.path}")
    try:
        if template is not None:
            copy_tree(template.skeleton, folder)
        else:
            folder.mkdir(parents=True)
            for file, content in _IMAGE_SKELETON.items():
                (folder / file).write_text(content)
    except OSError as exc:
        shutil.rmtree(folder, ignore_errors=True)
        raise StorageFailed(f"cannot write {exc.filename or folder}: {exc.strerror or exc}") from exc
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- the stack file ---------------------------------------------------------------------------------------------------


def _lines_of(entry: Entry) -> list[str]:
    return [f"{key}: {value if isinstance(value, str) else _flow(value)}" for key, value in entry.items()]


def _flow(entry: Entry) -> str:
    return f"{{{', '.join(_lines_of(entry))}}}"


def extended(path: Path, name: str, entry: Entry, empty: str = _EMPTY) -> str:
    """
    Return the text of the stack file *path*, or *empty* where there is none yet, with one more function.

    :raises BadStack: it is no stack file, has a function of that name, or could not be extended without other changes
    """
    text = read_text(path) if path.exists() and path.stat().st_size else empty
    root = compose(path, text)
    if not isinstance(root, MappingNode):
        raise BadStack(f"{path}:1: it is not a stack file: it should begin with 'version: 1.0'")
    newline = "\r\n" if "\r\n" in text else "\n"
    by_hand = f"add the function to it by hand: {name}: {_flow(entry)}"

    key, functions = next(((key, value) for key, value in root.value if _text(key) == "functions"), (None, None))
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith(("\n", "\r")):
        lines[-1] += newline
    indent, step = 2, 2
    if key is None or functions is None:
        at = _line_after(root, lines)
        block = [f"functions:{newline}"]
    elif isinstance(functions, MappingNode) and functions.value and not functions.flow_style:
        for each, _ in functions.value:
            if _text(each) == name:
                raise BadStack(
                    f"{path}:{each.start_mark.line + 1}: there is a function {name} already: choose another name"
                )
        (first, inner), *_ = functions.value
        indent = first.start_mark.column
        if isinstance(inner, MappingNode) and inner.value and not inner.flow_style:
            step = max(1, inner.start_mark.column - indent)
        at, block = _line_after(functions, lines), []
    elif _is_empty(functions):
        # `functions:`, `functions: {}` or `functions: null`: what stands after the colon goes.
        line = key.end_mark.line
        if functions.end_mark.line != line:
            raise BadStack(f"{path}:{line + 1}: cannot extend 'functions' as it is written: {by_hand}")
        start, end = functions.start_mark.column, functions.end_mark.column
        if end > start:
            lines[line] = lines[line][:start].rstrip() + lines[line][end:]
        at, block = line + 1, []
        indent = key.start_mark.column + 2
    else:
        raise BadStack(f"{path}:{functions.start_mark.line + 1}: cannot extend 'functions' as it is written: {by_hand}")

    block.append(f"{' ' * indent}{name}:{newline}")
    block += [f"{' ' * (indent + step)}{each}{newline}" for each in _lines_of(entry)]
    result = "".join([*lines[:at], *block, *lines[at:]])
    if not _only_added(text, result, name, entry):
        raise BadStack(f"{path}: cannot be extended without changing what is in it: {by_hand}")
    return result


def _text(node: Node) -> str | None:
    return str(node.value) if isinstance(node, ScalarNode) else None


def _is_empty(node: Node) -> bool:
    if isinstance(node, MappingNode):
        return not node.value
    return isinstance(node, ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _line_after(node: Node, lines: list[str]) -> int:
    """Return the line after the last one of *node*: its own end mark is after the comments of what comes next."""
    line: int = node.end_mark.line + bool(node.end_mark.column)
    while not lines[line - 1].partition("#")[0].strip():
        line -= 1
    return line


def _only_added(before: str, after: str, name: str, entry: Entry) -> bool:
    """Return whether *after* is *before* and the new function: checked, because YAML can be written in many ways."""
    try:
        old, new = (yaml.load(text, Loader=yaml.BaseLoader) for text in (before, after))
    except yaml.YAMLError:
        return False
    if not isinstance(new, dict) or not isinstance(new.get("functions"), dict):
        return False
    added = new["functions"].pop(name, None)
    was = old["functions"] if isinstance(old.get("functions"), dict) else {}
    return added == entry and new.pop("functions") == was and new == {k: v for k, v in old.items() if k != "functions"}


_HERE: Final = Path("template")


@declare.group("template")
def template() -> None:
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
    keys = ("name", "language", "kind", "description")
    return [{key: getattr(each, key) for key in keys} for each in list_templates([_HERE])]


@template.command("list")
@declare.shows(show_templates)
def list_command() -> list[dict[str, Any]]:
    """
    List the templates that functions can be made from.

    Examples:
      gpufaas template list
      gpufaas template list --json
    """
    return templates_here()


@template.command("pull")
@click.argument("source", required=False, metavar="[URL[#REF]|stack]")
@click.option("--overwrite/--no-overwrite", default=True,
              help="Replace templates of the same name. [default: overwrite]")  # fmt: skip
@click.option("--debug", is_flag=True, hidden=True, expose_value=False)  # faas-cli's
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
    output.note(f"Fetch templates from repository: {source}")
    with output.waiting("Cloning"):
        pulled = repository.pull(source, into, overwrite, only)
    if pulled.kept and not pulled.written:
        kept = " ".join(pulled.kept)
        raise GpufaasError(f"there are {len(pulled.kept)} templates of that name already, and stay: {kept}")
    output.show(f"Wrote {len(pulled.written)} template(s) : [{' '.join(pulled.written)}] from {source}")
