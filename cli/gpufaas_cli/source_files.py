"""The files that a function is made from: what belongs to it, what is left out and why, and which are weights."""

import os
import pickletools
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Final, NoReturn

from pathspec import GitIgnoreSpec

from gpufaas_cli.locks import LOCK
from gpufaas_cli.stack import FILE_NAMES
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.files import FileIdentity, identity
from gpufaas_core.units import Bytes, MiB, format_bytes

NOT_HANDLER: Final = frozenset(("build", "template"))
"""Folders that OpenFaaS skips in a handler folder: it may be the working directory."""
OWN_IGNORE: Final = ".gpufaasignore"
_CACHES: Final = ("__pycache__", "*.pyc", ".*_cache", ".ipynb_checkpoints", ".DS_Store", ".#*")  # .#: a lock of Emacs
_SECRETS: Final = (".env*", "*.pem", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".secrets")
"""Of ``id_*`` those that ssh-keygen writes: ``id_map.json`` is data."""
_KINDS: Final = {
    **dict.fromkeys(_CACHES, "caches"),
    ".git": "of git",
    ".venv": "a virtual environment",
    **dict.fromkeys(_SECRETS, "secrets"),
    "node_modules": "packages of Node.js",
    LOCK: "the lock of the build",
}
"""What is never packed, by the form of its name: what it is."""
_NAMED: Final = 3
_LARGE: Final = 100 * MiB

WEIGHTS: Final = (".safetensors", ".gguf", ".pt2", ".onnx", ".onnx_data", ".onnx.data")
_PICKLED: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")
_TENSORS: Final = re.compile(
    r"(_codecs encode|(builtins|__builtin__) (set|bytearray|complex)|collections (OrderedDict|Counter)"
    r"|torch(\.cuda|\.storage)? \w+|torch\.nn\.parameter \w+|torch\.(_utils|_tensor) _rebuild_\w+"
    r"|torch\.serialization _get_layout)"
)
"""What ``torch.load(weights_only=True)`` calls, a little more: it has the last word, in the worker (docs/adr/0066)."""
_LEGACY: Final = 5
"""The pickles in a file of torch before 1.6: a number, a version, a machine, the object, its storages."""

LeavesOut = Callable[[Path, bool], bool]
"""Says of a file, or of a folder (True), whether it is left out."""


def is_cache(path: Path, _: bool = False) -> bool:
    """Return whether *path* is left out wherever it lies: in templates, and in what builds make, too."""
    return _kind(path.name) in ("caches", "of git", "a virtual environment")


@lru_cache(1 << 16)
def _kind(name: str) -> str | None:
    return next((kind for form, kind in _KINDS.items() if fnmatchcase(name, form)), None)


