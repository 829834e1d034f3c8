"""
Callers who send nothing more, and may wait for the answer (``nc -N``) or have left: TCP says the same of both.

But what is sent to one who has left comes back as a reset. So the first byte of the answer, the H of ``HTTP/1.1``, is
sent at once; of an answer that streams in chunks, a zero in front of the length of the next one.
"""

import asyncio
import select
from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

_watches: Final = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[select.epoll, dict[int, asyncio.Transport]]]()
"""By loop that had such callers: it reads nothing from them any more, so it would not notice a reset by itself."""


class HalfClosed:
    """The transport of such a caller. It is aborted when he turns out to have left."""

    def __init__(self, transport: asyncio.Transport, *, started: bool, chunked: bool) -> None:
        """:param started: some of the answer was sent; if it is *chunked*, the last chunk was sent whole"""
        self._transport, self._ahead = transport, not started
        loop, self._fd = asyncio.get_running_loop(), transport.get_extra_info("socket").fileno()
        if loop not in _watches:
            _watches[loop] = select.epoll(), {}
            loop.add_reader(_watches[loop][0].fileno(), _abort_reset, *_watches[loop])
        self._epoll, self._watched = _watches[loop]
        self._epoll.register(self._fd, 0)
        self._watched[self._fd] = transport
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
        self._epoll.unregister(self._fd)
        del self._watched[self._fd]


def _abort_reset(epoll: select.epoll, transports: dict[int, asyncio.Transport]) -> None:
    for fd, _ in epoll.poll(0):
        transports[fd].abort()
