"""
Bundles as directories: the tar of a function's code, extracted once, with its weights linked in.

::

    ROOT/DIGEST/gpufaas.json · function/ · site/       one per bundle; complete, since it was renamed into place
    ROOT/../compiled/DIGEST/                           what its workers compile for the next ones

The weights are hard links to their artifacts (symbolic ones across file systems): functions with the same weights
share one file, and one page cache. No file and no folder of a bundle can be written, so that a worker leaves nothing
to the next one: bytecode is made when it is extracted. Everything here can be made again from the artifacts, and is
where another release or another Python made it.
"""

import contextlib
import errno
import lzma
import os
import secrets
import sys
import tarfile
import threading
import zlib
from collections.abc import Iterator
from gzip import BadGzipFile
from pathlib import Path, PurePosixPath
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpufaas_cache_manager.artifacts import ArtifactStore, check_digest, storage_errors
from gpufaas_cache_manager.bytecode import compile_modules
from gpufaas_core.bundle import FUNCTION_DIR, MANIFEST, Manifest, WeightsFile
from gpufaas_core.errors import CorruptArtifact, InvalidSpec, UnknownArtifact
from gpufaas_core.files import remove_tree
from gpufaas_core.units import Bytes, GiB, MiB, format_bytes

_ASIDE: Final = ".aside-"
_MADE_BY: Final = f".{sys.implementation.cache_tag}"
"""A file in each bundle that cannot be written; its name says which Python its bytecode is for."""
_CODE = (".py", ".pyc", ".pyi")
_UNREADABLE: Final = (
    tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, BadGzipFile, ValueError, OverflowError, RecursionError,
    KeyError,
)  # fmt: skip
"""What `tarfile` and the decompressors raise for bytes that are no tar, or a damaged one."""
_ITS_FAULT: Final = (
    errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.EILSEQ,
    errno.ENOTEMPTY, errno.ENOENT,
)  # fmt: skip
_LONGEST_NAME: Final[Bytes] = 64 * 1024
"""The most bytes of a name whose header continues in the next blocks: `tarfile` reads it into memory as a whole."""


class BundleLimits(Struct, frozen=True):
    """How large an unpacked bundle may be; an upload of 13 MiB can be 3 GiB of zeros."""

    total: Bytes = 2 * GiB
    """All files; weights are not among them."""
    members: int = 100_000
    manifest: Bytes = 4 * MiB


