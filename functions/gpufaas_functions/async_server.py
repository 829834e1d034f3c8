"""
Serves an ``async def handle``: one event loop for all slots of a worker, and one task for each call.

A CANCEL cancels the task of the call, so the author's code gets ``CancelledError`` at its next await. A PING is
answered at once: the loop lives. A body that streams is read to its end before the handler begins, since the event's
methods do not await. What the calls of one turn of the loop send goes together.
"""

import asyncio
import sys
import time
from socket import socket
from typing import Final, cast

from gpufaas_core.model import Seconds
from gpufaas_core.wire.bodies import CHUNK_BYTES, pieces_of
from gpufaas_core.wire.prefix import FrameReader
from gpufaas_functions import call_lines
from gpufaas_functions.answers import answer_of, declared_length, failure
from gpufaas_functions.author import Context, HandlerAnswer, piece_of
from gpufaas_functions.call_runner import Served
from gpufaas_functions.connection import HELD_S
from gpufaas_functions.coroutines import Pieces, aopened, called, closed
from gpufaas_functions.exit_hooks import end_process, limit
from gpufaas_functions.inbox import BodyStream, Call, CallBody, Inbox, Shared, Slot, Work, event_of
from gpufaas_functions.reply import Reply, growth_frame
from gpufaas_functions.thread_state import ThreadState


class AsyncServer(asyncio.Protocol):
    """The connection of a worker, and its calls."""

    def __init__(self, served: Served, shared: Shared) -> None:
        self._served: Final = served
        self._memory = served.memory
        slots = len(shared.counts.begun)
        self._alone = slots == 1
        self._slots = [AsyncSlot(index, Reply(index, self, served.memory), shared) for index in range(slots)]
        self._inbox = Inbox(self._slots, self, served.memory, shared, served.parking)
        self._reader = FrameReader(sys.maxsize, slots)
        self._out: list[bytes | memoryview] = []
        self._held_until = 0.0
        self._left = False
        """See `leave`."""
        self._measures = False
        """It will measure."""
        self._turn = 0
        """The number of this turn of the loop. It grows when what calls sent has gone out."""
        self._full = False
        """The node takes no more, until `_writable`."""
        self._writable: asyncio.Event = asyncio.Event()
        self._closed: asyncio.Event = asyncio.Event()

    def serve(self, connection: socket, ready: bytes) -> None:
        """Send *ready*, and answer calls until the manager closes *connection*; then cancel what tasks there are."""
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(ThreadState().executor())
            runner.run(self._serve(connection, ready))

    async def _serve(self, connection: socket, ready: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=connection)
        self.send(ready)
        await self._closed.wait()
        limit()  # what is cancelled now may not end

    def leave(self) -> None:
        """Called in a process that the author's code has forked: its parent answers the calls."""
        self._left = True

    # --- the connection ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self.resume_writing()
        for each in self._slots:
            if each.task is not None:
                each.task.cancel()
        self._closed.set()

    def pause_writing(self) -> None:
        self._full = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self._full = False
        self._writable.set()

    def send(self, *frame: bytes | memoryview) -> None:
        """Send a frame, in pieces, at the end of this turn of the loop."""
        if self._left:
            end_process()
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out += frame

    def later(self, frame: bytes, now: Seconds) -> None:
        """
        Send the answer of a call that has ended. It does not wait for the end of a turn in which other calls block, or
        end the worker.
        """
        first = not self._out
        self.send(frame)
        if first:
            self._held_until = now + HELD_S
        elif now > self._held_until:
            self.flush()

    def flush(self) -> None:
        out, self._out = self._out, []
        if out:  # else that of this turn has gone out before its end
            self._turn += 1
            self._transport.writelines(out)

    def _measure(self) -> None:
        """Measure memory, when the answers of this turn are sent."""
        self._measures = False
        if grown := growth_frame(self._memory):
            self.send(grown)

    def data_received(self, data: bytes) -> None:
        for kind, header, body in self._reader.feed(data):
            if (work := self._inbox.on_frame(kind, header, body)) is not None:
                self._begin(work)

    # --- calls ---

    def _begin(self, work: Work) -> None:
        slot = self._slots[work.slot.index]
        slot.task = self._loop.create_task(self._run(slot, work))

    async def _run(self, slot: "AsyncSlot", work: Work) -> None:
        if self._left:
            end_process()
        call = work.calls[0]
        body = call.take_body()
        if isinstance(body, BodyStream):
            body = await _gathered(slot, call, body)
        slot.begun = True
        name = call.head.call
        call_lines.begin(name, self._alone)
        try:
            if slot.begin(work):
                await self._answer(slot, call, body)
        finally:
            call_lines.end(name, self._alone)
            slot.task, slot.begun = None, False
            if call.area is not None:
                call.area.end()
            if (following := slot.end()) is not None:
                self._begin(following)

    async def _answer(self, slot: "AsyncSlot", call: Call, body: CallBody) -> None:
        served, head = self._served, call.head
        pieces: Pieces | None = None
        first = b""
        began = time.perf_counter()
        try:
            if call.cancelled:
                raise asyncio.CancelledError
            context = Context(head.call, served.function, served.device)
            answer, pieces = await called(served.handle, event_of(head, body), context)
            if pieces is not None:
                length = -1 if head.method == "HEAD" else declared_length(answer.headers)
                first = await aopened(answer, pieces, length)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            answer = answer_of(exc) if _is_gone(call, exc) else failure(exc, self._memory)
        if slot.reply.whole(answer, head.method, call.area, began) < 0.0:
            await self._stream(slot, call, answer, first, pieces, began)
        if not self._measures:
            self._measures = True
            self._loop.call_soon(self._measure)

    async def _stream(
        self, slot: "AsyncSlot", call: Call, answer: HandlerAnswer, first: bytes, pieces: Pieces | None, began: Seconds
    ) -> None:
        """Send *answer*: its body, or the *first* piece and the others."""
        error, out_of_memory = "", False
        slot.reply.begin(answer, call.head.method)
        try:
            await self._send_chunk(slot, first if answer.body is None else answer.body)
            if answer.body is None and pieces is not None:
                async for each in pieces:
                    await self._send_chunk(slot, piece_of(each))
            slot.reply.check()
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            error, out_of_memory = ("cancelled", False) if _is_gone(call, exc) else slot.reply.failure(exc)
        finally:
            if pieces is not None:
                await closed(pieces)
        slot.reply.end(began, error, out_of_memory)

    async def _send_chunk(self, slot: "AsyncSlot", chunk: bytes) -> None:
        """Send *chunk*, as there is room."""
        if not chunk:
            return
        reply = slot.reply
        for piece in pieces_of(chunk) if len(chunk) > CHUNK_BYTES else (chunk,):
            if self._full:
                await self._writable.wait()
            if slot.turn == self._turn:
                # A generator that never waits would stop the other calls, and not see that its caller is gone.
                await asyncio.sleep(0)
            slot.turn = self._turn
            while not reply.credit.is_left:
                await slot.wait()
            reply.piece(piece)


