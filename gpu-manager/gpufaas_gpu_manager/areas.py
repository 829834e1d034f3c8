"""
Areas: parts of the memory that a node shares with a worker, for large bodies and answers. The node's side.

An area is lent to one call of its worker at a time (`wire`: AREA, LAID). Its pages are made in a thread before it is
lent, since that takes ten times as long as a copy into it, and so are charged to the node. Meanwhile, and whenever none
is free, bodies and answers go through the connection. What was not used for a while is given back to the kernel.
"""

import asyncio
import ctypes
import errno
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpufaas_core.lent import lend
from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import AreaHead
from gpufaas_core.wire.prefix import BrokenFrame
from gpufaas_functions.areas import MIN
from gpufaas_functions.begun import AREAS_AT
from gpufaas_functions.staged import HUGE
from gpufaas_gpu_manager.huge_pages import collapse
from gpufaas_gpu_manager.node_call import NodeCall

ALL_BYTES: Final[Bytes] = 256 * MiB
"""The most memory that the areas of all workers of a process have together."""
IDLE_S: Final[Seconds] = 10.0
SMALL: Final[Bytes] = 16 * 1024
"""A body of at most so many bytes is copied behind its head."""
_FORGET: Final = 8
"""After so many calls with small answers in a row, no area is lent for answers."""
_POPULATE_WRITE: Final = 23
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Shared = ctypes.Array[ctypes.c_char]
"""The memory, as `begun` has it."""


class _Held:
    """The bytes of all areas of this process."""

    bytes: Bytes = 0


@dataclass(slots=True, eq=False)
class Area:
    """`size` bytes of the memory, behind the counts, from `at` on."""

    at: Bytes
    size: Bytes
    used_at: Seconds = 0.0


