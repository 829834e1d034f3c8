"""
Memory for large bodies whose length is known: they are received into memory that is there already, past the parser.

A parser cuts a body into pieces, and each is copied three times before it is a part of the whole. New memory for each
body costs more than that: the kernel makes its pages. So the memory of bodies is used again.
"""

import asyncio
import mmap
from typing import Final, Protocol, runtime_checkable

from gpufaas_core.lent import lend
from gpufaas_core.units import Bytes, KiB, MiB, Seconds

LEAST: Final[Bytes] = 256 * KiB
"""Smaller bodies are read as all requests are."""
MOST: Final[Bytes] = 16 * MiB
"""Larger ones wait on disk, or stream."""
QUICK_S: Final[Seconds] = 0.1
"""A body that may stream has this long to become whole; else it streams."""
_ALL: Final[Bytes] = 128 * MiB
"""The most memory for bodies."""
_IDLE_S: Final[Seconds] = 10.0
_PAGE: Final[Bytes] = 2 * MiB


class BodyMemory:
    """The memory for large bodies of a process, bounded. What is not used for a while goes back to the kernel."""

    def __init__(self, bound: Bytes = _ALL) -> None:
        self.held: Bytes = 0
        self._bound = bound
        self._free: list[tuple[Seconds, mmap.mmap]] = []
        self._loop = asyncio.get_running_loop()
        self._sweeping: asyncio.TimerHandle | None = None

    def take(self, size: Bytes) -> "tuple[memoryview, memoryview] | None":
        """
        Return *size* bytes, and the same to write to, which do not keep them. None: there are none. They are free when
        the first one, and all parts of it, are gone.
        """
        at = next((at for at, (_, each) in enumerate(self._free) if len(each) >= size), -1)
        if at >= 0:
            _, memory = self._free.pop(at)
        else:
            wanted = -(-size // _PAGE) * _PAGE
            while self._free and self.held + wanted > self._bound:
                self.held -= len(self._free.pop(0)[1])
            if self.held + wanted > self._bound:
                return None
            try:
                memory = mmap.mmap(-1, wanted)
            except OSError:
                return None
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self.held += wanted
        return lend(memory, 0, len(memory), self._give_back, memory)[:size], memoryview(memory)[:size]

    def _give_back(self, memory: mmap.mmap) -> None:
        self._free.append((self._loop.time(), memory))
        if self._sweeping is None and not self._loop.is_closed():
            self._sweeping = self._loop.call_later(_IDLE_S, self._sweep)

    def _sweep(self) -> None:
        old = self._loop.time() - _IDLE_S
        while self._free and self._free[0][0] <= old:
            self.held -= len(self._free.pop(0)[1])
        self._sweeping = self._loop.call_later(_IDLE_S, self._sweep) if self._free else None


@runtime_checkable
class Filler(Protocol):
    """A caller whose connection can receive a body past its parser."""

    async def fill(self, into: memoryview, first: bytes, within_s: Seconds | None) -> Bytes:
        """
        Receive the rest of a body that began with *first* and fills *into*. Return how much is there: all, or after
        *within_s*, or where the connection cannot do this, less. Then `receive` has the rest.

        :raises CallCancelled: the caller went away
        """
