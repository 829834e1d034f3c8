"""
Callers who send nothing more, and may wait for the answer (``nc -N``) or have left: TCP says the same of both.

But what is sent to one who has left comes back as a reset. So the first byte of the answer, the H of ``HTTP/1.1``, is
sent at once; of an answer that streams in chunks, a zero in front of the length of the next one.
"""

import asyncio
import select
from collections.abc import Iterable
from typing import Any, Final

_watches: Final[dict[asyncio.AbstractEventLoop, tuple[select.epoll, dict[int, asyncio.Transport]]]] = {}
"""Of each loop with such callers: nothing is read of them any more, so it would not notice a reset."""


class HalfClosed:
    """The transport of such a caller. It is aborted when he turns out to have left."""

    def __init__(self, transport: asyncio.Transport, *, started: bool, chunked: bool) -> None:
        """:param started: some of the answer was sent; if it is *chunked*, the last chunk was sent whole"""
        self._transport, self._ahead = transport, not started
        self._loop, self._fd = asyncio.get_running_loop(), transport.get_extra_info("socket").fileno()
        if self._loop not in _watches:
            _watches[self._loop] = select.epoll(), {}
            self._loop.add_reader(_watches[self._loop][0].fileno(), _abort_reset, *_watches[self._loop])
        watch, transports = _watches[self._loop]
        watch.register(self._fd, 0)
        transports[self._fd] = transport
        if not started or chunked:
            transport.write(b"0" if started else b"H")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        at, self._ahead = int(self._ahead), False
        self._transport.write(data[at:])

    def writelines(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self.write(piece)

    def stop(self) -> None:
        """The connection is lost."""
        watch, transports = _watches[self._loop]
        watch.unregister(self._fd)
        del transports[self._fd]
        if not transports:
            del _watches[self._loop]
            self._loop.remove_reader(watch.fileno())
            watch.close()


def _abort_reset(watch: select.epoll, transports: dict[int, asyncio.Transport]) -> None:
    for fd, _ in watch.poll(0):
        transports[fd].abort()