class BundleStore:
    """
    The bundles under *root*, made from *artifacts*. Safe to use from several threads; one process per *root*.

    :raises StorageFailed: *root* cannot be made or written
    """

    def __init__(self, root: Path, artifacts: ArtifactStore, limits: BundleLimits | None = None) -> None:
        self._root = root
        self._limits = limits or BundleLimits()
        self._artifacts = artifacts
        self._manifests: dict[str, Manifest] = {}
        self._compiled = root.parent / "compiled"
        self._linking = threading.Lock()
        with storage_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            for each in root.iterdir():
                if each.name.startswith(_ASIDE) or not (each / _MADE_BY).exists():
                    remove_tree(each)
            for each in self._compiled.glob("*"):
                if not (root / each.name).exists():
                    remove_tree(each)

    def install(self, digest: str) -> Path:
        """
        Return the directory of bundle *digest*, ready to start workers from; extracts it when it is not there yet.

        Cheap when it is: one look at each file of weights.

        :raises UnknownArtifact: the bundle or weights of it are not here: upload them
        :raises CorruptArtifact: the bundle or weights of it are damaged: upload them again; names the file
        :raises InvalidSpec: the artifact is not a bundle
        :raises StorageFailed: no room, or not writable
        """
        manifest = self.manifest(digest)
        directory = self._root / digest
        for weights in manifest.weights:
            self._link(weights, directory)
        return directory

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of bundle *digest*; extracts it when needed. Raises as `install`."""
        known = self._manifests.get(digest)
        directory = self._root / digest
        if known is not None and directory.is_dir():
            return known
        if not directory.is_dir():
            self._extract(self._artifacts.path(digest), directory)
        manifest = _read_manifest(directory, self._limits.manifest)
        self._manifests[digest] = manifest
        return manifest

    def compiled(self, digest: str) -> Path:
        """Return the directory, which may not be there yet, for what workers of bundle *digest* compile."""
        return self._compiled / digest

    def digests(self) -> list[str]:
        """Return the bundles that are extracted, in no order."""
        return [path.name for path in self._root.iterdir() if not path.name.startswith(_ASIDE)]

    def remove(self, digest: str) -> None:
        """Remove bundle *digest*; its artifacts stay. No error when it is not there."""
        self._manifests.pop(digest, None)
        aside = self._aside()
        with storage_errors(self._root):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._root / digest, aside)  # in one step: nobody sees half of it
            remove_tree(aside)
            remove_tree(self.compiled(digest))

    def _extract(self, bundle: Path, directory: Path) -> None:
        aside = self._aside()
        try:
            with storage_errors(self._root):
                aside.mkdir()
                try:
                    with tarfile.open(bundle, "r:*", tarinfo=_Member) as tar:
                        _check(tar, self._limits)
                        tar.extractall(aside, filter="data")
                    manifest = _read_manifest(aside, self._limits.manifest)
                    for weights in manifest.weights:
                        (aside / weights.path).parent.mkdir(parents=True, exist_ok=True)
                except _UNREADABLE as exc:
                    raise InvalidSpec(f"bundle {directory.name} is no tar that may be extracted: {exc}") from exc
                except OSError as exc:
                    if exc.errno in _ITS_FAULT:  # two files of one name, a name that is too long
                        raise InvalidSpec(f"bundle {directory.name} cannot be extracted: {exc}") from exc
                    raise
                (aside / _MADE_BY).touch()
                compile_modules(aside)
                _seal(aside)
                try:
                    os.rename(aside, directory)
                except OSError:
                    if not directory.is_dir():  # otherwise another thread was faster: same bytes
                        raise
        finally:
            remove_tree(aside)

    def _link(self, weights: WeightsFile, directory: Path) -> None:
        try:
            artifact = self._artifacts.path(weights.sha256)
        except (CorruptArtifact, UnknownArtifact) as exc:
            raise type(exc)(f"weights {weights.path} of the function in {directory}: {exc}") from exc
        if (found := artifact.stat().st_size) != weights.bytes:
            raise InvalidSpec(
                f"{MANIFEST} of the bundle says {weights.bytes} bytes of {weights.path}, and its weights have {found}: "
                "build the function again"
            )
        place = directory / weights.path
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(place, artifact):
                return
        aside = place.with_name(f"{_ASIDE}{secrets.token_hex(4)}")
        with storage_errors(place), self._linking:
            place.parent.chmod(0o755)
            try:
                with contextlib.suppress(OSError):  # of another user, or on a disk that is read-only
                    artifact.chmod(0o444)  # an earlier release made it writable
                try:
                    os.link(artifact, aside)
                except OSError:
                    os.symlink(artifact.absolute(), aside)
                os.replace(aside, place)
            finally:
                place.parent.chmod(0o555)

    def _aside(self) -> Path:
        return self._root / f"{_ASIDE}{secrets.token_hex(8)}"


class _Member(tarfile.TarInfo):
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
    assert tar.fileobj is not None
    number = at = total = 0
    # First it counts what looks like a header, where files are small: `tarfile` takes 20 us for each.
    while number <= limits.members and at <= 2048 * limits.members and tar.fileobj.seek(at) == at:
        header = tar.fileobj.read(tarfile.BLOCKSIZE)
        if header[257:262] != b"ustar":
            break
        at += (max(0, tarfile.nti(header[124:136])) + 1023) // 512 * 512  # type: ignore[attr-defined]
        number += header[156:157] not in _LONG_HEADERS
    folders = set[int]()
    for seen, member in enumerate(tar, 1):
        folder = os.path.dirname(member.name)
        while folder and (key := hash(folder)) not in folders:  # not the names: of 4 KiB each
            folders.add(key)
            folder = os.path.dirname(folder)
        if max(number, seen) + len(folders) > limits.members:
            raise InvalidSpec(
                f"the bundle has more than {limits.members} files and folders: put data into an archive of its own"
            )
        if member.name == MANIFEST:
            _check_size(member.size, limits.manifest)
        total += max(0, member.size)
        if total > limits.total:
            raise InvalidSpec(
                f"the bundle is more than {format_bytes(limits.total)} when it is unpacked: large files belong into "
                "its weights"
            )


def _read_manifest(directory: Path, limit: Bytes) -> Manifest:
    """:raises InvalidSpec: there is no manifest, or it says something impossible"""
    try:
        with (directory / MANIFEST).open("rb") as file:
            content = file.read(limit + 1)
        _check_size(len(content), limit)
        manifest = msgspec.json.decode(content, type=Manifest)
    except (FileNotFoundError, IsADirectoryError):
        raise InvalidSpec(f"bundle without {MANIFEST}: make bundles with `gpufaas build`") from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidSpec(f"{MANIFEST} of the bundle is malformed: {exc}") from exc
    manifest = replace(manifest, data_bytes=_data_bytes(directory / FUNCTION_DIR, manifest))
    if manifest.version != 1:
        raise InvalidSpec(f"the bundle is of version {manifest.version}, this platform knows 1: update the platform")
    for weights in manifest.weights:
        _check_inside(weights.path)
        check_digest(weights.sha256)
        if weights.bytes < 0 or (directory / weights.path).is_dir():
            raise InvalidSpec(f"{MANIFEST} names weights {weights.path!r} of {weights.bytes} bytes: a file is expected")
    if manifest.kind == "server":
        # Its command may come from the function's envProcess: the node knows both.
        workdir = PurePosixPath(manifest.workdir)
        if workdir.is_absolute() or ".." in workdir.parts or not (directory / workdir).is_dir():
            raise InvalidSpec(f"{MANIFEST} names the directory {manifest.workdir!r}, which is not in the bundle")
        return manifest
    if not all(part.isidentifier() for part in manifest.handler.split(".")):
        raise InvalidSpec(f"{MANIFEST} names the handler {manifest.handler!r}: a module's name is expected")
    module = directory / FUNCTION_DIR / Path(*manifest.handler.split("."))
    if not (module.with_name(module.name + ".py").is_file() or (module / "__init__.py").is_file()):
        raise InvalidSpec(f"the bundle has no {FUNCTION_DIR}/{manifest.handler}.py: build it again")
    return manifest


def _check_size(manifest: Bytes, limit: Bytes) -> None:
    if manifest > limit:
        raise InvalidSpec(f"{MANIFEST} of the bundle has more than {format_bytes(limit)}")


def _data_bytes(function: Path, manifest: Manifest) -> int:
    weights = {function.parent / each.path for each in manifest.weights}
    return sum(path.stat().st_size for path in _files(function) if path not in weights and path.suffix not in _CODE)


def _check_inside(path: str) -> None:
    parts = PurePosixPath(path).parts
    if len(parts) < 2 or parts[0] != FUNCTION_DIR or ".." in parts or "\0" in path:
        raise InvalidSpec(f"{MANIFEST} names weights {path!r}: a path below {FUNCTION_DIR}/ is expected")


def _seal(directory: Path) -> None:
    """
    Make all of it read-only. Its files are synced before the directory gets its name: after a power cut it is complete
    or absent.
    """
    for path in _files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fchmod(descriptor, 0o555 if os.fstat(descriptor).st_mode & 0o100 else 0o444)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for folder, _, _ in os.walk(directory):
        os.chmod(folder, 0o555)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
