"""
Fetching what a node lacks: from other nodes first, then from the object store; by sha256, and from where it ended.

An artifact has one transfer at a time, whoever asks. Its bytes go into a partial file (`artifacts.PartialArtifact`)
that outlives transfer, process and machine: whoever goes on continues at its last byte, from whichever source. Only
the hash of the whole makes it an artifact. When that is wrong and one source gave all bytes, that source is named
and left out; when several did, nobody can say which, so the next attempt takes all from one.
"""

import asyncio
import contextlib
import errno
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from gpufaas_cache_manager.artifacts import ArtifactStore, PartialArtifact
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cache_manager.object_store import ObjectStore
from gpufaas_cache_manager.peers import Opened, PeerClient, PeerFailed
from gpufaas_core.errors import CorruptArtifact, FetchFailed, GpufaasError, StorageFailed, UnknownArtifact
from gpufaas_core.units import Bytes, KiB, Seconds, format_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")
Progress = Callable[[Bytes, Bytes], None]
"""Called on the event loop with the bytes that are here, and those of the whole."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    transfers: int = 4
    """At once. One fills a 10 Gb/s link; several, since small files (bundles) should not wait behind large ones."""
    patience_s: Seconds = 5.0
    """A source that sends nothing for so long is left, and the next continues."""
    slow_below: Bytes = 64 * KiB
    """A source that sends fewer bytes per second than this, over `patience_s`, is left if there is another to try."""
    rounds: int = 4
    """So often in a row are all sources asked without a new byte from any before it is given up."""
    pause_s: Seconds = 0.5
    """Between two such rounds; twice as long before each next."""
    distrust_s: Seconds = 600.0
    """A source that gave wrong bytes is not asked for them again for so long: it may have been repaired by then."""


class Fetcher:
    """
    See module. One per artifact store; used on one event loop.

    :param holders: the base URLs of those who have a digest (``http://node-b:7081``), this node not among them; a
        `GpufaasError` or OSError from it: they cannot be known now, which is tried again as a source would be
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
        settings: FetchSettings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings or FetchSettings()
        self._artifacts = artifacts
        self._bundles = bundles
        self._holders = holders
        self._peers = peers
        self._store = store
        self._announce = announce
        self._rng = rng or random.Random()
        self._transfers: dict[str, _Transfer] = {}
        self._slots = asyncio.Semaphore(self.settings.transfers)
        self._distrusted: dict[tuple[str, str], float] = {}
        # Of its own, one per transfer and some for looks at the disk: hashing must not hold up what else uses threads.
        self._threads = ThreadPoolExecutor(self.settings.transfers + 2, "fetch")

    async def ensure(self, digest: str, *, size: Bytes | None = None, progress: Progress | None = None) -> None:
        """
        Return when the artifact *digest* is here. May be given up: the last one who does so ends the transfer.

        :param size: what it must have, if that is known: a source that says otherwise is not taken from
        :raises UnknownArtifact: nobody has it
        :raises CorruptArtifact: all who have it gave wrong bytes; names them
        :raises FetchFailed: those who have it could not be read, in several attempts; says of each why
        :raises StorageFailed: it does not fit on this disk, or that cannot be written
        """
        while True:
            if await self._run(self._artifacts.has, digest):
                return
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
        finally:
            transfer.waiting -= 1
            if progress is not None:
                transfer.listeners.remove(progress)
            if not transfer.waiting and not transfer.task.done():
                transfer.given_up = True
                transfer.task.cancel()

    async def ensure_bundle(self, digest: str, *, progress: Progress | None = None) -> None:
        """
        Return when bundle *digest* and all weights that it names are here. Cheap when they are.

        :raises InvalidSpec: the artifact is no bundle

        Otherwise as `ensure`.
        """
        await self.ensure(digest)
        manifest = await self._run(self._bundles.manifest, digest)
        sizes = {weights.sha256: weights.bytes for weights in manifest.weights}
        here = dict.fromkeys(sizes, 0)

        def on_progress(sha256: str) -> Progress:
            def said(done: Bytes, _: Bytes) -> None:
                here[sha256] = done
                assert progress is not None
                progress(sum(here.values()), manifest.weight_bytes)

            return said

        tasks = [
            asyncio.get_running_loop().create_task(
                self.ensure(sha256, size=size, progress=on_progress(sha256) if progress else None)
            )
            for sha256, size in sizes.items()
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def fetching(self) -> dict[str, tuple[Bytes, Bytes]]:
        """Return what is being fetched: bytes that are here and bytes of the whole (0: not known yet), by digest."""
        return {digest: (each.here, each.size or 0) for digest, each in self._transfers.items()}

    async def close(self) -> None:
        """End all transfers; what has come of them stays for the next start."""
        tasks = [each.task for each in self._transfers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)

    # --- one transfer ---

    async def _transfer(self, transfer: "_Transfer") -> None:
        digest = transfer.digest
        try:
            async with self._slots:
                if await self._run(self._artifacts.has, digest):
                    return
                partial = await self._finish(self._run(self._artifacts.resume, digest), PartialArtifact.close)
                try:
                    await self._fill(transfer, partial)
                    await self._finish(self._run(partial.commit))
                except StorageFailed as exc:
                    if isinstance(exc.__cause__, OSError) and exc.__cause__.errno in _FULL:
                        await self._run(partial.discard)  # a full disk harms all others
                    raise
                finally:
                    partial.close()
        finally:
            del self._transfers[digest]
        try:
            self._announce(digest)
        except GpufaasError as exc:
            log.warning("fetch.not_announced digest=%s reason=%s", digest, exc)

    async def _fill(self, transfer: "_Transfer", partial: PartialArtifact) -> None:
        """Have all bytes in *partial*, and right; or raise."""
        digest, settings = transfer.digest, self.settings
        began, already = time.monotonic(), partial.size
        if partial.size and partial.whole:
            return  # only its name was missing
        givers = {"an earlier attempt"} if partial.size else set[str]()
        alone = False
        failures: dict[str, str] = {}
        fruitless, best = 0, partial.size

        async def restart() -> None:
            await self._finish(self._run(partial.restart))
            givers.clear()
            transfer.size, transfer.size_doubted = transfer.expected, False

        while True:
            sources = await self._sources(digest)
            absent, best_before = 0, best
            while sources:
                source = sources.pop(0)
                if (alone or transfer.size_doubted) and partial.size and givers != {source.name}:
                    await restart()
                try:
                    await self._take(source, transfer, partial, givers, bool(sources))
                except _SourceFailed as exc:
                    failures[source.name] = str(exc)
                    absent += exc.absent
                    best = max(best, partial.size)
                    if exc.wrong:
                        self._distrust(digest, source.name, str(exc))
                    elif not exc.absent:
                        log.warning("fetch.source_failed digest=%s source=%s reason=%s", digest, source.name, exc)
                    continue
                if partial.whole:
                    log.info(
                        "fetch.finished digest=%s bytes=%d resumed_at=%d seconds=%.3f source=%s",
                        digest, partial.size, already, time.monotonic() - began, source.name,
                    )  # fmt: skip
                    return
                if len(givers) == 1:
                    failures[source.name] = "it gave wrong bytes"
                    self._distrust(digest, source.name, f"sha256 of its {partial.size} bytes is {partial.sha256}")
                else:
                    log.warning("fetch.mixed_up digest=%s sources=%s", digest, sorted(givers))
                    alone = True
                    sources.insert(0, source)
                await restart()
            wrong = [name for name in failures if (digest, name) in self._distrusted]
            left = await self._sources(digest)
            if not left or absent == len(left):
                if wrong:
                    raise CorruptArtifact(
                        f"artifact {digest}: wrong bytes from {', '.join(wrong)}, and nobody else has it: "
                        "deploy it again"
                    )
                raise UnknownArtifact(f"artifact {digest} is on no node and in no object store: deploy it again")
            gained = best > best_before
            fruitless = 0 if gained else fruitless + 1
            if fruitless >= settings.rounds:
                said = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
                raise FetchFailed(
                    f"artifact {digest} could not be fetched, {partial.size} bytes of it are here: {said}"
                )
            if not gained:
                # Off the invocation path, and bounded by `rounds`: a holder may be restarting.
                await asyncio.sleep(settings.pause_s * 2 ** (fruitless - 1))

    async def _take(
        self, source: "_Source", transfer: "_Transfer", partial: PartialArtifact, givers: set[str], others: bool
    ) -> None:
        """Take from *source* what *partial* lacks. Returns when it is all there, right or wrong."""
        settings = self.settings
        writing: asyncio.Future[None] | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(settings.patience_s * 2):
                    opened = await stack.enter_async_context(source.open(partial.size))
                self._check_size(opened.size, transfer, partial)
                transfer.said(partial.size)
                pieces = aiter(opened.pieces)
                window_began, window_bytes = time.monotonic(), 0
                arrived = partial.size
                while arrived < opened.size:
                    async with asyncio.timeout(settings.patience_s):
                        piece = await anext(pieces, None)
                    if piece is None or arrived + len(piece) > opened.size:
                        raise _SourceFailed(f"it ended at byte {arrived} of {opened.size}")
                    arrived += len(piece)
                    if writing is not None:
                        await asyncio.shield(writing)
                        transfer.said(partial.size)
                    givers.add(source.name)
                    # Hashed and written while the next piece comes: two pieces in memory, whatever the size.
                    writing = asyncio.ensure_future(self._run(partial.write, piece))
                    window_bytes += len(piece)
                    if (passed := time.monotonic() - window_began) >= settings.patience_s:
                        if others and window_bytes < settings.slow_below * passed:
                            raise _SourceFailed(f"it sent only {format_bytes(window_bytes)} in {passed:.0f} s")
                        window_began, window_bytes = time.monotonic(), 0
                if writing is not None:
                    await asyncio.shield(writing)
                    transfer.said(partial.size)
        except TimeoutError:
            raise _SourceFailed(f"it sent nothing for {settings.patience_s:g} s") from None
        except PeerFailed as exc:
            raise _SourceFailed(str(exc), absent=exc.absent) from exc
        finally:
            if writing is not None:
                await _settled(writing)
        if writing is not None:
            writing.result()

    def _check_size(self, size: Bytes, transfer: "_Transfer", partial: PartialArtifact) -> None:
        if transfer.expected is not None and size != transfer.expected:
            raise _SourceFailed(f"it has {size} bytes of it, the bundle says {transfer.expected}", wrong=True)
        if transfer.size not in (None, size) or partial.size > size:
            # It, or who gave what is here, has wrong bytes: all of it from one source will tell.
            transfer.size_doubted = True
            transfer.size = None
            raise _SourceFailed(f"it has {size} bytes of it, another said otherwise")
        transfer.size = size
        free = self._artifacts.free()
        if size - partial.size > free:
            raise StorageFailed(
                f"cannot write {self._artifacts.root}: artifact {transfer.digest} needs "
                f"{format_bytes(size - partial.size)} more and {format_bytes(free)} are free: "
                "free space there, or start with --data on a larger disk"
            )

    async def _sources(self, digest: str) -> "list[_Source]":
        """Return whom to ask, in order: peers by lot, so that many who fetch spread over them; the store last."""
        unknown = ""
        try:
            urls = list(dict.fromkeys(await self._holders(digest)))
        except (GpufaasError, OSError) as exc:
            log.warning("fetch.holders_unknown digest=%s reason=%s", digest, exc)
            urls, unknown = [], str(exc)
        urls.sort()
        self._rng.shuffle(urls)
        sources = [_Source(url, lambda start, url=url: self._peers.read(url, digest, start)) for url in urls]  # type: ignore[misc]
        if self._store is not None:
            store = self._store
            sources.append(_Source(store.url, lambda start: _from_store(store, digest, start)))
        if unknown:
            sources.append(_Source("holders", lambda _: _nobody(unknown)))
        now = time.monotonic()
        self._distrusted = {key: until for key, until in self._distrusted.items() if until > now}
        return [each for each in sources if (digest, each.name) not in self._distrusted]

    def _distrust(self, digest: str, name: str, reason: str) -> None:
        log.error("fetch.wrong_bytes digest=%s source=%s reason=%s", digest, name, reason)
        self._distrusted[digest, name] = time.monotonic() + self.settings.distrust_s

    async def _run(self, action: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, action, *arguments)

    async def _finish(self, work: Awaitable[T], undo: Callable[[T], None] = lambda _: None) -> T:
        """Wait for *work* of a thread, also when given up: nothing may be closed under it. *undo* it then."""
        future = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            if future.exception() is None:
                undo(future.result())
            raise


@dataclass(slots=True, eq=False)
class _Transfer:
    digest: str
    expected: Bytes | None
    size: Bytes | None = None
    here: Bytes = 0
    size_doubted: bool = False
    waiting: int = 0
    given_up: bool = False
    listeners: list[Progress] = field(default_factory=list)
    task: asyncio.Task[None] = field(init=False)

    def said(self, here: Bytes) -> None:
        self.here = here
        for listener in self.listeners:
            listener(here, self.size or 0)


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    open: Callable[[Bytes], AbstractAsyncContextManager[Opened]]


class _SourceFailed(Exception):
    def __init__(self, reason: str, *, absent: bool = False, wrong: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent
        self.wrong = wrong


@contextlib.asynccontextmanager
async def _from_store(store: ObjectStore, digest: str, start: Bytes) -> AsyncIterator[Opened]:
    try:
        size = await store.head(digest)
    except StorageFailed as exc:
        raise PeerFailed(str(exc)) from exc
    if size is None:
        raise PeerFailed("it does not have it", absent=True)
    async with contextlib.aclosing(_translated(store.read(digest, start, size))) as pieces:
        yield Opened(size, pieces)


@contextlib.asynccontextmanager
async def _nobody(reason: str) -> AsyncIterator[Opened]:
    raise PeerFailed(reason)
    yield


async def _translated(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The store's failures are no failures of our own disk."""
    async with contextlib.aclosing(pieces):
        while True:
            try:
                piece = await anext(pieces, None)
            except (StorageFailed, UnknownArtifact) as exc:
                raise PeerFailed(str(exc)) from exc
            if piece is None:
                return
            yield piece


async def _settled(future: "asyncio.Future[T]") -> None:
    """Wait until *future* is done, however often the waiter is cancelled; threads end by themselves."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
