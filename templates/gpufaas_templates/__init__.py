"""
Templates: ``gpufaas new`` copies their skeletons, and ``gpufaas build`` puts functions into them.

A template is a folder as in OpenFaaS: ``template.yml`` and a skeleton of the author's folder (``function/``, or the
folder that ``handler_folder`` names). The packaged ones are folders beside this file; a user's folders, such as
``./template``, go before them. Our own section of ``template.yml`` is ``gpufaas: {kind: model|http|server|image,
command: .., packages: [..], skeleton: the template beside it whose skeleton it has, limits: {memory: ..},
description: ..}``.
"""

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import yaml

from gpufaas_core.bundle import FUNCTION_DIR, Kind
from gpufaas_core.errors import InvalidSpec
from gpufaas_templates import bounded_yaml

__all__ = ["Template", "find_template", "list_templates"]

_PACKAGED: Final = Path(__file__).parent
_FILE: Final = "template.yml"
_IMAGE: Final = "image"
"""The kind of a template that only makes container images."""
_WATCHDOG_ENV: Final = frozenset(
    ("fprocess", "mode", "upstream_url", "http_upstream_url", "PATH", "HOME", "PYTHONPATH")
)
"""Variables that a template's Dockerfile sets for its watchdog, which we replace, or for its image."""


@dataclass(frozen=True, slots=True)
class Template:
    name: str
    language: str
    kind: Kind | None
    """None: it makes container images only, and no bundles."""
    description: str
    path: Path
    skeleton: Path
    """The folder that is copied for a new function."""
    handler_folder: str = FUNCTION_DIR
    welcome_message: str = ""
    command: tuple[str, ...] = ()
    """A server's program and arguments."""
    workdir: str = FUNCTION_DIR
    """A server's working directory; ``.``: the template's own files are there, as in OpenFaaS's images."""
    port: int = 0
    """The port in a server's code; 0: it listens on PORT."""
    env: dict[str, str] = field(default_factory=dict)
    """The variables that a server's Dockerfile sets."""
    packages: tuple[str, ...] = ()
    """Our Python packages that are copied to ``gpufaas/`` in the build context of an image."""
    limits: dict[str, str] = field(default_factory=dict)
    """Limits of a new function's entry in the stack file: ``memory``."""


def list_templates(extra_dirs: Sequence[Path] = ()) -> list[Template]:
    """
    Return all templates by name; of two with the same name, the one whose folder comes first. Packaged ones come last.

    :raises InvalidSpec: a ``template.yml`` is malformed; names the file
    """
    found: dict[str, Template] = {}
    for path in _folders(extra_dirs):
        if path.name not in found:
            found[path.name] = _read(path)
    return [found[name] for name in sorted(found)]


def find_template(name: str, extra_dirs: Sequence[Path] = ()) -> Template:
    """:raises InvalidSpec: there is none of that name (says which there are), or its ``template.yml`` is malformed"""
    names = set()
    for path in _folders(extra_dirs):
        if path.name == name:
            return _read(path)
        names.add(path.name)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InvalidSpec(f"unknown template {name!r}: {hint}known are {', '.join(sorted(names))}")


def _folders(extra_dirs: Iterable[Path]) -> list[Path]:
    return [
        path
        for directory in (*extra_dirs, _PACKAGED)
        if directory.is_dir()
        for path in sorted(directory.iterdir())
        if (path / _FILE).is_file()
    ]


def _read(path: Path) -> Template:
    file = path / _FILE
    try:
        read = bounded_yaml.load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise InvalidSpec(f"{file} is not YAML: {' '.join(str(exc).split())}") from exc
    content = _mapping(read, file, "it")
    ours = _mapping(content.get("gpufaas"), file, "its section gpufaas")
    folder = _text(content.get("handler_folder")) or FUNCTION_DIR
    kind = _text(ours.get("kind")) or None
    server: dict[str, Any] = {}
    packages = tuple(map(str, ours.get("packages") or ()))
    if any(not each.startswith("gpufaas_") or not each.isidentifier() for each in packages):
        raise InvalidSpec(f"{file}: gpufaas.packages are names of packages of gpufaas, and not {', '.join(packages)}")
    skeleton = _text(ours.get("skeleton")) or path.name
    if skeleton == ".." or skeleton != Path(skeleton).name:
        raise InvalidSpec(f"{file}: gpufaas.skeleton is the name of a template beside it, and not {skeleton!r}")
    if kind == _IMAGE:
        kind = None
    elif kind == "server":
        command = _text(ours.get("command")) or _text(content.get("fprocess"))
        server = {"command": tuple(command.split())}
    elif kind is None and (server := _as_server(path, _text(content.get("fprocess")))):
        kind = "server"
    elif kind is None and (path / folder / "handler.py").is_file() and not (path / "index.js").exists():
        kind = "http"  # OpenFaaS's own Python templates: handle(event, context)
    if kind not in (None, *get_args(Kind)):
        raise InvalidSpec(f"{file}: gpufaas.kind is {kind!r}, known are {', '.join((*get_args(Kind), _IMAGE))}")
    return Template(
        name=path.name,
        language=_text(content.get("language")) or path.name,
        kind=kind,  # type: ignore[arg-type]  # checked above
        description=_text(ours.get("description")),
        path=path,
        skeleton=path.with_name(skeleton) / folder,
        handler_folder=folder,
        welcome_message=_text(content.get("welcome_message")),
        packages=packages,
        limits={key: str(value) for key, value in _mapping(ours.get("limits"), file, "gpufaas.limits").items()},
        **server,
    )


def _as_server(path: Path, fprocess: str) -> dict[str, Any]:
    """
    Return how an OpenFaaS template for Python runs without its container. It can if its watchdog is of mode http, and
    starts a program that listens at ``upstream_url``.
    """
    if not (path / "index.py").is_file() or not (path / "Dockerfile").is_file():
        return {}
    env = _docker_env((path / "Dockerfile").read_text(errors="replace"))
    command = fprocess or env.get("fprocess", "")
    upstream = re.search(r":([0-9]{1,5})/?$", env.get("http_upstream_url") or env.get("upstream_url", ""))
    if env.get("mode") != "http" or upstream is None or not command:
        return {}
    kept = {name: value for name, value in env.items() if name not in _WATCHDOG_ENV and "$" not in value}
    return {"command": tuple(command.split()), "workdir": ".", "port": int(upstream[1]), "env": kept}


def _docker_env(dockerfile: str) -> dict[str, str]:
    env: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", dockerfile).splitlines():
        if found := re.match(r"\s*ENV\s+(.*)", line, re.IGNORECASE):
            try:
                words = shlex.split(found[1])
            except ValueError:
                continue
            if all("=" in word for word in words):
                for word in words:
                    name, _, value = word.partition("=")
                    env[name] = value
            else:
                env[words[0]] = " ".join(words[1:])
    return env


def _mapping(value: Any, file: Path, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidSpec(f"{file}: {what} must be a mapping, and is {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()
