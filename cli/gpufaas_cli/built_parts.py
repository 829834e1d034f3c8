"""
The parts of bundles that were built, by what they were built from, so that an edit of the code builds none of them.

::

    build/.parts/KEY/tree/         what was installed, or what build.py made
    build/.parts/KEY/part.tar      the part
    build/.parts/KEY/part.json     what it is; written last
"""

import contextlib
import hashlib
import os
import secrets
import tarfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from gpufaas_core.bundle import SITE_DIR, Part
from gpufaas_core.files import FileIdentity, hash_file, identity, remove_tree

_TREE: Final = "tree"
_TAR: Final = "part.tar"
_RECORD: Final = "part.json"
_KEPT: Final = 4
"""The most parts that are kept for no function: to undo an edit does not build again."""


class Output(msgspec.Struct, frozen=True):
    """A file of a finished build, which is uploaded."""

    path: str
    """Relative to the folder of the record that names it."""
    identity: FileIdentity
    sha256: str

    def is_whole(self, folder: Path) -> bool:
        """Whether it is as the build left it."""
        with contextlib.suppress(OSError):
            return identity(os.stat(os.path.normpath(folder / self.path))) == self.identity
        return False


def pack(target: Path, files: Mapping[str, Path]) -> str:
    """
    Write *files*, by their names in it, in this order, to the tar *target*; return its sha256. It is the same wherever,
    whenever and by whomever it is packed: without times and owners, and of modes only whether the owner may execute a
    file.
    """
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            with open(path, "rb") as content:
                member = tar.gettarinfo(fileobj=content)
                plain = tarfile.TarInfo(name)
                plain.size = member.size
                plain.mode = 0o755 if member.mode & 0o100 else 0o644
                tar.addfile(plain, content)
    return hash_file(target)


class BuiltPart(msgspec.Struct, frozen=True):
    """What was built under one key."""

    part: Part | None = None
    """None: there is nothing to send."""
    outputs: tuple[Output, ...] = ()
    """The tar of the part, if there is one, then the weights in `tree`."""
    replaced: dict[str, str] = msgspec.field(default_factory=dict)
    """Of ``made``: the author's files that build.py changed or removed, and what they were."""

    @property
    def weights(self) -> dict[str, str]:
        """Of ``made``: the weights, by their paths in `tree`, with the sha256 of each."""
        inside = f"{_TREE}/"
        return {e.path.removeprefix(inside): e.sha256 for e in self.outputs if e.path.startswith(inside)}


def key_of(*what: object) -> str:
    """Return a digest of *what*, made of values whose text says all of them."""
    return hashlib.sha256(repr(what).encode()).hexdigest()


Made = tuple[BuiltPart, Iterable[str], Iterable[str]]
"""What was made in a folder: the record so far, then by path there the files that are packed, and the weights."""


class BuiltParts:
    """See module. Safe to use from several threads; two that build the same keep what the first has built."""

    def __init__(self, build_root: Path) -> None:
        self._root = build_root / ".parts"

    def tree(self, key: str) -> Path:
        return self._root / key / _TREE

    def tar(self, key: str) -> Path:
        return self._root / key / _TAR

    def find(self, key: str) -> BuiltPart | None:
        """Return what was built under *key*, if it is whole."""
        folder = self._root / key
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = msgspec.json.decode((folder / _RECORD).read_bytes(), type=BuiltPart)
            os.utime(folder)
            if all(each.is_whole(folder) for each in found.outputs):
                return found
        return None

    def build(self, key: str, name: Literal["site", "made"], make: Callable[[Path], Made]) -> BuiltPart:
        """
        Return what *make* makes in the folder that it is given, as the part *name*. Raises what it raises.

        :raises OSError: the disk refuses
        """
        folder = self._root / key
        aside = self._root / f"{key}.{secrets.token_hex(4)}"
        tree, tar = aside / _TREE, aside / _TAR
        try:
            tree.mkdir(parents=True)
            made, packed, weights = make(tree)
            files = {f"{_TREE}/{each}": hash_file(tree / each) for each in weights}
            if packed:
                digest = pack(tar, {each.removeprefix(f"{SITE_DIR}/"): tree / each for each in packed})
                made = replace(made, part=Part(name, digest, tar.stat().st_size))
                files = {_TAR: digest, **files}
            outputs = tuple(Output(path, identity((aside / path).stat()), sha256) for path, sha256 in files.items())
            made = replace(made, outputs=outputs)
            (aside / _RECORD).write_bytes(msgspec.json.encode(made))
            if found := self.find(key):  # another thread was faster
                return found
            remove_tree(folder)
            aside.rename(folder)
            return made
        finally:
            remove_tree(aside)

    def drop_unused(self, used: Collection[str]) -> None:
        """Remove what no function uses, but for the last `_KEPT`. Nothing may be built meanwhile."""
        for left in self._root.glob("*.*"):  # of a build that was killed
            remove_tree(left)
        drop_oldest((each for each in self._root.glob("*") if each.name not in used), _KEPT)


def drop_oldest(folders: Iterable[Path], kept: int) -> None:
    """Remove *folders* but for those *kept* that were used, or made, last (`os.utime`)."""
    with contextlib.suppress(OSError):  # another command removes them, too
        for each in sorted(folders, key=lambda folder: folder.stat().st_mtime)[:-kept]:
            remove_tree(each)
