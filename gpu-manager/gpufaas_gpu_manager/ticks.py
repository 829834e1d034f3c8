"""
Reads connections on which small pieces come often, each at most once a millisecond.

A wake-up of the event loop costs more than reading a small piece, for the loop and for who writes. So while many pieces
come, one wake-up a millisecond is for all that have come. While few come, each wakes the loop, and nothing is delayed.
"""

import asyncio
import contextlib
import os
import select
from typing import Final, Protocol

from gpufaas_core.model import Bytes, Seconds

TICK_S: Final[Seconds] = 0.001
PIECE: Final[Bytes] = 16 * 1024
"""A piece of this length is not small."""
_LOOKS: Final = 16
"""After so many wake-ups it is seen whether there were more than two a tick. After so many ticks in a row with one
piece at most, what comes wakes the loop again: a server that waits for a processor is silent for some."""


class Reader(Protocol):
    """A connection whose transport does not read."""

    def data_received(self, data: bytes, /) -> None: ...

    def leave_ticks(self) -> None:
        """`Ticks.remove` it, and let its transport read on: its end has come, or pieces that are not small."""


class Ticks:
    """See module. An event loop owns it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll: select.epoll | None = None
        self._readers: dict[int, Reader] = {}
        self._timer: asyncio.TimerHandle | None = None
        """Of the next tick; None: what comes wakes the loop."""
        self._looks = 0
        self._since: Seconds = 0.0

    def add(self, fd: int, reader: Reader) -> None:
        """
        Read from *fd* for *reader*, until `remove`.

        :raises OSError: too many files are open
        """
        if self._epoll is None:
            self._epoll = select.epoll()
            self._listen()
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = reader

    def remove(self, fd: int, reader: Reader) -> None:
        """Undo `add`. Nothing, if *fd* was closed, and is another's by now."""
        if self._epoll is not None and self._readers.get(fd) is reader:
            del self._readers[fd]
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        if self._epoll is not None:
            self._stop()
            self._readers.clear()
            self._epoll.close()
            self._epoll = None

    def _listen(self) -> None:
        assert self._epoll is not None
        self._timer, self._looks, self._since = None, 0, self._loop.time()
        self._loop.add_reader(self._epoll.fileno(), self._woken)

    def _stop(self) -> None:
        assert self._epoll is not None
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._loop.remove_reader(self._epoll.fileno())

    def _woken(self) -> None:
        self._looks += 1
        if self._looks == _LOOKS:
            now = self._loop.time()
            if now - self._since < _LOOKS / 2 * TICK_S:
                self._stop()
                self._looks = 0
                self._tick()
                return
            self._looks, self._since = 0, now
        self._read()

    def _tick(self) -> None:
        self._timer = timer = self._loop.call_later(TICK_S, self._tick)
        if self._read() > 1:
            self._looks = 0
            return
        self._looks += 1
        if self._looks >= _LOOKS and self._epoll is not None:
            timer.cancel()
            self._listen()

    def _read(self) -> int:
        """Read all that has come; return from how many connections."""
        assert self._epoll is not None
        readers, found = self._readers, self._epoll.poll(0)
        for fd, _ in found:
            reader = readers.get(fd)
            if reader is None:
                continue  # it left meanwhile
            try:
                data = os.read(fd, PIECE)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if 0 < len(data) < PIECE:
                reader.data_received(data)
            else:
                reader.leave_ticks()  # its transport finds the end
                if data:
                    reader.data_received(data)
        return len(found)
