"""
Filling a partial file from its sources, one after another: each continues where the last one ended.

Only the hash of the whole makes the bytes an artifact. When it is wrong and one source sent all of them, that source is
named and left out; when several did, which one lied cannot be known, so the next attempt takes all from one.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from gpufaas_cache_manager.artifacts import ArtifactStore, PartialArtifact
from gpufaas_cache_manager.sources import Source, SourceFailed, Sources
from gpufaas_core.errors import CorruptArtifact, FetchFailed, StorageFailed, UnknownArtifact
from gpufaas_core.units import Bytes, KiB, Seconds, format_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")
_EARLIER: Final = "an earlier attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    transfers: int = 4
    """At once. One fills a 10 Gb/s link; several, since small files (bundles) should not wait behind large ones."""
    patience_s: Seconds = 5.0
    """A source that sends nothing for so long is left, and the next continues."""
    slow_below: Bytes = 64 * KiB
    """A source that sends fewer bytes per second than this, over `patience_s`, is left if there is another to try."""
    rounds: int = 4
    """A fetch is given up after so many rounds over all sources in a row without a new byte."""
    pause_s: Seconds = 0.5
    """Between two such rounds; twice as long before each next."""
    distrust_s: Seconds = 600.0
    """A source that sent wrong bytes is not asked for them again for so long: it may have been repaired by then."""


class Threads:
    """
    Threads for files: one per transfer, and two for looks at the disk.

    Not the loop's own threads: hashing must not hold up other users of those.
    """

    def __init__(self, transfers: int) -> None:
        self._pool = ThreadPoolExecutor(transfers + 2, "fetch")

    async def run(self, action: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, action, *arguments)

    async def finish(self, action: Callable[..., T], *arguments: object, undo: Callable[[T], None] | None = None) -> T:
        """Run *action*, and wait for it also when cancelled: its file must not be closed under it. *undo* it then."""
        future = asyncio.ensure_future(self.run(action, *arguments))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            if undo is not None and future.exception() is None:
                undo(future.result())
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False)


@dataclass(slots=True, eq=False)
class Filling:
    """See module."""

    _digest: str
    _partial: PartialArtifact
    _expected: Bytes | None
    """The size that the artifact must have, if that is known."""
    _sources: Sources
    _settings: FetchSettings
    _threads: Threads
    _said: Callable[[Bytes, Bytes | None], None]
    """Called with the bytes that are here, and those of the whole (None: not known yet)."""
    _artifacts: ArtifactStore
    _size: Bytes | None = None
    _size_doubted: bool = False
    """Two sources disagree about the size."""
    _givers: set[str] = field(default_factory=set)
    """The sources of the bytes that are here."""
    _one_source: bool = False
    """All bytes are taken from one source: those of several were wrong."""
    _failures: dict[str, str] = field(default_factory=dict)
    _best: Bytes = 0
    _resumed_at: Bytes = 0
    _began: Seconds = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._best = self._resumed_at = self._partial.size
        if self._partial.size:
            self._givers.add(_EARLIER)

    @property
    def origin(self) -> str:
        """``store`` if bytes came from the object store, else ``peer``; empty: all were here."""
        givers, store = self._givers - {_EARLIER}, self._sources.store
        return "store" if store is not None and store.url in givers else "peer" if givers else ""

    async def fill(self) -> None:
        """
        Return when all bytes are in the partial file, and right.

        :raises UnknownArtifact, CorruptArtifact, FetchFailed, StorageFailed: as `Fetcher.ensure`
        """
        if self._partial.size and self._partial.whole:
            return  # only its name was missing
        fruitless = 0
        while True:
            best = self._best
            absent = await self._round()
            if absent is None:
                return
            left = await self._sources.of(self._digest)
            if not left or absent == len(left):
                raise self._why_none()
            fruitless = 0 if self._best > best else fruitless + 1
            if fruitless >= self._settings.rounds:
                said = "; ".join(f"{name}: {reason}" for name, reason in self._failures.items())
                raise FetchFailed(
                    f"artifact {self._digest} could not be fetched, {self._partial.size} bytes of it are here: {said}"
                )
            if fruitless:
                # Not on the path of a warm call, and bounded by `rounds`: a holder may be restarting.
                await asyncio.sleep(self._settings.pause_s * 2 ** (fruitless - 1))

    async def _round(self) -> int | None:
        """Ask all sources in turn. Return how many do not have it; None: all bytes are here, and right."""
        partial = self._partial
        sources, absent = await self._sources.of(self._digest), 0
        while sources:
            source = sources.pop(0)
            if (self._one_source or self._size_doubted) and partial.size and self._givers != {source.name}:
                await self._restart()
            try:
                await self._take(source, others=bool(sources))
            except SourceFailed as exc:
                absent += exc.absent
                self._note(source, exc)
                continue
            if partial.whole:
                log.info(
                    "fetch.finished digest=%s bytes=%d resumed_at=%d seconds=%.3f source=%s",
                    self._digest, partial.size, self._resumed_at, time.monotonic() - self._began, source.name,
                )  # fmt: skip
                return None
            if len(self._givers) == 1:
                self._failures[source.name] = "it gave wrong bytes"
                reason = f"sha256 of its {partial.size} bytes is {partial.sha256}"
                self._sources.distrust(self._digest, source.name, reason)
            else:
                log.warning("fetch.mixed_up digest=%s sources=%s", self._digest, sorted(self._givers))
                self._one_source = True
                sources.insert(0, source)
            await self._restart()
        return absent

    def _note(self, source: Source, failure: SourceFailed) -> None:
        self._failures[source.name] = str(failure)
        self._best = max(self._best, self._partial.size)
        if failure.wrong:
            self._sources.distrust(self._digest, source.name, str(failure))
        elif not failure.absent:
            log.warning("fetch.source_failed digest=%s source=%s reason=%s", self._digest, source.name, failure)

    def _why_none(self) -> UnknownArtifact | CorruptArtifact:
        wrong = [name for name in self._failures if self._sources.is_distrusted(self._digest, name)]
        if wrong:
            return CorruptArtifact(
                f"artifact {self._digest}: wrong bytes from {', '.join(wrong)}, and nobody else has it: deploy it again"
            )
        return UnknownArtifact(f"artifact {self._digest} is on no node and in no object store: deploy it again")

    async def _restart(self) -> None:
        await self._threads.finish(self._partial.restart)
        self._givers.clear()
        self._size, self._size_doubted = self._expected, False

    async def _take(self, source: Source, others: bool) -> None:
        """Take from *source* what is missing. Returns when all bytes are here, right or wrong."""
        patience_s, partial = self._settings.patience_s, self._partial
        writing: asyncio.Future[None] | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(patience_s * 2):
                    opened = await stack.enter_async_context(source.open(partial.size))
                self._check_size(opened.size)
                self._said(partial.size, self._size)
                arrived = since = partial.size
                began = time.monotonic()
                while arrived < opened.size:
                    async with asyncio.timeout(patience_s):
                        piece = await anext(opened.pieces, None)
                    if piece is None or arrived + len(piece) > opened.size:
                        raise SourceFailed(f"it ended at byte {arrived} of {opened.size}")
                    arrived += len(piece)
                    if writing is not None:
                        await asyncio.shield(writing)
                        self._said(partial.size, self._size)
                    self._givers.add(source.name)
                    # Hashed and written while the next piece comes: two pieces in memory, whatever the size.
                    writing = asyncio.ensure_future(self._threads.run(partial.write, piece))
                    passed = time.monotonic() - began
                    if passed >= patience_s:
                        if others and arrived - since < self._settings.slow_below * passed:
                            raise SourceFailed(f"it sent only {format_bytes(arrived - since)} in {passed:.0f} s")
                        since, began = arrived, began + passed
        except TimeoutError:
            raise SourceFailed(f"it sent nothing for {patience_s:g} s") from None
        finally:
            if writing is not None:
                await _settled(writing)
        if writing is not None:
            writing.result()
            self._said(partial.size, self._size)

    def _check_size(self, size: Bytes) -> None:
        """:raises SourceFailed, StorageFailed: *size* cannot be right; it does not fit on the disk"""
        partial = self._partial
        if self._expected is not None and size != self._expected:
            raise SourceFailed(f"it has {size} bytes of it, the bundle says {self._expected}", wrong=True)
        if self._size not in (None, size) or partial.size > size:
            # This source or the one before has wrong bytes: all of it from one source will tell.
            self._size_doubted, self._size = True, None
            raise SourceFailed(f"it has {size} bytes of it, another said otherwise")
        self._size = size
        free = self._artifacts.free()
        if size - partial.size > free:
            raise StorageFailed(
                f"cannot write {self._artifacts.root}: artifact {self._digest} needs "
                f"{format_bytes(size - partial.size)} more and {format_bytes(free)} are free: "
                "free space there, or start with --data on a larger disk"
            )


async def _settled(future: Awaitable[object]) -> None:
    """Wait until *future* is done, however often the waiter is cancelled; threads end by themselves."""
    waited = asyncio.ensure_future(future)
    while not waited.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([waited])
