"""
Fetching what a node lacks: from other nodes first, then from the object store; by sha256, resumed where it ended.

An artifact has one transfer at a time, for all who ask. Its bytes go into a partial file (`artifacts.PartialArtifact`)
that outlives transfer, process and machine, so that the next attempt continues at its last byte, from any source
(`filling`).
"""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gpufaas_cache_manager.artifacts import ArtifactStore, PartialArtifact
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cache_manager.filling import FetchSettings, Filling, Threads
from gpufaas_cache_manager.object_store import ObjectStore
from gpufaas_cache_manager.peers import PeerClient
from gpufaas_cache_manager.sources import Sources
from gpufaas_core.errors import GpufaasError, StorageFailed
from gpufaas_core.units import Bytes

log = logging.getLogger(__name__)

Progress = Callable[[Bytes, Bytes], None]
"""Called on the event loop with the bytes that are here, and those of the whole."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Fetcher:
    """
    See module. One per artifact store; used on one event loop.

    :param holders: see `Sources`
    :param announce: called when a digest has come
    """

    def __init__(
        self,
        artifacts: ArtifactStore,
        bundles: BundleStore,
        holders: Callable[[str], Awaitable[Sequence[str]]],
        peers: PeerClient,
        store: ObjectStore | None = None,
        announce: Callable[[str], None] = lambda _: None,
        settings: FetchSettings = FetchSettings(),  # noqa: B008 (frozen)
    ) -> None:
        self._settings = settings
        self._artifacts = artifacts
        self._bundles = bundles
        self._sources = Sources(holders, peers.read, store, settings.distrust_s)
        self._announce = announce
        self._transfers: dict[str, _Transfer] = {}
        self._slots = asyncio.Semaphore(settings.transfers)
        self._threads = Threads(settings.transfers)

    async def ensure(self, digest: str, *, size: Bytes | None = None, progress: Progress | None = None) -> str:
        """
        Return when the artifact *digest* is here: ``store`` or ``peer``, where it came from, or an empty string.
        The transfer ends when all who wait for it are cancelled.

        :param size: the bytes that it must have, if that is known; a source of another size is not used
        :raises UnknownArtifact: no source has it
        :raises CorruptArtifact: all sources that have it sent wrong bytes; names them
        :raises FetchFailed: no source could be read, in several rounds; says why for each
        :raises StorageFailed: it does not fit on this disk, or that cannot be written
        """
        while True:
            if await self._threads.run(self._artifacts.has, digest):
                return ""
            transfer = self._transfers.get(digest)
            if transfer is None:
                transfer = self._transfers[digest] = _Transfer(digest, size)
                transfer.task = asyncio.get_running_loop().create_task(self._transfer(transfer))
            if not transfer.given_up:
                break
            await asyncio.wait([transfer.task])  # it still has the file
        transfer.waiting += 1
        if progress is not None:
            transfer.listeners.append(progress)
        try:
            await asyncio.shield(transfer.task)
            return transfer.origin
        finally:
            transfer.waiting -= 1
            if progress is not None:
                transfer.listeners.remove(progress)
            if not transfer.waiting and not transfer.task.done():
                transfer.given_up = True
                transfer.task.cancel()

    async def ensure_bundle(self, digest: str, *, progress: Progress | None = None) -> str:
        """
        Return when bundle *digest* and all parts and weights that it names are here, and where they came from:
        ``store`` if any did. Cheap when they already are.

        :raises InvalidSpec: the artifact is no bundle

        Otherwise as `ensure`.
        """
        origin = await self.ensure(digest)
        named = await self._threads.run(self._bundles.named_by, digest)
        sizes = {each.sha256: each.bytes for each in named}
        here = dict.fromkeys(sizes, 0)

        def said(sha256: str, done: Bytes, _: Bytes) -> None:
            here[sha256] = done
            if progress is not None:
                progress(sum(here.values()), sum(sizes.values()))

        tasks = [
            asyncio.create_task(self.ensure(sha256, size=size, progress=partial(said, sha256)))
            for sha256, size in sizes.items()
        ]
        try:
            return max(origin, *await asyncio.gather(*tasks), "")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def fetching(self) -> dict[str, tuple[Bytes, Bytes]]:
        """Return by digest what is being fetched: bytes that are here, and bytes of the whole (0: not known yet)."""
        return {digest: (each.here, each.size or 0) for digest, each in self._transfers.items()}

    async def close(self) -> None:
        """End all transfers; their partial files stay for the next start."""
        tasks = [each.task for each in self._transfers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.close()

    # --- one transfer ---

    async def _transfer(self, transfer: "_Transfer") -> None:
        digest = transfer.digest
        try:
            async with self._slots:
                if await self._threads.run(self._artifacts.has, digest):
                    return
                begun = await self._threads.finish(self._artifacts.resume, digest, undo=PartialArtifact.close)
                filling = Filling(
                    digest, begun, transfer.expected, self._sources, self._settings, self._threads, transfer.said,
                    self._artifacts,
                )  # fmt: skip
                try:
                    await filling.fill()
                    await self._threads.finish(begun.commit)
                    transfer.origin = filling.origin
                except StorageFailed as exc:
                    if isinstance(exc.__cause__, OSError) and exc.__cause__.errno in _FULL:
                        await self._threads.run(begun.discard)  # a full disk harms all others
                    raise
                finally:
                    begun.close()
        finally:
            del self._transfers[digest]
        try:
            self._announce(digest)
        except GpufaasError as exc:
            log.warning("fetch.not_announced digest=%s reason=%s", digest, exc)


@dataclass(slots=True, eq=False)
class _Transfer:
    digest: str
    expected: Bytes | None
    size: Bytes | None = None
    here: Bytes = 0
    waiting: int = 0
    given_up: bool = False
    origin: str = ""
    listeners: list[Progress] = field(default_factory=list)
    task: asyncio.Task[None] = field(init=False)

    def said(self, here: Bytes, size: Bytes | None) -> None:
        self.here, self.size = here, size
        for listener in self.listeners:
            listener(here, size or 0)
