"""
Serves an ``async def handle``: one event loop for all slots of a worker, and one task for each call.

A CANCEL cancels the task of the call, so the author's code gets ``CancelledError`` at its next await. A PING is
answered at once: the loop lives. A body that streams is read to its end before the handler begins, since the event's
methods do not await. What the calls of one turn of the loop send goes together.
"""

import asyncio
import ctypes
import sys
import time
from socket import socket
from typing import Final, cast

import msgspec

from gpufaas_core.model import Seconds
from gpufaas_core.wire.bodies import CHUNK_BYTES, FILE, STREAM, pieces_of
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import AnswerHead, AreaHead, CallHead, DroppedHead, EndHead, LimitHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE, FrameReader, encode_frame, encode_prefix
from gpufaas_functions import call_lines
from gpufaas_functions.answers import (
    Handle,
    Memory,
    answer_of,
    declared_length,
    event_of,
    failure,
    growth_frame,
    in_one_line,
    laid_frame,
    whole_frame,
)
from gpufaas_functions.areas import Area
from gpufaas_functions.author import Context, HandlerAnswer
from gpufaas_functions.begun import Counts, is_taken
from gpufaas_functions.body_file import BodyFile, take
from gpufaas_functions.connection import HELD_S
from gpufaas_functions.coroutines import Pieces, aopened, called, closed
from gpufaas_functions.exit_hooks import end_process, limit
from gpufaas_functions.memory import is_out_of_memory
from gpufaas_functions.parking import Parking
from gpufaas_functions.thread_state import ThreadState

