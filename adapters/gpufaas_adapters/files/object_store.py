"""The object store that is a directory (port: `gpufaas_cache_manager.object_store.ObjectStore`)."""

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from gpufaas_cache_manager.artifacts import PIECE, check_digest, file_pieces, storage_errors
from gpufaas_core.errors import CorruptArtifact, StorageFailed, UnknownArtifact
from gpufaas_core.files import sync_directory
from gpufaas_core.units import Bytes

T = TypeVar("T")
_ABANDONED_S: Final = 86_400.0


class DirectoryStore:
    """`ObjectStore` on a file system that every node has mounted. The directory must be there."""

    def __init__(self, root: Path) -> None:
        self.url = f"dir:{root}"
        self._root = root
        self._files = root / "sha256"
        self._incoming = root / "incoming"
        # Of its own: a share that hangs must not take the threads that everything else waits for.
        self._threads = ThreadPoolExecutor(8, "object-store")

    async def open(self) -> None:
        await self._run(self._open)

    def _open(self) -> None:
        if not self._root.is_dir():  # made here, it would hide that a share is not mounted
            raise StorageFailed(f"object store {self.url}: {self._root} is no directory: mount it, or make it")
        with storage_errors(self._root):
            self._files.mkdir(exist_ok=True)
            self._incoming.mkdir(exist_ok=True)
            for leftover in self._incoming.iterdir():
                # By age, since locks of other machines may not be seen here.
                with contextlib.suppress(FileNotFoundError):
                    if leftover.stat().st_mtime < time.time() - _ABANDONED_S:
                        leftover.unlink()

    async def head(self, digest: str) -> Bytes | None:
        path = self._path(digest)

        def size() -> Bytes | None:
            with self._reading(path):
                try:
                    return path.stat().st_size
                except FileNotFoundError:
                    return None

        return await self._run(size)

    async def read(self, digest: str, start: Bytes, end: Bytes) -> AsyncGenerator[bytes]:
        path = self._path(digest)

        def piece(descriptor: int, at: Bytes) -> bytes:
            with self._reading(path):
                return os.pread(descriptor, min(PIECE, end - at), at)

        def opened() -> int:
            with self._reading(path):
                try:
                    return os.open(path, os.O_RDONLY)
                except FileNotFoundError:
                    raise UnknownArtifact(f"object store {self.url} has no {digest}") from None

        descriptor = await self._run(opened)
        reading: asyncio.Future[bytes] | None = None
        try:
            while start < end:
                reading = asyncio.ensure_future(self._run(lambda at=start: piece(descriptor, at)))  # type: ignore[misc]
                data = await asyncio.shield(reading)
                if not data:
                    raise StorageFailed(f"object store {self.url}: {digest} ends at byte {start}, before {end}")
                yield data
                start += len(data)
        finally:
            if reading is not None and not reading.done():
                reading.add_done_callback(lambda _: os.close(descriptor))  # not under a thread that reads it
            else:
                os.close(descriptor)

    async def write(self, digest: str, source: Path | AsyncIterator[bytes]) -> None:
        target = self._path(digest)
        aside = self._incoming / f"{digest}.{secrets.token_hex(8)}"
        pieces = file_pieces(source, self._run) if isinstance(source, Path) else source
        hasher = hashlib.sha256()

        def put(data: bytes) -> None:
            hasher.update(data)
            rest = memoryview(data)
            with storage_errors(aside):
                while rest:
                    rest = rest[os.write(descriptor, rest) :]

        def commit() -> None:
            with storage_errors(target):
                os.fsync(descriptor)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(aside, target)
                sync_directory(target.parent)

        def create() -> int:
            with storage_errors(aside):
                return os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

        descriptor = await self._run(create)
        working: asyncio.Future[None] | None = None
        try:
            async for data in pieces:
                working = asyncio.ensure_future(self._run(lambda data=data: put(data)))  # type: ignore[misc]
                await asyncio.shield(working)
            if hasher.hexdigest() != digest:
                raise CorruptArtifact(f"artifact {digest}: the bytes to store have sha256 {hasher.hexdigest()}")
            working = asyncio.ensure_future(self._run(commit))
            await asyncio.shield(working)
        finally:

            def end() -> None:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    aside.unlink(missing_ok=True)

            if working is not None and not working.done():
                await asyncio.wait([working])
            await self._run(end)

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _path(self, digest: str) -> Path:
        check_digest(digest)
        return self._files / digest[:2] / digest

    async def _run(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, action)

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StorageFailed(f"object store {self.url}: cannot read {path}: {exc.strerror or exc}") from exc
