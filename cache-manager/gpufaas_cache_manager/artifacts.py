"""
Artifacts: immutable files by sha256, on disk.

::

    ROOT/sha256/ab/abcdef…          the bytes
    ROOT/sha256/ab/abcdef….json     size, mtime and inode that were seen when the bytes were last hashed; its own mtime
                                    says when the artifact was last asked for
    ROOT/incoming/…                 being written; gone after a crash and a new start
    ROOT/partial/abcdef…            the first bytes of one that is being fetched; kept, so that the fetch can resume

An artifact gets its name when all of its bytes are on the disk and have the right hash, so that no reader sees half of
one, and cannot be written. Afterwards it is trusted without reading while size, mtime and inode are the recorded ones:
hashing 500 MB takes most of a second, and a model is looked up at each load. When they differ it is hashed again; wrong
bytes are removed, so that the artifact can be uploaded again.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from gpufaas_core.errors import CorruptArtifact, InvalidSpec, StorageFailed, UnknownArtifact
from gpufaas_core.files import hash_file, sync_directory
from gpufaas_core.units import Bytes, MiB

PIECE: Final[Bytes] = 4 * MiB
"""Read or sent at once, of an artifact that may be larger than memory."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_HASHED_AT_ONCE: Final[Bytes] = 1 << 20
_ADVICE: Final[dict[int, str]] = {
    errno.ENOSPC: "free space there, or start with --data on a larger disk",
    errno.EDQUOT: "raise the quota, or start with --data on another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or start with --data on another file system",
    errno.EROFS: "mount it writable, or start with --data on a writable directory",
    errno.EACCES: "give this user the right to write there, or start with --data on a directory of its own",
    errno.EPERM: "give this user the right to write there, or start with --data on a directory of its own",
}


class _Seen(msgspec.Struct, frozen=True):
    """What the file looked like when its hash was last known to be right."""

    size: Bytes
    mtime_ns: int
    inode: int