class Areas:
    """Those of one worker, and which of its calls have them. One event loop owns it."""

    def __init__(self, shared: Shared | None = None, on_held: Callable[[Bytes], None] = lambda _: None) -> None:
        """
        :param shared: None: there is no room for areas, and all bodies and answers go in frames
        :param on_held: is told how much memory they have, whenever that changes
        """
        self.expects: Bytes = 0
        """As large was the last large answer: each call gets an area for one. 0: none of them is expected."""
        self.small: Bytes = SMALL
        """Bodies and answers of at most so many bytes go in their frames: `SMALL`, or -1 while answers are large."""
        self.lent: dict[NodeCall, Area] = {}
        self._loop = asyncio.get_running_loop()
        self._shared = shared
        self._on_held = on_held
        self._taken = [False] * (0 if shared is None else max(0, len(shared) - AREAS_AT) // HUGE)
        """The pages of 2 MiB that areas have."""
        self._free: list[Area] = []
        self._making = False
        self._small = 0
        self._held: Bytes = 0
        self._closed = False
        self._sweeping: asyncio.TimerHandle | None = None

    # --- of calls ---

    def lend(self, call: NodeCall, body: bytes | memoryview, *, answered: bool) -> AreaHead | None:
        """
        Lend *call* an area, and copy *body* there if it is large enough to lie there; None: there is none now.

        :param answered: its answer may lie there
        """
        size = len(body) if len(body) > MIN else 0
        wanted = max(size, self.expects if answered else 0)
        area = self.take(wanted) if wanted else None
        if area is None or self._shared is None:
            return None
        self.lent[call] = area
        if size:
            at = AREAS_AT + area.at
            memoryview(self._shared).cast("B")[at : at + size] = memoryview(body).cast("B")
        return AreaHead(area.at, area.size, size)

    def laid(self, call: NodeCall, size: Bytes) -> memoryview:
        """
        Return the answer of *call*, which lies in its area. That is free when nobody has the answer any more.

        :raises BrokenFrame: the call has no area of that size
        """
        area = self.lent.get(call)
        if area is None or not 0 < size <= area.size or call.bodiless:
            raise BrokenFrame(f"an answer of {size} bytes in memory that its call does not have")
        del self.lent[call]
        return lend(self._shared, AREAS_AT + area.at, area.size, self.give_back, area)[:size]

    def release(self, call: NodeCall) -> None:
        """*call* has ended."""
        if (area := self.lent.pop(call, None)) is not None:
            self.give_back(area)

    def take(self, size: Bytes) -> Area | None:
        """Return an area of at least *size* bytes; None: there is none now, and one is being made, if it can be."""
        fitting = [each for each in self._free if each.size >= size]
        if not fitting:
            self._make(size)
            return None
        area = min(fitting, key=lambda each: each.size)
        self._free.remove(area)
        return area

    def give_back(self, area: Area) -> None:
        """*area* is free."""
        if self._closed:
            self._drop(area)
            return
        area.used_at = self._loop.time()
        self._free.append(area)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(IDLE_S, self._sweep)

    def answered(self, size: Bytes) -> None:
        """A call, and no batch, was answered with *size* bytes; few are small. No area has room for very many."""
        if MIN < size <= len(self._taken) * HUGE:
            self.expects, self._small = size, 0
        elif self.expects:
            self._small += 1
            if self._small >= _FORGET:
                self.expects = 0
        self.small = -1 if self.expects else SMALL

    def close(self) -> None:
        """The worker is gone."""
        for call in list(self.lent):
            self.release(call)
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        while self._free:
            self._drop(self._free.pop())

    # --- memory ---

    def _make(self, size: Bytes) -> None:
        """Begin to make an area of *size* bytes, unless one is being made, or there is no room."""
        pages = -(-size // HUGE)
        if self._making or self._closed or not size or self._shared is None:
            return
        while (at := self._room(pages)) < 0 or _Held.bytes + pages * HUGE > ALL_BYTES:
            if not self._free:
                return
            self._drop(self._free.pop(0))
        area = Area(at * HUGE, pages * HUGE)
        self._hold(area, 1)
        try:
            made = self._loop.run_in_executor(None, _touch, self._shared, AREAS_AT + area.at, area.size)
        except RuntimeError:  # there is no room for a thread
            self._drop(area)
            return
        self._making = True
        made.add_done_callback(lambda done: self._made(area, done.result()))

    def _made(self, area: Area, there: bool) -> None:
        self._making = False
        if there:
            self.give_back(area)
        else:
            self._drop(area)

    def _room(self, pages: int) -> int:
        """Return the first of so many pages in a row that no area has; -1: there are none."""
        run = 0
        for at, taken in enumerate(self._taken):
            run = 0 if taken else run + 1
            if run == pages:
                return at + 1 - pages
        return -1

    def _hold(self, area: Area, sign: int) -> None:
        self._held += sign * area.size
        _Held.bytes += sign * area.size
        first = area.at // HUGE
        self._taken[first : first + area.size // HUGE] = [sign > 0] * (area.size // HUGE)
        if not self._closed:
            self._on_held(self._held)

    def _drop(self, area: Area) -> None:
        """Give its memory to the kernel."""
        assert self._shared is not None
        _libc.madvise(ctypes.addressof(self._shared) + AREAS_AT + area.at, area.size, mmap.MADV_REMOVE)
        self._hold(area, -1)

    def _sweep(self) -> None:
        """Drop what was not used for a while."""
        old = self._loop.time() - IDLE_S
        for each in [each for each in self._free if each.used_at <= old]:
            self._free.remove(each)
            self._drop(each)
        self._sweeping = self._loop.call_later(IDLE_S, self._sweep) if self._free else None


def _touch(shared: Shared, at: Bytes, size: Bytes) -> bool:
    """
    Have the kernel make the pages, of 2 MiB if it can. Blocks, without the GIL. False: it has no memory for them, and
    who writes there would be killed.
    """
    base = ctypes.addressof(shared) + at
    if _libc.madvise(base, size, _POPULATE_WRITE):
        if ctypes.get_errno() != errno.EINVAL:
            return False
        ctypes.memset(base, 0, size)  # before Linux 5.14
    for address in range(base, base + size, HUGE):
        if not collapse(address):
            break
    return True
