"""
The part of an answer that has come and was not read yet. Bounded, so that a slow reader cannot fill the memory.

Both ends of a call have one: the node between worker and gateway, the gateway between node and caller. In the gateway
an answer whose caller makes the function wait for a second goes to a file (`keep_for`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.answer_spool import AnswerSpool, SpooledAnswer
from gpufaas_core.driven import PAUSE
from gpufaas_core.errors import GpufaasError
from gpufaas_core.wire.credit import PIECE_COST
from gpufaas_core.wire.heads import AnswerHead, EndHead

Piece = tuple[AnswerHead, bytes | memoryview, bool] | bytes
"""First the head, the body and whether that is all; then pieces of the body."""
SLOW_S: Final[Seconds] = 1.0
"""A reader who makes the source wait longer is slow."""
_JOINED: Final[Bytes] = 64 * 1024


class AnswerBuffer:
    """
    See module. `load_s`: seconds that the call waited until its worker was ready; `phases`: the parts of that time;
    `tier`: where the worker's weights came from, if it was started for the call (`messages.Loaded.tier`).
    """

    __slots__ = (
        "_buffered", "_chunks", "_limit", "_loop", "_paused", "_slow", "_spool", "_spooled", "_waiter", "_woken", "end",
        "error", "load_s", "on_run", "phases", "resume", "sink", "tier",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: Bytes) -> None:
        """:param limit: the bytes beyond which the source pauses, until half of them are read"""
        self.end: EndHead | None = None
        self.load_s: Seconds = 0.0
        self.phases: tuple[tuple[str, Seconds], ...] = ()
        self.tier = "disk"
        self.on_run: Callable[[], None] | None = None
        """Called when a worker takes the call."""
        self.resume: Callable[[], None] | None = None
        """Goes on with the reader, who awaits `PAUSE`; None: he awaits a future."""
        self.sink: Callable[[bytes], bool] | None = None
        """Is given a piece of the body for which nothing else waits; False: it did not take it. None: `chunk` does."""
        self._woken = False
        """`resume` is called in the next turn of the loop."""
        self._loop = loop
        self._limit = limit
        self._chunks: deque[Piece] = deque()
        self._buffered = 0
        self._paused = False
        self._spool: AnswerSpool | None = None
        self._spooled: SpooledAnswer | None = None
        self._slow: asyncio.TimerHandle | None = None
        self.error: GpufaasError | None = None
        """Why nothing more will come; None: more may come."""
        self._waiter: asyncio.Future[None] | None = None
        """The reader waits for it. It has no deadline: the gateway's timer of the call ends it through `fail`."""

    # --- the reader ---

    @property
    def loading_s(self) -> Seconds:
        """How long it has waited for a worker that still loads; 0.0: the worker is ready, or it is unknown here."""
        return 0.0

    @property
    def silent(self) -> bool:
        """Whether `answer` would wait."""
        return not self._chunks and self.error is None

    async def answer(self) -> tuple[AnswerHead, bytes | memoryview, bool]:
        """
        Return head, body and whether that is all; when it is not, `chunk` gives the rest.

        :raises GrantRefused: nothing was taken; the scheduler knows, and places the call again
        :raises GpufaasError: there is no answer: the load failed, the worker crashed, the call was cancelled
        """
        while not self._chunks:
            if self.error is not None:
                raise self.error
            await self._more()
        first = self._chunks.popleft()
        assert isinstance(first, tuple)
        return first

    async def chunk(self) -> bytes | None:
        """
        Return the next piece of an answer that streams: all that has come, up to a bound. None at its end.

        :raises GpufaasError: it broke off
        """
        while True:
            if self._chunks:
                return self._joined()
            if self._spooled is not None and (piece := self._spooled.read()):
                if self._spooled.half_empty:
                    self._resume()
                await asyncio.sleep(0)  # a quick reader would otherwise keep the loop until the file is empty
                return piece
            if self.error is not None:
                raise self.error
            if self.end is not None:
                return None
            await self._more()

    def _more(self) -> Awaitable[None]:
        if self.resume is not None:
            return PAUSE
        self._waiter = self._loop.create_future()
        return self._waiter

    def take(self) -> Piece | None:
        """Return what `answer`, then `chunk`, would return now; None: they would wait."""
        if not self._chunks:
            return None
        if type(self._chunks[0]) is bytes:
            return self._joined()
        return self._chunks.popleft()

    def keep_for(self, spool: AnswerSpool) -> None:
        """Keep the source from waiting for a slow reader: what is over the limit goes to *spool*, until `close`."""
        self._spool = spool
        if self._paused:
            self._watch_reader()

    def close(self) -> None:
        """Drop what is in a file: nobody will read it."""
        self._spool = self.on_run = None
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self._spooled is not None:
            self._spooled.close()

    @property
    def unread(self) -> Bytes:
        """About how many bytes wait for the reader."""
        return self._buffered + (0 if self._spooled is None else self._spooled.size)

    # --- the source ---

    def _pass_or_keep(self, piece: bytes) -> None:
        """A piece of the body came."""
        if self.sink is not None and not self._chunks and self._spooled is None and self.sink(piece):
            return
        if self._spooled is not None:
            self._spooled.write(piece)  # also if the file is empty now: the reader is slow
            full = self._spooled.full
        else:
            self._chunks.append(piece)
            self._buffered += len(piece) + PIECE_COST
            full = self._buffered > self._limit
        if full and not self._paused:
            self._paused = self._pause_source()
            if self._paused and self._spool is not None:
                self._watch_reader()
        self._wake()

    def _joined(self) -> bytes:
        """Join small pieces: a piece costs its reader far more than its bytes do."""
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
        self._buffered -= taken + count * PIECE_COST
        if self._paused and self._buffered <= self._limit // 2 and (self._spooled is None or self._spooled.half_empty):
            self._resume()
        return piece

    def _watch_reader(self) -> None:
        if self._spooled is None and self._slow is None:
            self._slow = self._loop.call_later(SLOW_S, self._spool_rest)

    def _spool_rest(self) -> None:
        """Move the rest to a file: the source waits for its reader."""
        self._slow = None
        if self._spool is None or not self._paused:
            return
        if not self._spool.has_room:
            self._watch_reader()  # other answers fill the spool: try again in a second
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
        if self.resume is not None:
            if not self._woken:
                self._woken = True
                self._loop.call_soon(self._resume_reader)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume_reader(self) -> None:
        self._woken = False
        if self.resume is not None:
            self.resume()

    def _wake(self) -> None:
        """Wake all who wait for news of the call."""
        raise NotImplementedError

    def _pause_source(self) -> bool:
        """Pause the source; False: it cannot be paused."""
        raise NotImplementedError

    def _resume_source(self) -> None:
        raise NotImplementedError
