"""
Object stores, in which artifacts outlive the nodes that have them: a shared directory, or anything that speaks S3.

::

    dir:/mnt/share/gpufaas                                    ROOT/sha256/ab/abcdef…
    s3://bucket/prefix?endpoint=http://minio:9000             prefix/sha256/abcdef…

Objects are named by the sha256 of their bytes, so they never change, and two writers of one object write the same.
`write` checks the hash of what it writes; readers check the hash of the whole, as `fetcher` does. Only an operator
deletes objects: other nodes, and clusters, may use the same store.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Protocol

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_core.units import Bytes


class ObjectStore(Protocol):
    """
    The port. Safe to use from many tasks at once.

    All raise `StorageAway` when the store does not answer, `StorageFailed` when it refuses, and `InvalidSpec` for what
    is no digest.
    """

    url: str
    """Its name in messages; without credentials."""

    async def open(self) -> None:
        """Check that it can be read, so that a wrong name or key is reported at the start and not at the first load."""

    async def head(self, digest: str) -> Bytes | None:
        """Return the size of *digest*; None: it is not there."""

    def read(self, digest: str, start: Bytes, end: Bytes) -> AsyncGenerator[bytes]:
        """
        Yield the bytes from *start* up to *end*, in pieces of at most a few MiB.

        :raises UnknownArtifact: it is not there
        """

    async def write(self, digest: str, source: Path | AsyncIterator[bytes]) -> None:
        """
        Take *source* as *digest*: all of it, or nothing.

        :raises CorruptArtifact: its bytes have another sha256; nothing is kept
        """

    async def close(self) -> None: ...


async def publish(artifacts: ArtifactStore, store: ObjectStore, digest: str) -> None:
    """Copy *digest*, which is here, to *store*, unless it is there already."""
    path = await asyncio.to_thread(artifacts.path, digest)
    if await store.head(digest) != path.stat().st_size:
        await store.write(digest, path)
