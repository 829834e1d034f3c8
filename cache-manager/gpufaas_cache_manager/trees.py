"""
Tars that are extracted once, as directories that cannot be written: bundles, and their parts.

A worker leaves nothing to the next one: no file and no folder can be written, and bytecode is made when a tar is
extracted. What is here can be made again from the artifacts, and is where another release or another Python made it.
"""

import contextlib
import ctypes
import errno
import lzma
import os
import secrets
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import Any, Final, NoReturn

from msgspec import Struct

from gpufaas_cache_manager.artifacts import storage_errors
from gpufaas_cache_manager.bytecode import compile_modules
from gpufaas_core.bundle import MANIFEST
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.files import remove_tree
from gpufaas_core.units import Bytes, GiB, MiB, format_bytes

ASIDE: Final = ".aside-"
MADE_BY: Final = f".{sys.implementation.cache_tag}"
"""A file in each directory that cannot be written; its name says which Python its bytecode is for."""
UNREADABLE: Final = (
    tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, BadGzipFile, ValueError, OverflowError, RecursionError,
    KeyError,
)  # fmt: skip
"""What `tarfile` and the decompressors raise for bytes that are no tar, or a damaged one."""
_ITS_FAULT: Final = (
    errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.EILSEQ,
    errno.ENOTEMPTY, errno.ENOENT,
)  # fmt: skip
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LONGEST_NAME: Final[Bytes] = 64 * 1024
"""The most bytes of a name whose header continues in the next blocks: `tarfile` reads it into memory as a whole."""


class BundleLimits(Struct, frozen=True):
    """How large an unpacked bundle, or part of one, may be; an upload of 13 MiB can be 3 GiB of zeros."""

    total: Bytes = 2 * GiB
    """All files; weights are not among them."""
    members: int = 100_000
    manifest: Bytes = 4 * MiB


class Trees:
    """
    The directories under *root*, by the digests of the tars. Safe to use from several threads; one process per *root*.

    :param what: is in the tars, for messages
    :raises StorageFailed: *root* cannot be made or written
    """

    def __init__(self, root: Path, what: str, limits: BundleLimits) -> None:
        self.root = root
        self._what = what
        self._limits = limits
        with storage_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            for each in root.iterdir():
                if each.name.startswith(ASIDE) or not (each / MADE_BY).exists():
                    remove_tree(each)

    def digests(self) -> list[str]:
        """Return what is extracted, in no order."""
        return [path.name for path in self.root.iterdir() if not path.name.startswith(ASIDE)]

    def remove(self, digest: str) -> None:
        """Remove the directory of *digest*. No error when it is not there."""
        aside = self._aside()
        with storage_errors(self.root):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.root / digest, aside)  # in one step: nobody sees half of it
            remove_tree(aside)

    def extract(self, tar: Path, digest: str, finish: Callable[[Path], object] = lambda _: None) -> Path:
        """
        Return the directory of *digest*, with what is in *tar*.

        :param finish: adds to the directory before it is compiled and sealed
        :raises InvalidSpec: it is no tar, or too large
        :raises StorageFailed: no room, or not writable
        """
        directory, aside = self.root / digest, self._aside()
        try:
            with storage_errors(self.root):
                aside.mkdir()
                try:
                    with tarfile.open(tar, "r:*", tarinfo=Member) as opened:
                        _check(opened, self._limits)
                        opened.extractall(aside, filter="data")
                    finish(aside)
                except UNREADABLE as exc:
                    raise InvalidSpec(f"{self._what} {digest} is no tar that may be extracted: {exc}") from exc
                except OSError as exc:
                    if exc.errno in _ITS_FAULT:  # two files of one name, a name that is too long
                        raise InvalidSpec(f"{self._what} {digest} cannot be extracted: {exc}") from exc
                    raise
                (aside / MADE_BY).touch()
                compile_modules(aside)
                _seal(aside)
                try:
                    os.rename(aside, directory)
                except OSError:
                    if not directory.is_dir():  # otherwise another thread was faster: same bytes
                        raise
        finally:
            remove_tree(aside)
        return directory

    def _aside(self) -> Path:
        return self.root / f"{ASIDE}{secrets.token_hex(8)}"


class Member(tarfile.TarInfo):
    """A header; refuses names of gigabytes, one or all together, and sparse files: `tarfile` lists their holes."""

    def _proc_member(self, tar: Any) -> tarfile.TarInfo:
        if self.type in _LONG_HEADERS:
            tar.long_names = getattr(tar, "long_names", 0) + self.size  # of which `tarfile` reads a MiB in up to 0.2 s
            if self.size > _LONGEST_NAME or tar.long_names > 256 * _LONGEST_NAME:
                raise tarfile.ReadError(f"a header of {format_bytes(self.size)}, {format_bytes(tar.long_names)} in all")
        return super()._proc_member(tar)  # type: ignore[misc,no-any-return]

    def _proc_sparse(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a file in it is sparse")

    _proc_gnusparse_10 = _proc_sparse


_LONG_HEADERS: Final = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip


def _check(tar: tarfile.TarFile, limits: BundleLimits) -> None:
    """Raise InvalidSpec if *tar* exceeds *limits*; before the first file is written: 100,000 take half a minute."""
    total = 0
    folders = set[int]()
    for seen, member in enumerate(tar, 1):
        folder = os.path.dirname(member.name)
        while folder and (key := hash(folder)) not in folders:  # not the names: of 4 KiB each
            folders.add(key)
            folder = os.path.dirname(folder)
        if seen + len(folders) > limits.members:
            raise InvalidSpec(
                f"the bundle has more than {limits.members} files and folders: put data into an archive of its own"
            )
        if member.name == MANIFEST:
            check_size(member.size, limits.manifest)
        total += max(0, member.size)
        if total > limits.total:
            raise InvalidSpec(
                f"the bundle is more than {format_bytes(limits.total)} when it is unpacked: large files belong into "
                "its weights"
            )


def check_size(manifest: Bytes, limit: Bytes) -> None:
    if manifest > limit:
        raise InvalidSpec(f"{MANIFEST} of the bundle has more than {format_bytes(limit)}")


def _seal(directory: Path) -> None:
    """
    Make all of it read-only. Its files are synced before the directory gets its name: after a power cut it is complete
    or absent.
    """
    for path in files_in(directory):
        path.chmod(0o555 if path.stat().st_mode & 0o100 else 0o444)
    for folder, _, _ in os.walk(directory):
        os.chmod(folder, 0o555)
    with open(directory / MADE_BY) as one:  # any file tells the file system; transformers has 4,000, of 3 ms each
        if _LIBC.syncfs(one.fileno()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))


def files_in(directory: Path) -> Iterator[Path]:
    """Yield the files below *directory* that are no links."""
    return (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
