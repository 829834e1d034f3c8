"""
What has come of an answer and was not read yet: bounded, since a slow reader must not fill this process's memory.

Both ends of a call have one: the node between a worker and whoever reads, the gateway between a node and its caller.
There, what a caller has kept waiting for a second goes to a file (`keep_for`), so that the function need not wait.
"""

import asyncio
from collections import deque
from typing import Final

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.answer_spool import AnswerSpool, SpooledAnswer
from gpufaas_core.errors import GpufaasError, StorageFailed
from gpufaas_core.frames import AnswerHead, EndHead

Piece = tuple[AnswerHead, bytes, bool] | bytes
"""First head, body and whether that is all; then pieces of the body."""
SLOW_S: Final[Seconds] = 1.0
"""A source that was made to wait so long has a slow reader."""
_JOINED: Final[Bytes] = 64 * 1024
_PIECE_COST: Final[Bytes] = 64
"""Of memory for each piece, beside its bytes: a function may send single ones."""


class AnswerBuffer:
    """
    See module. `load_s` is the time that the call waited for its worker to become ready, in seconds, and `phases` what
    that consisted of.
    """

    __slots__ = (
        "_buffered", "_chunks", "_error", "_limit", "_loop", "_paused", "_slow", "_spool", "_spooled", "_waiter", "end",
        "load_s", "phases",
    )  # fmt: skip

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
        self._spool: AnswerSpool | None = None
        self._spooled: SpooledAnswer | None = None
        self._slow: asyncio.TimerHandle | None = None
        self._error: GpufaasError | None = None
        self._waiter: asyncio.Future[None] | None = None
        """The reader waits for it. It has no deadline: the gateway's timer of the call ends it through `fail`."""

    # --- whoever reads ---

    @property
    def loading_s(self) -> Seconds:
        """How long it has waited for a worker that still loads; 0.0: it does not, or nobody here knows."""
        return 0.0

    async def answer(self) -> tuple[AnswerHead, bytes, bool]:
        """
        Return head, body and whether that is all; when it is not, `chunk` gives the rest.

        :raises LeaseRefused: nothing was taken; the scheduler knows, and places the call again
        :raises GpufaasError: there is no answer: the load failed, the worker crashed, the call was cancelled
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter
        first = self._chunks.popleft()
        assert isinstance(first, tuple)
        return first

    async def chunk(self) -> bytes | None:
        """
        Return the next piece of a streamed answer, all that is there of it up to a bound; None at its end.

        :raises GpufaasError: it broke off
        """
        while True:
            if self._chunks:
                return self._joined()
            if self._spooled is not None and (piece := self._from_file(self._spooled)):
                await asyncio.sleep(0)  # nothing else here waits if the reader is quick, and there may be a lot
                return piece
            if self._error is not None:
                raise self._error
            if self.end is not None:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter

    def take(self) -> Piece | None:
        """Return what `answer` and then `chunk` would return if they need not wait; None: nothing is there now."""
        if not self._chunks:
            return None
        if type(self._chunks[0]) is bytes:
            return self._joined()
        return self._chunks.popleft()

    def keep_for(self, spool: AnswerSpool) -> None:
        """Let the source not wait for a slow reader: what is beyond the limit goes to *spool*, until `close`."""
        self._spool = spool
        if self._paused:
            self._watch_reader()

    def close(self) -> None:
        """Nobody will read on: what is in a file is dropped."""
        self._spool = None
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self._spooled is not None:
            self._spooled.close()

    @property
    def unread(self) -> Bytes:
        """What waits for the reader, about."""
        return self._buffered + (0 if self._spooled is None else self._spooled.size)

    @property
    def error(self) -> GpufaasError | None:
        """Why nothing more will come than is there, if that is so."""
        return self._error

    # --- whoever fills it ---

    def _keep(self, piece: bytes) -> None:
        if self._spooled is not None:
            self._spooled.write(piece)  # also when it is empty just now: this reader is slow
            full = self._spooled.full
        else:
            self._chunks.append(piece)
            self._buffered += len(piece) + _PIECE_COST
            full = self._buffered > self._limit
        if full and not self._paused:
            self._paused = self._pause_source()
            if self._paused and self._spool is not None:
                self._watch_reader()

    def _joined(self) -> bytes:
        """Take as many of the pieces as make a good one: each costs its reader far more than its bytes do."""
        chunks = self._chunks
        piece = chunks.popleft()
        assert type(piece) is bytes
        taken, count = len(piece), 1
        if chunks and taken < _JOINED:
            pieces = [piece]
            while chunks and taken < _JOINED:
                following = chunks.popleft()
                assert type(following) is bytes
                pieces.append(following)
                taken += len(following)
                count += 1
            piece = b"".join(pieces)
        self._buffered -= taken + count * _PIECE_COST
        if self._paused and self._buffered <= self._limit // 2:
            self._may_resume()
        return piece

    def _from_file(self, spooled: SpooledAnswer) -> bytes:
        try:
            piece = spooled.read()
        except OSError as exc:
            raise StorageFailed(f"an answer could not be read back from its file ({exc.strerror}): call again") from exc
        self._may_resume()
        return piece

    def _may_resume(self) -> None:
        if self._paused and (self._spooled is None or self._spooled.half_empty):
            self._resume()

    def _watch_reader(self) -> None:
        if self._spooled is None and self._slow is None:
            self._slow = self._loop.call_later(SLOW_S, self._spool_rest)

    def _spool_rest(self) -> None:
        """The source waits for its reader, and need not."""
        self._slow = None
        if self._spool is None or not self._paused:
            return
        if not self._spool.has_room:
            self._watch_reader()  # others have it all: perhaps a second later
            return
        try:
            self._spooled = SpooledAnswer(self._spool)
        except OSError:
            return  # no disk: the function waits
        self._resume()

    def _resume(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self._paused:
            self._paused = False
            self._resume_source()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause_source(self) -> bool:
        """Let nothing more come for now; False: that cannot be done."""
        raise NotImplementedError

    def _resume_source(self) -> None:
        raise NotImplementedError
