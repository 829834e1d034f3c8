"""What goes from a node to one worker: the frames of all its slots, in order, over one connection."""

import asyncio
import socket
from typing import Final

from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame
from gpufaas_gpu_manager.areas import Areas

_HELD: Final = 8
"""Frames for calls that go out together at most: the worker begins meanwhile."""


class WorkerWire:
    """See module. `WorkerConnection` reads the other direction."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, shared: bool, areas: Areas | None, files: socket.socket | None
    ) -> None:
        """:param shared: several slots use it"""
        self.transport: asyncio.Transport | None = None
        self.closing = False
        """Nothing can be sent any more: the worker has died, or will be killed for this."""
        self.shared = shared
        self.areas = areas or Areas()
        self.files = files
        """Over which open files of bodies go. It does not block."""
        self.running = 0
        """Calls that were sent and have not ended."""
        self.ended = 0
        """Calls that have ended, or were dropped, for each of which the worker may say once what memory it needed."""
        self.pings = 0
        """Pings that are not answered yet."""
        self._loop = loop
        self._held: list[bytes] = []
        self.room = asyncio.Event()
        """The transport takes more: who sends much waits for it."""
        self.room.set()

    def write(self, *frame: bytes | memoryview) -> None:
        """Send a frame, in pieces, behind those that are held; nothing if the connection is closing."""
        if self._held:
            self.flush()
        if self.closing or self.transport is None or self.transport.is_closing():
            self.closing = True
            return
        for each in frame:
            self.transport.write(each)

    def hold(self, frame: bytes) -> None:
        """Send *frame* with those that follow it in this turn of the loop."""
        self._held.append(frame)
        if len(self._held) == 1:
            self._loop.call_soon(self.flush)
        elif len(self._held) == _HELD:
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        if self._held:
            held, self._held = self._held, []
            self.write(b"".join(held))

    def ping(self) -> None:
        """Ask the worker for a sign of life: PONG, at the latest when it runs no call."""
        self.pings += 1
        self.write(encode_frame(Kind.PING))

    def close(self) -> None:
        """The worker is gone, or the node closes."""
        self.closing = True
        self.areas.close()
        if self.files is not None:
            self.files.close()
        if self.transport is not None:
            self.transport.abort()