class ArtifactStore:
    """
    The artifacts under *root*, which is made if need be. Safe to use from several threads and processes.

    :raises StorageFailed: *root* cannot be made or written
    """

    def __init__(self, root: Path) -> None:
        self._files = root / "sha256"
        self._incoming = root / "incoming"
        self._partial = root / "partial"
        with storage_errors(root):
            for each in (self._files, self._incoming, self._partial):
                each.mkdir(parents=True, exist_ok=True)
            for leftover in self._incoming.iterdir():
                _remove_if_abandoned(leftover)

    @contextlib.contextmanager
    def writer(self, digest: str) -> "Iterator[PartialArtifact]":
        """
        Take the bytes of *digest* by the writer's `write`; they become an artifact when the block ends without error.

        :raises CorruptArtifact: the bytes have another sha256; nothing is kept
        :raises StorageFailed: the disk did not take them; nothing is kept
        """
        aside = self._aside(digest)
        with storage_errors(aside):
            # Unbuffered: callers write large pieces, and an error belongs to the piece that met it.
            file = open(aside, "x+b", buffering=0)  # noqa: SIM115 (closed below, on every way out)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # a store that starts meanwhile leaves it alone
            writer = PartialArtifact(self, digest, aside, file)
            yield writer
            if not writer.whole:
                raise CorruptArtifact(
                    f"artifact {digest}: the {writer.size} bytes received have sha256 {writer.sha256}: upload it again"
                )
            writer.commit()
        finally:
            aside.unlink(missing_ok=True)
            file.close()

    def resume(self, digest: str) -> "PartialArtifact":
        """
        Continue *digest* where the last attempt to fetch it ended. Reads what is there, to hash it.

        :raises StorageFailed: another process is fetching it, or the disk refuses
        """
        check_digest(digest)
        aside = self._partial / digest
        with storage_errors(aside):
            # Not in append mode: `restart` truncates, and goes on at the beginning.
            file = os.fdopen(os.open(aside, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return PartialArtifact(self, digest, aside, file)
        except BlockingIOError:
            file.close()
            raise StorageFailed(f"{aside} is written by another process: one platform per data directory") from None
        except BaseException:
            file.close()
            raise

    def drop_partials(self, before: float) -> Bytes:
        """Remove partial files that were last written before *before* (Unix time); return their size."""
        size = 0
        for path in self._partial.iterdir():
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if stat.st_mtime < before and _remove_if_abandoned(path):
                    size += stat.st_size
        return size

    def free(self) -> Bytes:
        """Return how many bytes can still be written here."""
        return shutil.disk_usage(self._files).free

    @property
    def root(self) -> Path:
        return self._files.parent

    def has(self, digest: str) -> bool:
        """Whether `path` would succeed. Counts as asking for it: a client that hears yes does not upload it."""
        try:
            self.path(digest)
        except (UnknownArtifact, CorruptArtifact):
            return False
        self.touch(digest)
        return True

    def path(self, digest: str) -> Path:
        """
        Return the file with the bytes of *digest*, which are right. A few microseconds, unless the file was touched.

        :raises UnknownArtifact: there is none: upload it
        :raises CorruptArtifact: it was damaged on the disk, and is removed now: upload it again
        """
        target = self._target(digest)
        try:
            seen = _seen(target.stat())
        except FileNotFoundError:
            raise UnknownArtifact(f"artifact {digest} is not in {self._files}: upload it") from None
        if seen == self._recorded(target):
            return target
        with storage_errors(target):
            found = hash_file(target)
            if found == digest:
                self._record(target, seen)
                return target
            self.remove(digest)
        raise CorruptArtifact(
            f"artifact {digest} was damaged on the disk (its {seen.size} bytes now have sha256 {found}) and was "
            f"removed from {target.parent}: upload it again"
        )

    def recheck(self, digest: str) -> None:
        """Hash *digest* again, whatever its file looks like. Raises as `path`."""
        _sidecar(self._target(digest)).unlink(missing_ok=True)
        self.path(digest)

    def remove(self, digest: str) -> None:
        """Remove *digest*. Links to it, and processes that have it mapped, keep its bytes."""
        target = self._target(digest)
        with storage_errors(target):
            target.unlink(missing_ok=True)
            _sidecar(target).unlink(missing_ok=True)

    def digests(self) -> Iterator[str]:
        """Yield the artifacts that are here, in no order."""
        for path in self._files.glob("??/*"):
            if _DIGEST.fullmatch(path.name):
                yield path.name

    def touch(self, digest: str) -> None:
        """Record that *digest* was asked for now; a disk that refuses is no error."""
        with contextlib.suppress(OSError):
            os.utime(_sidecar(self._target(digest)))

    def asked_for(self, digest: str) -> float | None:
        """Return when *digest* was last asked for, or arrived, in Unix seconds; None: it is not here."""
        target = self._target(digest)
        for path in (_sidecar(target), target):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                return stat.st_mtime if target.exists() else None
        return None

    def size(self, digest: str) -> Bytes:
        """Return the size of *digest*, which is here, in bytes."""
        return self._target(digest).stat().st_size

    def _target(self, digest: str) -> Path:
        check_digest(digest)
        return self._files / digest[:2] / digest

    def _aside(self, digest: str) -> Path:
        check_digest(digest)
        return self._incoming / f"{digest}.{os.getpid()}.{secrets.token_hex(4)}"

    def _commit(self, digest: str, aside: Path, file: "IO[bytes]") -> None:
        target = self._target(digest)
        with storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.fchmod(file.fileno(), 0o444)
            os.fsync(file.fileno())
            seen = _seen(os.fstat(file.fileno()))
            os.rename(aside, target)
            sync_directory(target.parent)
            self._record(target, seen)

    def _record(self, target: Path, seen: _Seen) -> None:
        """Remember *seen*. A disk that refuses is no error: the next look hashes once more."""
        aside = self._aside(target.name)
        try:
            aside.write_bytes(msgspec.json.encode(seen))
            os.rename(aside, _sidecar(target))
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)

    def _recorded(self, target: Path) -> _Seen | None:
        try:
            return msgspec.json.decode(_sidecar(target).read_bytes(), type=_Seen)
        except (OSError, msgspec.DecodeError):
            return None


class PartialArtifact:
    """The first `size` bytes of an artifact, in a file, and their hash. Closing keeps them."""

    def __init__(self, store: ArtifactStore, digest: str, path: Path, file: "IO[bytes]") -> None:
        self.size: Bytes = 0
        self._store = store
        self._digest = digest
        self._path = path
        self._file = file
        self._hash = hashlib.sha256()
        with storage_errors(path):
            while piece := file.read(_HASHED_AT_ONCE):
                self._hash.update(piece)
                self.size += len(piece)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def whole(self) -> bool:
        """Whether these are all bytes of the digest."""
        return self.sha256 == self._digest

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """:raises StorageFailed: the disk did not take it"""
        rest = memoryview(chunk).cast("B")
        self._hash.update(rest)
        self.size += len(rest)
        with storage_errors(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def restart(self) -> None:
        """Forget all bytes."""
        with storage_errors(self._path):
            self._file.seek(0)
            self._file.truncate()
        self._hash = hashlib.sha256()
        self.size = 0

    def commit(self) -> None:
        """Make it the artifact; only when it is `whole`."""
        self._store._commit(self._digest, self._path, self._file)

    def discard(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()


def check_digest(digest: str) -> None:
    """:raises InvalidSpec: *digest* is no sha256 digest"""
    if not _DIGEST.fullmatch(digest):
        raise InvalidSpec(f"{digest[:80]!r} is not a sha256 digest: 64 digits and letters a to f are expected")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system at *path* into `StorageFailed` that says where, what, and what would help."""
    try:
        yield
    except OSError as exc:
        where = exc.filename if isinstance(exc.filename, str) else path
        advice = _ADVICE.get(exc.errno or 0, "check that disk and directory, then try again")
        raise StorageFailed(f"cannot write {where}: {exc.strerror or exc}: {advice}") from exc


async def file_pieces(path: Path, run: Callable[[Callable[[], bytes]], Awaitable[bytes]]) -> AsyncIterator[bytes]:
    """
    Yield the bytes of *path* in pieces of `PIECE`.

    :param run: runs a blocking read in a thread
    :raises StorageFailed: the file cannot be opened
    """
    with storage_errors(path):
        file = open(path, "rb", buffering=0)  # noqa: ASYNC230, SIM115 - a local file; closed below
    try:
        while data := await run(lambda: file.read(PIECE)):
            yield data
    finally:
        file.close()


def _seen(stat: os.stat_result) -> _Seen:
    return _Seen(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def _sidecar(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _remove_if_abandoned(path: Path) -> bool:
    """Remove the file of a writer that crashed, and return True; a living writer holds a lock on its file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
        return True
    return False
