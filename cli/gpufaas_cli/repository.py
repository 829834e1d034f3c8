"""
The templates of functions, from git: what ``template pull`` and a build with a missing template do.

A repository has ``template/NAME/`` folders. They are copied to our ``template/``; each gets a ``meta.json`` that says
where it came from. ``URL#ref`` is a branch or tag, ``URL#sha-<hex>`` a commit; then the copies are called ``NAME@ref``.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from gpufaas_cli.stack import Stack, StackFunction, TemplateSource
from gpufaas_cli.stack_text import BadStack
from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_templates import Template, find_template

DOCKERFILE: Final = "dockerfile"
"""The ``lang`` that has no template: the handler folder contains a Dockerfile."""
DEFAULT_REPOSITORY: Final = "https://github.com/openfaas/templates.git"
META: Final = "meta.json"
_FOLDER: Final = "template"
_REF: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_COMMIT: Final = re.compile(r"sha-([0-9a-fA-F]{7,64})")
_CLONE_S: Final = 300.0
_STORE: Final = "OPENFAAS_TEMPLATE_STORE_URL"


def bare(name: str) -> str:
    """Return ``NAME@ref`` without its ref."""
    return name.partition("@")[0]


def source_of(stack: Stack, template: TemplateSource) -> str:
    """
    Return the repository that the stack file gives *template*.

    :raises BadStack: it gives none; says who would look into a store
    """
    ref = template.name.partition("@")[2]
    source = template.source
    if source is None:
        raise BadStack(
            f"{stack.path}: template {template.name} has no source: pull it with 'faas-cli template store pull "
            f"{template.name}', or add 'source: URL' to it under configuration.templates"
        )
    if "://" not in source and (stack.folder / source.partition("#")[0]).exists():
        source = str(stack.folder / source)
    return f"{source}#{ref}" if ref and "#" not in source else source


def template_of(
    stack: Stack, function: StackFunction, fetches: bool, progress: Callable[[str], None] = lambda _: None
) -> Template | None:
    """
    Return the template of *function*; None for a ``dockerfile``, which has none.

    A missing one is pulled from the source that the stack file gives it.

    :param fetches: False: nothing is pulled
    :raises InvalidSpec: there is none; says which is near
    :raises BadStack: the stack file lists it without a source
    """
    assert function.lang is not None
    if function.lang.lower() == DOCKERFILE:
        return None
    source = _listed(stack, function.lang)
    ref = source.partition("#")[2] if source and "@" not in function.lang else ""
    names = [function.lang, f"{function.lang}@{ref}"] if ref else [function.lang]
    refused: InvalidSpec | None = None
    for name in names:
        try:
            return find_template(name, stack.template_dirs())
        except InvalidSpec as exc:
            refused = refused or exc
    assert refused is not None
    if not fetches:
        raise refused
    if source is None:
        if any(bare(function.lang) == bare(each.name) for each in stack.templates):
            source_of(stack, TemplateSource(function.lang))
        if os.environ.get(_STORE):
            raise InvalidSpec(f"{refused}; {_STORE} is read by 'faas-cli template store pull {function.lang}' only")
        raise refused
    progress(f"pulling template {function.lang} from {source}")
    pulled = pull(source, stack.folder / "template", only=bare(function.lang))
    return find_template(pulled.written[0], stack.template_dirs())


def _listed(stack: Stack, lang: str) -> str | None:
    """The repository that the stack file names for *lang*; None when it names none."""
    for each in stack.templates:
        if each.source and bare(lang) == bare(each.name):
            return source_of(stack, TemplateSource(lang if "@" in lang else each.name, each.source))
    return None


# --- pulling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pulled:
    written: tuple[str, ...]
    kept: tuple[str, ...]
    """Existed already, and were not overwritten."""


def default_repository() -> str:
    return os.environ.get("OPENFAAS_TEMPLATE_URL") or DEFAULT_REPOSITORY


def pull(source: str, into: Path, overwrite: bool = True, only: str | None = None) -> Pulled:
    """
    Copy the templates of the repository *source*, ``URL[#ref]`` or a path, to the folder *into*.

    :param only: copy this template only; its name without ref
    :raises InvalidSpec: it cannot be cloned, has no templates, or not that one; with git's own words
    :raises StorageFailed: *into* cannot be written
    """
    url, _, ref = source.partition("#")
    if not url or url.startswith("-"):
        raise InvalidSpec(f"{source!r} is not a repository: write for example {DEFAULT_REPOSITORY}")
    if ref and not _REF.fullmatch(ref):
        raise InvalidSpec(f"{ref!r} is not a branch, tag or sha-COMMIT: write {url}#REF")
    if "://" not in url and Path(url).exists():
        url = str(Path(url).absolute())
    with _clone(url, ref) as (clone, commit):
        found = _templates(clone)
        if not found:
            raise InvalidSpec(
                f"{_shown(url)} has no templates: folders template/NAME/ with a template.yml are expected"
            )
        if only is not None:
            if only not in found:
                raise InvalidSpec(f"{_shown(url)} has no template {only!r}; it has {', '.join(sorted(found))}")
            found = {only: found[only]}
        written, kept = [], []
        for name, folder in sorted(found.items()):
            target = into / (f"{name}@{ref}" if ref else name)
            if target.exists() and not overwrite:
                kept.append(target.name)
                continue
            meta = {"repository": _shown(url), **({"ref_name": ref} if ref else {}), "sha": commit}
            meta["written_at"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            _replace(folder, target, meta)
            written.append(target.name)
    return Pulled(tuple(written), tuple(kept))


@contextlib.contextmanager
def _clone(url: str, ref: str) -> Iterator[tuple[Path, str]]:
    """Give a clone, which is removed afterwards, and its commit."""
    with tempfile.TemporaryDirectory(prefix="gpufaas-template-") as folder:
        clone = Path(folder, "clone")
        commit = _COMMIT.fullmatch(ref)
        shallow = [] if commit else ["--depth=1", "--single-branch"]
        branch = ["--branch", ref] if ref and not commit else []
        _git(["clone", "--config", "core.autocrlf=false", *shallow, *branch, "--", url, str(clone)], _shown(url, ref))
        if commit:
            _git(["-C", str(clone), "checkout", "--detach", commit[1]], _shown(url, ref))
        yield clone, _git(["-C", str(clone), "rev-parse", "HEAD"], _shown(url, ref)).strip()


def _git(arguments: list[str], shown: str) -> str:
    # No terminal: a private repository is refused in words, instead of a question that no script can answer.
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # of a hook that we may run under
        env.pop(name, None)
    try:
        done = subprocess.run(
            ["git", *arguments], check=False, text=True, errors="replace", env=env, timeout=_CLONE_S,
            stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError as exc:
        raise InvalidSpec("templates are pulled with git, which is not installed here") from exc
    except subprocess.TimeoutExpired as exc:
        raise InvalidSpec(f"{shown} was not cloned within {_CLONE_S:g} s: try again, or clone it yourself") from exc
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        fatal = [line for line in said if line.startswith(("fatal:", "error:"))] or said[-1:]
        raise InvalidSpec(f"cannot pull {shown}: {'; '.join(fatal) or 'git failed without a word'}")
    return done.stdout


def _templates(clone: Path) -> dict[str, Path]:
    folder = clone / _FOLDER
    found = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    return {each.name: each for each in found if each.is_dir() and not each.is_symlink() and _is_template(each)}


def _is_template(folder: Path) -> bool:
    return (folder / "template.yml").is_file() or (folder / "Dockerfile").is_file()


def _replace(folder: Path, target: Path, meta: dict[str, str]) -> None:
    """Copy to a folder aside, then rename it: a template is never incomplete."""
    _check_links(folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pulling-") as aside:
            copy = Path(aside, "copy")
            shutil.copytree(folder, copy, symlinks=True)
            (copy / META).write_text(json.dumps(meta, indent=2) + "\n")
            if target.exists():
                shutil.rmtree(target)
            copy.rename(target)
    except OSError as exc:
        raise StorageFailed(f"cannot write the template {target}: {exc.strerror or exc}") from exc


def _check_links(folder: Path) -> None:
    """A link that leads out of its template would bring files of this machine into what is built from it."""
    for each in folder.rglob("*"):
        if each.is_symlink() and not each.resolve().is_relative_to(folder.resolve()):
            raise InvalidSpec(
                f"template {folder.name} has a link {each.relative_to(folder)} that leads out of it, to "
                f"{os.readlink(each)}: it is not pulled"
            )


def _shown(url: str, ref: str = "") -> str:
    """The URL without a password."""
    if "://" in url and "@" in (parts := urlsplit(url)).netloc:
        url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return f"{url}#{ref}" if ref else url