_decode_area: Final = msgspec.msgpack.Decoder(AreaHead).decode
_decode_call: Final = msgspec.msgpack.Decoder(CallHead).decode
_decode_limit: Final = msgspec.msgpack.Decoder(LimitHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode
_JOINED: Final = 16 * 1024
"""A piece of at most so many bytes is copied behind its prefix."""


class AsyncServer(asyncio.Protocol):
    """The connection of a worker, and its slots."""

    def __init__(self, function: str, device: str, handle: Handle, memory: Memory, counts: Counts, slots: int) -> None:
        """:param counts: of what each slot begins (`begun`)"""
        self.function, self.device, self.handle, self.memory = function, device, handle, memory
        self.alone = slots == 1
        self.counts = counts
        self.parking: Parking | None = None
        self.shared: ctypes.Array[ctypes.c_char] | None = None
        """The memory that the node lends areas of; None: it lends none."""
        self.files: socket
        """Over which the open files of bodies come."""
        self._slots = [AsyncSlot(self, index) for index in range(slots)]
        self._reader = FrameReader(sys.maxsize, slots)
        self._out: list[bytes | memoryview] = []
        self._held_until = 0.0
        self.left = False
        """See `leave`."""
        self._measures = False
        """It will measure."""
        self.turn = 0
        """Of the loop: a number that grows when what calls sent has gone out."""
        self.full = False
        self.writable: asyncio.Event = asyncio.Event()
        """Set when the node takes more after it was `full`."""
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
        self.left = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self.resume_writing()
        for each in self._slots:
            each.lost()
        self._closed.set()

    def pause_writing(self) -> None:
        self.full = True
        self.writable.clear()

    def resume_writing(self) -> None:
        self.full = False
        self.writable.set()

    def send(self, *frame: bytes | memoryview) -> None:
        """Send a frame, in pieces, at the end of this turn of the loop."""
        if self.left:
            end_process()
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out += frame

    def answer(self, frame: bytes, now: Seconds) -> None:
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
            self.turn += 1
            self._transport.writelines(out)

    def measure(self) -> None:
        """A call has ended: measure memory when the answers of this turn are sent."""
        if not self._measures:
            self._measures = True
            self._loop.call_soon(self._measure)

    def _measure(self) -> None:
        self._measures = False
        if grown := growth_frame(self.memory):
            self.send(grown)

    def data_received(self, data: bytes) -> None:
        for kind, header, body in self._reader.feed(data):
            slot, what = self._slots[kind >> LANE], kind & KIND
            if what == Kind.PING:
                self._transport.write(encode_frame(Kind.PONG))
            elif what == Kind.LIMIT:
                self.memory.limit(_decode_limit(header).memory)
            elif self.parking and (answer := self.parking.answer(what, header)) is not None:
                self.send(answer)
            else:
                slot.on_frame(what, header, body)


class AsyncSlot:
    """One slot: one call at a time."""

    def __init__(self, server: AsyncServer, index: int) -> None:
        self._server = server
        self._send = server.send
        self._index = index
        self._head: CallHead | None = None
        """The head of a call whose body is still coming."""
        self._body: list[bytes] = []
        self._taken = 0
        """Bytes of the body that the node was not told of yet."""
        self._area: Area | None = None
        """What its call, or the next one, has of the memory shared with the node."""
        self._task: asyncio.Task[None] | None = None
        self._begun = False
        """The task runs: before that, a cancellation would not reach its code."""
        self._cancelled = False
        self._may_send = WINDOW
        """Bytes of answers."""
        self._turn = -1
        """In which it sent a piece of an answer last."""
        self._sendable: asyncio.Future[None] | None = None

    def lost(self) -> None:
        """The connection is closed."""
        if self._task is not None:
            self._task.cancel()

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        if kind == Kind.CALL:
            head = _decode_call(header)
            self._cancelled = False
            if self._area is not None and (laid := self._area.body) is not None:
                self._begin(head, laid)
            elif head.body_mode == FILE:
                self._begin(head, take(self._server.files, head))
            elif head.body_mode == STREAM:
                self._head, self._body, self._taken = head, [body], 0
            else:
                self._begin(head, body)
        elif kind == Kind.CANCEL:
            self._cancel()
        elif kind == Kind.AREA:
            assert self._server.shared is not None
            self._area = Area(self._server.shared, _decode_area(header))
        elif kind == Kind.ROOM:
            self._may_send += _decode_room(header).room
            if self._sendable is not None and not self._sendable.done():
                self._sendable.set_result(None)
        elif self._head is None:
            pass  # of a call that has ended
        elif kind == Kind.BODY:
            self._body.append(body)
            self._taken += len(body) + PIECE_COST
            if self._taken >= WINDOW // 2:
                self._send(encode_frame(Kind.ROOM, RoomHead(self._taken), lane=self._index))
                self._taken = 0
        else:
            self._body_ends()

    async def _send_piece(self, piece: bytes | memoryview) -> None:
        if len(piece) > CHUNK_BYTES:
            for part in pieces_of(piece):
                await self._send_piece(part)
            return
        server = self._server
        if server.full:
            await server.writable.wait()
        if self._turn == server.turn:
            # A generator that never waits would stop the other calls, and not see that its caller is gone.
            await asyncio.sleep(0)
        self._turn = server.turn
        while self._may_send <= 0:
            self._sendable = asyncio.get_running_loop().create_future()
            await self._sendable
        self._may_send -= len(piece) + PIECE_COST
        if len(piece) <= _JOINED:
            self._send(encode_frame(Kind.CHUNK, None, piece, self._index))
        else:
            self._send(encode_prefix(Kind.CHUNK, None, len(piece), self._index), piece)

    # --- the call ---

    def _body_ends(self) -> None:
        head, self._head = self._head, None
        assert head is not None
        body, self._body = b"".join(self._body), []
        self._begin(head, body)

    def _begin(self, head: CallHead, body: bytes | Area | BodyFile) -> None:
        self._begun = False
        self._task = asyncio.get_running_loop().create_task(self._run(head, body))

    def _cancel(self) -> None:
        """The caller is gone. A CANCEL that comes after the answer belongs to a call that has ended."""
        self._cancelled = True
        if self._head is not None:
            self._body_ends()
        elif self._task is not None and self._begun:
            self._task.cancel()

    async def _run(self, head: CallHead, body: bytes | Area | BodyFile) -> None:
        self._begun = True
        if self._server.left:
            end_process()
        area, self._area = self._area, None
        counts, index = self._server.counts, self._index
        counts.begun[index] = number = counts.begun[index] + 1
        alone = self._server.alone
        call_lines.begin(head.call, alone)
        try:
            if is_taken(number, counts.taken[index]):
                self._send(encode_frame(Kind.DROPPED, DroppedHead(number), lane=index))
            else:
                await self._answer(head, body, area)
        finally:
            call_lines.end(head.call, alone)
            self._task = None
            if area is not None:
                area.end()

    async def _answer(self, head: CallHead, body: bytes | Area | BodyFile, area: Area | None) -> None:
        server = self._server
        event, context = event_of(head, body), Context(head.call, server.function, server.device)
        failed = out_of_memory = False
        pieces: Pieces | None = None
        began = time.perf_counter()
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            answer, pieces = await called(server.handle, event, context)
            if pieces is not None:
                length = -1 if head.method == "HEAD" else declared_length(answer.headers)
                pieces = await aopened(answer, pieces, length, rests=False)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            gone = self._cancelled and isinstance(exc, asyncio.CancelledError)  # nobody reads the answer
            answer = answer_of(exc) if gone else failure(exc, server.memory)
            out_of_memory, failed = is_out_of_memory(exc), True
        if answer.body is not None and area is not None and area.takes(len(answer.body)) and head.method != "HEAD":
            self._send(laid_frame(answer, area, time.perf_counter() - began, failed, self._index))
        elif answer.body is not None and len(answer.body) <= CHUNK_BYTES:
            now = time.perf_counter()
            peak = server.memory.grown() if out_of_memory else 0
            server.answer(whole_frame(answer, head.method, now - began, peak, out_of_memory, failed, self._index), now)
        else:
            await self._stream(answer, pieces, began)
        server.measure()

    async def _stream(self, answer: HandlerAnswer, pieces: Pieces | None, began: float) -> None:
        error, out_of_memory = "", False
        length = declared_length(answer.headers) if answer.body is None else len(answer.body)
        said = AnswerHead(answer.status, answer.headers, length=length)
        self._send(encode_frame(Kind.HEAD, said, lane=self._index))
        try:
            if answer.body is not None:
                for part in pieces_of(answer.body):
                    await self._send_piece(part)
            elif pieces is not None:
                async for piece in pieces:
                    if piece:
                        await self._send_piece(piece)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            gone = self._cancelled and isinstance(exc, asyncio.CancelledError)
            if not gone:
                failure(exc, self._server.memory)
            error, out_of_memory = "cancelled" if gone else in_one_line(exc), is_out_of_memory(exc)
        finally:
            if pieces is not None:
                await closed(pieces)
        peak = self._server.memory.grown() if out_of_memory else 0
        end = EndHead(time.perf_counter() - began, peak, error, out_of_memory)
        self._send(encode_frame(Kind.END, end, lane=self._index))