class Ignored:
    """
    Says what of a folder that an author keeps is not packed, and remembers why.

    In this order: what a ``.gpufaasignore`` says; what is never packed (secrets, virtual environments, …); what a
    ``.gitignore`` says, where there is no ``.gpufaasignore``. Both are read as by git: the deeper file goes before the
    one above it, up to the repository, else to the stack file. Weights that a .gitignore names are packed:
    git holds no files of their size, and the function needs them.
    """

    def __init__(self, folder: Path, skip: frozenset[str] = frozenset(), by_git: bool = True) -> None:
        """
        :param skip: folders of *folder* itself that are no part of it. With any, it is a handler folder, whose
            handler.py must be packed
        :param by_git: whether a .gitignore counts
        """
        self.left_out: dict[Path, str] = {}
        """What was left out so far: its kind, or the place of the pattern, as FILE:LINE."""
        self._folder, self._skip, self._by_git = folder.absolute(), skip, by_git
        self._specs: dict[str, GitIgnoreSpec | None] = {}

    def __call__(self, path: Path, is_folder: bool) -> bool:
        """:raises InvalidSpec: an ignore file cannot be read, or leaves out the handler"""
        folder, name = os.path.split(path.absolute())
        top = bool(self._skip) and folder == str(self._folder)
        why = "not of the function" if top and is_folder and name in self._skip else self._why(folder, name, is_folder)
        if why and top and name == "handler.py":
            raise InvalidSpec(
                f"{why} leaves out {path}, which the function needs: correct that line, or write `!handler.py` into "
                f"{path.parent / OWN_IGNORE}"
            )
        if why:
            self.left_out[path] = why
        return bool(why)

    def _why(self, folder: str, name: str, is_folder: bool) -> str | None:
        found = self._pattern(folder, f"{name}/" if is_folder else name)
        if found and self._name == OWN_IGNORE:
            return found[1] if found[0] else None
        if kind := _kind(name):
            return kind
        if is_folder and os.path.isfile(os.path.join(folder, name, "pyvenv.cfg")):
            return _KINDS[".venv"]
        return found[1] if found and found[0] and not name.endswith(WEIGHTS) else None

    def _pattern(self, folder: str, name: str) -> tuple[bool, str] | None:
        """Return what the deepest ignore file with a word on it says: whether it is left out, and where it says so."""
        while self._name:
            file = os.path.join(folder, self._name)
            if folder not in self._specs:
                self._specs[folder] = _patterns(file)
            spec = self._specs[folder]
            found = spec.check_file(name) if spec else None
            if spec and found and found.index is not None:
                # Where a pattern may take something back in, a folder says nothing of what it holds.
                moot = name.endswith("/") and any(each.include is False for each in spec.patterns)
                if found.include and str(self._folder).startswith(f"{folder}/"):
                    # Nor does a pattern that leaves out the handler's whole folder.
                    moot |= bool(spec.check_file(f"{self._folder.relative_to(folder).as_posix()}/").include)
                if not moot:
                    return bool(found.include), f"{os.path.relpath(file)}:{found.index + 1}"
            if folder == self._top:
                return None
            folder, last = os.path.split(folder)
            name = f"{last}/{name}"
        return None

    @cached_property
    def _top(self) -> str:
        around = (self._folder, *self._folder.parents)
        marked = (each for mark in (".git", *FILE_NAMES) for each in around if (each / mark).exists())
        return str(next(marked, self._folder))

    @cached_property
    def _name(self) -> str:
        """The name of the ignore files that count; empty: none do."""
        around = (each for each in (self._folder, *self._folder.parents) if each.is_relative_to(self._top))
        own = any((each / OWN_IGNORE).exists() for each in around)
        return OWN_IGNORE if own else ".gitignore" if self._by_git else ""


def _patterns(file: str) -> GitIgnoreSpec | None:
    """Return the patterns of an ignore file, by the index of their lines; None: there is none."""
    try:
        return _parsed(file, identity(os.stat(file)))
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise InvalidSpec(f"{file} cannot be read ({exc.strerror}): correct or remove it") from exc


@lru_cache(256)
def _parsed(file: str, _: FileIdentity) -> GitIgnoreSpec:
    """Kept until the file is another: a watch asks ten times a second."""
    lines = Path(file).read_text(errors="surrogateescape").split("\n")
    try:
        return GitIgnoreSpec.from_lines(line if line.strip() else "#" for line in lines)
    except (ValueError, re.error) as exc:
        raise InvalidSpec(f"{os.path.relpath(file)}: {exc}: correct or remove that line") from exc


def walk(source: Path, leaves_out: LeavesOut = is_cache) -> Iterator[Path]:
    """
    Yield the files of a folder (or the file itself) that belong to a function, sorted.

    :raises InvalidSpec: a folder cannot be read, a link leads nowhere or back, or what is neither file nor folder
    """
    if not _checked(source).is_dir():
        yield source
        return
    for directory, folders, files in os.walk(source, onerror=_unread, followlinks=True):
        at = Path(directory)
        folders[:] = sorted(each for each in folders if not leaves_out(at / each, True))
        for folder in folders:
            _checked(at / folder)
        for name in sorted(files):
            if not leaves_out(at / name, False):
                yield _checked(at / name)


