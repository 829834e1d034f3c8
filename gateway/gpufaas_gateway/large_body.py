"""
Receives large bodies whose length is known: from the socket into memory that is there already, past the parser.

A parser cuts a body into pieces, and each is copied three times before it is a part of the whole. New memory for each
body costs more than that: the kernel makes its pages. So the memory of bodies is used again.
"""

import asyncio
import mmap
from typing import Final, Protocol, runtime_checkable

from uvicorn.protocols.http.flow_control import FlowControl

from gpufaas_core.lent import lend
from gpufaas_core.units import Bytes, KiB, MiB, Seconds

LEAST: Final[Bytes] = 256 * KiB
"""Smaller bodies are read as all requests are."""
MOST: Final[Bytes] = 16 * MiB
"""Larger ones wait on disk, or stream."""
QUICK_S: Final[Seconds] = 0.1
"""A body that may stream is whole within this time, or streams."""
_ALL: Final[Bytes] = 128 * MiB
"""Of the memory for bodies."""
_IDLE_S: Final[Seconds] = 10.0
_PAGE: Final[Bytes] = 2 * MiB
_PIECE: Final[Bytes] = 64 * KiB


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


class Request(Protocol):
    """The request whose body it is."""

    def on_body(self, piece: bytes) -> None: ...

    def set(self) -> None:
        """Wake who waits for the body."""


class Connection(Protocol):
    """The connection, as the server's protocol has it."""

    transport: asyncio.Transport
    flow: FlowControl

    def renew_parser(self) -> None: ...

    def on_message_complete(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...

    def eof_received(self) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class BodyReceiver(asyncio.BufferedProtocol):
    """Takes the place of *connection*'s protocol until the body has ended. It reads no byte behind that."""

    def __init__(self, connection: Connection, request: Request, into: memoryview, at: Bytes) -> None:
        """:param at: so much of the body has come"""
        self.filled = at
        """So much of it is where it fills."""
        self._at = at
        self._connection = connection
        self._request = request
        self._end = len(into)
        self._into: memoryview | None = into
        self._piece = memoryview(b"")
        self._switch(self)

    def _switch(self, protocol: asyncio.BaseProtocol) -> None:
        flow, transport = self._connection.flow, self._connection.transport
        flow.pause_reading()  # how it reads is settled when it begins to
        transport.set_protocol(protocol)
        flow.resume_reading()

    @property
    def filling(self) -> bool:
        return self._into is not None and self._at < self._end

    def stop_filling(self) -> None:
        """What comes from now on goes to the request, in pieces."""
        if self.filling:
            self._into = None
            self._piece = memoryview(bytearray(_PIECE))
            self._request.set()

    # --- the transport's side ---

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's
        return self._into[self._at :] if self._into is not None else self._piece[: self._end - self._at]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._into is None:
            self._request.on_body(bytes(self._piece[:nbytes]))
        else:
            self.filled = self._at
        if self._at == self._end:
            connection = self._connection
            # The old one waits for a body that it has not seen. Requests on this connection go on behind that.
            connection.renew_parser()
            self._switch(connection)  # type: ignore[arg-type]
            self._into = None  # uvloop keeps this protocol until the connection has another one with buffers
            connection.on_message_complete()

    def eof_received(self) -> None:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