class AsyncSlot(Slot):
    """One slot, and the task that runs its call."""

    def __init__(self, index: int, reply: Reply, shared: Shared) -> None:
        self._news = asyncio.Event()
        super().__init__(index, reply, shared.counts, self._news.set)
        self.task: asyncio.Task[None] | None = None
        self.begun = False
        """The author's code runs in the task: before that, a cancellation would not reach it."""
        self.turn = -1
        """In which it sent a piece of an answer last."""

    def cancel(self, call: Call) -> None:
        super().cancel(call)
        if self.begun and self.task is not None:
            self.task.cancel()

    async def wait(self) -> None:
        """Wait until something may have come."""
        await self._news.wait()
        self._news.clear()


async def _gathered(slot: AsyncSlot, call: Call, body: BodyStream) -> bytes:
    """Return *body* when it is whole; what has come of it if the caller leaves."""
    pieces: list[bytes] = []
    while True:
        while not body.is_there:
            if call.cancelled:
                return b"".join(pieces)
            await slot.wait()
        if (piece := body.take()) is None:
            return b"".join(pieces)
        assert isinstance(piece, bytes)  # where there is no memory, this process ends
        pieces.append(piece)
        if room := body.room():
            slot.reply.room(room)


def _is_gone(call: Call, exc: BaseException) -> bool:
    """Whether *exc* says that the caller has left: nobody reads the answer."""
    return call.cancelled and isinstance(exc, asyncio.CancelledError)