def _unread(error: OSError) -> NoReturn:
    raise InvalidSpec(f"{error.filename} cannot be read ({error.strerror}): correct or remove it")


def _checked(path: Path) -> Path:
    around = path.absolute().parents if path.is_symlink() and path.is_dir() else ()
    if path.is_file() or (path.is_dir() and not any(each.resolve().is_relative_to(path.resolve()) for each in around)):
        return path
    said = f"is a link to {os.readlink(path)}, which " if path.is_symlink() else ""
    said += "contains it" if around else "is neither a file nor a folder" if path.exists() else "is not there"
    raise InvalidSpec(f"{path} {said}: correct or remove it")


def copy_tree(source: Path, target: Path, leaves_out: LeavesOut = is_cache) -> None:
    """Copy what `walk` gives, over what is there; the copies can be written."""
    for file in walk(source, leaves_out):
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


@dataclass(slots=True)
class Contents:
    files: dict[str, Bytes] = field(default_factory=dict)
    """By their places in the function's folder."""
    data: Bytes = 0
    """Of files that are no weights."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why, by the path from the working directory; of folders with a slash."""

    def told(self) -> str:
        """Return what is left out, such as ``.env (secrets), venv/ (a virtual environment, 412 files)``."""
        kinds = []
        for why in dict.fromkeys(self.left_out.values()):
            names = [name for name, of in self.left_out.items() if of == why]
            more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
            count = sum(len(files) for name in names for _, _, files in os.walk(name))
            kinds.append(f"{', '.join(names[:_NAMED])}{more} ({why}{f', {count:,} files' * (count > 0)})")
        return ", ".join(kinds)

    def warning(self) -> str:
        """Return what to say of much that is no weights; empty: it is not much."""
        what = f"{format_bytes(self.data)} of files that are no weights are packed: name in {OWN_IGNORE} what it can do"
        return f"{what} without; 'gpufaas build --list' shows them" if self.data > _LARGE else ""


def contents(handler: Path, copies: Sequence[tuple[Path, Path]], by_git: bool) -> Contents:
    """:param copies: extra files and folders, and their places in the function's folder"""
    found = Contents()
    for source, place in ((handler, Path()), *copies):
        ignored = Ignored(source, NOT_HANDLER if source == handler else frozenset(), by_git)
        for file in walk(source, ignored):
            name, size = (place / file.relative_to(source)).as_posix(), file.stat().st_size
            found.files[name] = size
            found.data += 0 if is_weights(file) else size
        for path, why in ignored.left_out.items():
            found.left_out[os.path.relpath(path) + "/" * path.is_dir()] = why
    return found


def is_weights(path: Path) -> bool:
    return path.name.endswith(WEIGHTS) or is_pickled(path)


def is_pickled(path: Path) -> bool:
    """
    Return whether the file *path* is a pickle, or a zip with one, as torch writes it.

    Most names say it. ``.bin`` may be anything: it is one if it begins as one. ``.pth`` is one of torch's, or a text
    that Python reads for its path: a text that does not end with a pickle's last opcode is none.
    """
    if path.suffix not in (".bin", ".pth"):
        return path.name.endswith(_PICKLED)
    with open(path, "rb") as file:
        start, size = file.read(4096), path.stat().st_size
        file.seek(max(0, size - 1))
        last = file.read(1)
    if path.suffix == ".bin":
        return start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05")
    return last == b"." or any(each < 9 or each > 126 for each in start)


def loads_as_tensors(path: Path) -> bool:
    """Return whether ``torch.load(weights_only=True)`` may read *path*, by the names in it. Nothing is run."""
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                return all(_names_tensors(file) for _ in range(_LEGACY))
        with zipfile.ZipFile(path) as archive:
            pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            with archive.open(pickled[0]) as entry:
                return _names_tensors(entry)
    except (OSError, ValueError, IndexError, zipfile.BadZipFile):
        return False


def _names_tensors(file: IO[bytes]) -> bool:
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            return False
        if opcode.name == "GLOBAL" and not _TENSORS.fullmatch(str(argument)):
            return False
    return True
