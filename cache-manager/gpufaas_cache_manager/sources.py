"""Sources of an artifact: the nodes that have it, in random order, then the object store."""

import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from gpufaas_cache_manager.object_store import ObjectStore
from gpufaas_core.errors import GpufaasError, StorageFailed, UnknownArtifact
from gpufaas_core.units import Bytes, Seconds

log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """An artifact that a source has begun to send."""

    size: Bytes
    """The size of the whole artifact."""
    pieces: AsyncIterator[bytes | memoryview]
    """From the byte asked for to the end; may end early when the source does."""


class SourceFailed(Exception):
    """
    A source did not send the bytes; says why.

    `absent`: it does not have them. `wrong`: it has others.
    """

    def __init__(self, reason: str, *, absent: bool = False, wrong: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent
        self.wrong = wrong


class Source(NamedTuple):
    name: str
    open: Callable[[Bytes], AbstractAsyncContextManager[Opened]]
    """Begins at that byte; raises `SourceFailed`, also while pieces are read."""


@dataclass(slots=True)
class Sources:
    """See module. A source that sent wrong bytes of a digest is left out for it for some time."""

    holders: Callable[[str], Awaitable[Sequence[str]]]
    """
    Returns the base URLs of the other nodes that have a digest (``http://node-b:7081``). It raises `GpufaasError` or
    OSError when they cannot be known now, which is tried again like a source that fails.
    """
    read: Callable[[str, str, Bytes], AbstractAsyncContextManager[Opened]]
    """Reads from another node: `PeerClient.read`."""
    store: ObjectStore | None
    distrust_s: Seconds
    """How long a source is left out: it may have been repaired by then."""
    _distrusted: dict[tuple[str, str], float] = field(default_factory=dict)
    """By digest and name of the source: until when it is left out."""

    async def of(self, digest: str) -> list[Source]:
        """Return whom to ask for *digest*, in this order: random for nodes, so that many who fetch spread over them."""
        unknown = ""
        try:
            urls = list(dict.fromkeys(await self.holders(digest)))
        except (GpufaasError, OSError) as exc:
            log.warning("fetch.holders_unknown digest=%s reason=%s", digest, exc)
            urls, unknown = [], str(exc)
        random.shuffle(urls)
        sources = [Source(url, partial(self.read, url, digest)) for url in urls]
        if self.store is not None:
            sources.append(Source(self.store.url, partial(_from_store, self.store, digest)))
        if unknown:
            sources.append(Source("holders", lambda _: _failing(unknown)))
        now = time.monotonic()
        self._distrusted = {key: until for key, until in self._distrusted.items() if until > now}
        return [each for each in sources if not self.is_distrusted(digest, each.name)]

    def distrust(self, digest: str, name: str, reason: str) -> None:
        log.error("fetch.wrong_bytes digest=%s source=%s reason=%s", digest, name, reason)
        self._distrusted[digest, name] = time.monotonic() + self.distrust_s

    def is_distrusted(self, digest: str, name: str) -> bool:
        return (digest, name) in self._distrusted


@contextlib.asynccontextmanager
async def _from_store(store: ObjectStore, digest: str, start: Bytes) -> AsyncIterator[Opened]:
    try:
        size = await store.head(digest)
    except StorageFailed as exc:
        raise SourceFailed(str(exc)) from exc
    if size is None:
        raise SourceFailed("it does not have it", absent=True)
    async with contextlib.aclosing(_store_pieces(store, digest, start, size)) as pieces:
        yield Opened(size, pieces)


async def _store_pieces(store: ObjectStore, digest: str, start: Bytes, size: Bytes) -> AsyncGenerator[bytes]:
    """The store's failures must not look like failures of this node's disk."""
    async with contextlib.aclosing(store.read(digest, start, size)) as pieces:
        try:
            async for piece in pieces:
                yield piece
        except (StorageFailed, UnknownArtifact) as exc:
            raise SourceFailed(str(exc)) from exc


@contextlib.asynccontextmanager
async def _failing(reason: str) -> AsyncIterator[Opened]:
    raise SourceFailed(reason)
    yield
