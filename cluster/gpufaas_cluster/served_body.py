"""Bodies that come to a node in pieces, as far as they are taken: kept in a file, or passed on to their worker."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from gpufaas_cluster.call_heads import BODY_WINDOW
from gpufaas_core.model import Bytes
from gpufaas_core.wire.credit import Window
from gpufaas_core.wire.heads import RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_gpu_manager.exchange import Exchange

Send = Callable[[int, RoomHead], None]
"""Sends a frame to the gateway."""


class _Body:
    """What both have."""

    size = 0
    """Its bytes that lie in a file."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._window = Window(BODY_WINDOW)

    def begin(self) -> None:
        """Let the gateway send the body."""
        self._send(Kind.ROOM, RoomHead(BODY_WINDOW))

    def _took(self, size: Bytes) -> None:
        """The worker has taken *size* bytes more: the gateway may send as much again."""
        self._window.came(size)
        if room := self._window.room():
            self._send(Kind.ROOM, RoomHead(room))


class SpooledBody(_Body):
    """A body that is kept in a file, for its worker to read."""

    def __init__(self, send: Send, directory: Path, on_whole: Callable[[str], None]) -> None:
        """
        :param on_whole: gets the path of the file once all of the body is there
        :raises OSError: the file cannot be made
        """
        fd, self._path = tempfile.mkstemp(prefix="body-", dir=directory)
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._on_whole = on_whole
        super().__init__(send)
        self.begin()

    def add(self, piece: bytes) -> None:
        """A piece has come. :raises OSError: the disk is full"""
        self.size += len(piece)
        view = memoryview(piece)
        while view:
            view = view[self._file.write(view) :]
        self._took(len(piece))

    def end(self) -> None:
        """All of it has come."""
        self._file.close()
        self._on_whole(self._path)

    def close(self) -> None:
        """Its call is over."""
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class StreamedBody(_Body):
    """A body that is passed on as it comes, as far as its worker takes it."""

    def __init__(self, send: Send, exchange: Exchange) -> None:
        super().__init__(send)
        self._exchange = exchange
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Those that the worker does not have yet; None: the end."""
        self._task = asyncio.get_running_loop().create_task(self._feed())

    def add(self, piece: bytes) -> None:
        self._pieces.put_nowait(piece)

    def end(self) -> None:
        self._pieces.put_nowait(None)

    def close(self) -> None:
        self._task.cancel()

    async def _feed(self) -> None:
        while (piece := await self._pieces.get()) is not None:
            await self._exchange.send_body(piece)
            self._took(len(piece))
        await self._exchange.end_body()
