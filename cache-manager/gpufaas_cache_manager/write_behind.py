"""
Write-behind of the scheduler's state, to a store from which a successor starts and into which people can look.

No decision waits for it. The engine marks the keys that changed; their newest state is read when they are written. So a
key that changes a thousand times a second costs twenty writes, and a store that was away for a minute gets one write
per key.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from gpufaas_core.errors import GpufaasError
from gpufaas_core.model import Seconds
from gpufaas_core.snapshot import DeviceDoc, EngineDoc, FunctionDoc

log = logging.getLogger(__name__)

EVERY_S: Final[Seconds] = 0.05
"""A key is written no sooner after its last write: at most 20 times a second."""
ENGINE_EVERY_S: Final[Seconds] = 0.25
"""The shortest time between two writes of ``engine``, which changes with every call and is the largest."""
BEAT_S: Final[Seconds] = 10.0
"""``engine`` is written so often even if nothing happens: ages in all docs count from the moment of the newest one."""
DOCS_PER_S: Final = 1_000
"""The most docs written per second, over all keys. A doc costs about 60 µs of the scheduler's loop, so a fleet of 1,000
busy devices is written once a second and not twenty times."""

_LOOK_S: Final[Seconds] = 0.02
"""While some keys wait for their time, newly noted ones are gathered so often."""

_BATCH: Final = 64
"""Docs per write: etcd takes 128 operations in a transaction, and the loop should not encode for longer than 5 ms."""
_BATCH_BYTES: Final = 512 * 1024
_BACKOFF_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0)
_ENGINE: Final = "engine"


class StatePort(Protocol):
    """The store, for a writer that may have lost the lead without knowing it yet."""

    async def write(self, puts: Mapping[str, bytes], deletes: Sequence[str]) -> bool:
        """
        Put and delete all of it in one step if the writer still leads; False: it does not, and nothing was done.

        :raises GpufaasError: the store is away, or full; the write may have been done
        """


Doc = DeviceDoc | FunctionDoc | EngineDoc


async def _wait_for(event: asyncio.Event, timeout_s: Seconds) -> None:
    """Wait for *event*, for *timeout_s* at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):  # not wait_for, which makes a task each time
            await event.wait()


@dataclass(slots=True, eq=False)
class WriteBehind:
    """See module. Call `note` after each event of the engine; `run` until it is cancelled or the lead is lost."""

    port: StatePort
    changed: Callable[[], Sequence[str]]
    """Returns the keys that changed since its last call (``Engine.take_changed``)."""
    doc: Callable[[str], Doc | None]
    """Returns the state of a key; None: delete the key (``Engine.doc``)."""
    epoch: int
    """The writer's; every doc has it, with a number that grows with each write."""
    clock: Callable[[], Seconds] = time.monotonic
    wait: Callable[[asyncio.Event, Seconds], Awaitable[None]] = _wait_for
    seq: int = 0
    """The number of the last write."""
    lost: bool = False
    """Another scheduler leads: nothing is written any more."""
    trouble: str = ""
    """Why the last write failed; empty: it did not."""
    written: int = 0
    """The number of docs that were written, deleted ones included."""
    _noted: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: dict[str, None] = field(default_factory=dict)
    """Keys to be written, the one that has waited longest first."""
    _next_at: dict[str, Seconds] = field(default_factory=dict)
    """When a key that was just written may be written again."""
    _encoder: msgspec.json.Encoder = field(default_factory=msgspec.json.Encoder)

    def note(self) -> None:
        """Something may have changed. Cheap enough to be called after each event."""
        self._noted.set()

    @property
    def behind(self) -> int:
        """Keys that are known to differ from the store."""
        return len(self._pending)

    async def run(self) -> None:
        """Write for as long as the writer leads."""
        tries = 0
        self.note()
        while not self.lost:
            self._gather()
            now = self.clock()
            due = [key for key in self._pending if self._next_at.get(key, now) <= now][:_BATCH]
            if not due:
                await self._wait_for_more(now)
                continue
            docs = await self._write(due)
            if self.lost:
                return
            if docs < 0:
                await self._pause(_BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)])
                tries += 1
            else:
                await self._pause(docs / DOCS_PER_S)
                tries = 0

    async def flush(self) -> bool:
        """Write all that is left once, without a pause; False: it failed."""
        self._gather()
        while self._pending and not self.lost:
            if await self._write(list(self._pending)[:_BATCH]) < 0:
                return False
        return not self.lost

    def _gather(self) -> None:
        self._noted.clear()
        for key in self.changed():
            self._pending.setdefault(key)

    async def _wait_for_more(self, now: Seconds) -> None:
        """Return when something is noted, or may be written again. Nothing is due at *now*."""
        times = [self._next_at[key] for key in self._pending]
        if times:
            # A key that is noted meanwhile may be due at once, so it must not wait for the others for long. It is not
            # gathered at each note: a busy scheduler would do nothing else.
            await self._pause(min(_LOOK_S, min(times) - now))
            await self.wait(self._noted, max(0.0, min(times) - self.clock()))
            return
        self._next_at = {key: at for key, at in self._next_at.items() if at > now}
        await self.wait(self._noted, BEAT_S)
        if not self._noted.is_set():
            self._pending.setdefault(_ENGINE)

    async def _pause(self, pause_s: Seconds) -> None:
        """Wait for so long, also when something is noted."""
        if pause_s > 0:
            await self.wait(asyncio.Event(), pause_s)

    async def _write(self, keys: list[str]) -> int:
        """Write these keys as they are now; return how many were written; -1: it failed, and they are pending again."""
        puts: dict[str, bytes] = {}
        deletes: list[str] = []
        size = 0
        for key in keys:
            if size > _BATCH_BYTES:
                break
            doc = self.doc(key)
            del self._pending[key]
            if doc is None:
                deletes.append(key)
                continue
            self.seq += 1
            puts[key] = self._encoder.encode(replace(doc, epoch=self.epoch, seq=self.seq))
            size += len(puts[key])
        now = self.clock()
        for key in (*puts, *deletes):
            self._next_at[key] = now + (ENGINE_EVERY_S if key == _ENGINE else EVERY_S)
        try:
            self.lost = not await self.port.write(puts, deletes)
        except (GpufaasError, OSError) as exc:
            # Some of it may have been written. The next attempt writes the newest state of all.
            self._pending = dict.fromkeys([*puts, *deletes]) | self._pending
            if not self.trouble:
                log.warning("state.not_written keys=%d reason=%s", len(self._pending), exc)
            self.trouble = str(exc)
            return -1
        if self.lost:
            log.warning("state.not_written keys=%d reason=another scheduler leads", len(keys))
        elif self.trouble:
            log.info("state.written_again keys=%d", len(puts) + len(deletes))
            self.trouble = ""
        self.written += len(puts) + len(deletes)
        return len(puts) + len(deletes)
