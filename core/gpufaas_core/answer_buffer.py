"""
What has come of an answer and was not read yet: bounded, since a slow reader must not fill this process's memory.

Both ends of a call have one: the node between a worker and whoever reads, the gateway between a node and its caller.
"""

import asyncio
from collections import deque

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.errors import GpufaasError
from gpufaas_core.frames import AnswerHead, EndHead

Piece = tuple[AnswerHead, bytes, bool] | bytes
"""First head, body and whether that is all; then pieces of the body."""


class AnswerBuffer:
    """
    See module. `load_s` is the time that the call waited for its worker to become ready, in seconds, and `phases` what
    that consisted of.
    """

    __slots__ = ("_buffered", "_chunks", "_error", "_limit", "_loop", "_paused", "_waiter", "end", "load_s", "phases")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: Bytes) -> None:
        """:param limit: beyond so many bytes the source is asked to pause, until half of them are read"""
        self.end: EndHead | None = None
        self.load_s: Seconds = 0.0
        self.phases: tuple[tuple[str, Seconds], ...] = ()
        self._loop = loop
        self._limit = limit
        self._chunks: deque[Piece] = deque()
        self._buffered = 0
        self._paused = False
        self._error: GpufaasError | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Whoever reads the answer."""

    # --- whoever reads ---

    async def answer(self) -> tuple[AnswerHead, bytes, bool]:
        """
        Return head, body and whether that is all; when it is not, `chunk` gives the rest.

        :raises LeaseRefused: nothing was taken; the scheduler knows, and places the call again
        :raises GpufaasError: there is no answer: the load failed, the worker crashed, the call was cancelled
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
            await self._wait()
        first = self._chunks.popleft()
        assert isinstance(first, tuple)
        return first

    async def chunk(self) -> bytes | None:
        """
        Return the next piece of a streamed answer; None at its end.

        :raises GpufaasError: it broke off
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.end is not None:
                return None
            await self._wait()
        piece = self._chunks.popleft()
        assert isinstance(piece, bytes)
        self._was_read(piece)
        return piece

    def take(self) -> Piece | None:
        """Return what `answer` and then `chunk` would return if they need not wait; None: nothing is there now."""
        if not self._chunks:
            return None
        piece = self._chunks.popleft()
        if type(piece) is bytes:
            self._was_read(piece)
        return piece

    @property
    def error(self) -> GpufaasError | None:
        """Why nothing more will come than is there, if that is so."""
        return self._error

    # --- whoever fills it ---

    def _keep(self, piece: bytes) -> None:
        self._chunks.append(piece)
        self._buffered += len(piece)
        if self._buffered > self._limit and not self._paused:
            self._paused = self._pause_source()

    def _was_read(self, piece: bytes) -> None:
        self._buffered -= len(piece)
        if self._paused and self._buffered <= self._limit // 2:
            self._resume()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._resume_source()

    async def _wait(self) -> None:
        # No deadline of its own: the gateway's timer of the call ends it through `fail`.
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause_source(self) -> bool:
        """Let nothing more come for now; False: that cannot be done."""
        raise NotImplementedError

    def _resume_source(self) -> None:
        raise NotImplementedError
