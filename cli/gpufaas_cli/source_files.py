"""The files that a function is made from: what belongs to it, copying them, and folders to build them in."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from gpufaas_core.errors import InvalidSpec

IGNORED: Final = frozenset(
    ("__pycache__", ".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store")
)
NOT_HANDLER: Final = frozenset(("build", "template"))
"""Folders that OpenFaaS skips in a handler folder: it may be the working directory."""


def walk(source: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """
    Yield the files of a folder (or the file itself) that belong to a function, sorted.

    :param skip: names that are left out directly in *source*
    :raises InvalidSpec: a folder cannot be read, a link leads nowhere or back, or what is neither file nor folder
    """
    if not _checked(source).is_dir():
        yield source
        return
    for directory, folders, files in os.walk(source, onerror=_unread, followlinks=True):
        top = Path(directory) == source
        folders[:] = sorted(each for each in folders if each not in IGNORED and not (top and each in skip))
        for folder in folders:
            _checked(Path(directory, folder))
        for name in sorted(files):
            if not (name in IGNORED or name.endswith(".pyc") or name.startswith(".#")):  # .#: as Emacs locks a file
                yield _checked(Path(directory, name))


def _unread(error: OSError) -> NoReturn:
    raise InvalidSpec(f"{error.filename} cannot be read ({error.strerror}): correct or remove it")


def _checked(path: Path) -> Path:
    around = path.absolute().parents if path.is_symlink() and path.is_dir() else ()
    if path.is_file() or (path.is_dir() and not any(each.resolve().is_relative_to(path.resolve()) for each in around)):
        return path
    said = f"is a link to {os.readlink(path)}, which " if path.is_symlink() else ""
    said += "contains it" if around else "is neither a file nor a folder" if path.exists() else "is not there"
    raise InvalidSpec(f"{path} {said}: correct or remove it")


def copy_tree(source: Path, target: Path, skip: frozenset[str] = frozenset()) -> None:
    """Copy what `walk` gives, over what is there; the copies can be written."""
    for file in walk(source, skip):
        place = target / file.relative_to(source) if file != source else target
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        shutil.copy(file, place)
        place.chmod(place.stat().st_mode | 0o200)


def find_extra(path: Path, root: Path) -> tuple[Path, Path]:
    """
    Return where the extra path *path* of ``copy`` is, and its place below the handler folder.

    :raises InvalidSpec: it does not exist, or lies outside of *root*
    """
    root = root.resolve()
    source = (root / path).resolve()
    if not source.is_relative_to(root) or source == root:
        raise InvalidSpec(f"copy: {path} must lie inside {root}, and not be it")
    if not source.exists():
        raise InvalidSpec(f"copy: {path} does not exist in {root}")
    return source, source.relative_to(root)
