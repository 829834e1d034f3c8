"""
Serves an ``async def handle``: one event loop for all slots of a worker, and one task for each call.

A slot's socket carries one call at a time, as for threads (`slot_server`). A CANCEL cancels the task of the call, so
the author's code gets ``CancelledError`` at its next await. A PING is answered at once: the loop lives. A body that
streams is read to its end before the handler begins, since the event's methods do not await.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from socket import socket
from typing import Final, cast

import msgspec

from gpufaas_core.frames import (
    CHUNK_BYTES,
    STREAM,
    AnswerHead,
    CallHead,
    EndHead,
    FrameReader,
    Kind,
    LimitHead,
    encode_frame,
    encode_prefix,
)
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
    pieces_of,
    whole_frame,
)
from gpufaas_functions.author import Context, HandlerAnswer
from gpufaas_functions.coroutines import Pieces, called, checked, closed
from gpufaas_functions.memory import is_out_of_memory
from gpufaas_functions.parking import Parking

_decode_call: Final = msgspec.msgpack.Decoder(CallHead).decode
_decode_limit: Final = msgspec.msgpack.Decoder(LimitHead).decode


class AsyncServer:
    """The slots of a worker."""

    def __init__(self, function: str, device: str, handle: Handle, memory: Memory, *, alone: bool) -> None:
        """:param alone: the worker has one slot"""
        self.function, self.device, self.handle, self.memory, self.alone = function, device, handle, memory, alone
        self.closed: asyncio.Event = asyncio.Event()
        self.parking: Parking | None = None

    def serve(self, slots: Sequence[socket], ready: bytes) -> None:
        """Send *ready* over the first slot, and answer calls until the manager closes it. Tasks are not ended then."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(self._serve(slots, ready))

    async def _serve(self, slots: Sequence[socket], ready: bytes) -> None:
        loop = asyncio.get_running_loop()
        for each in slots:
            each.setblocking(False)
            transport, slot = await loop.create_unix_connection(lambda: AsyncSlot(self), sock=each)
            slot.control = each is slots[0]
            if slot.control:
                transport.write(ready)
        await self.closed.wait()


class AsyncSlot(asyncio.Protocol):
    """One slot: one socket, one call at a time."""

    def __init__(self, server: AsyncServer) -> None:
        self.control = False
        """The worker ends when it is closed."""
        self._server = server
        self._reader = FrameReader(sys.maxsize)
        self._head: CallHead | None = None
        """The head of a call whose body is still coming."""
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._begun = False
        """The task runs: before that, a cancellation would not reach its code."""
        self._cancelled = False
        self._full = False
        self._writable: asyncio.Future[None] | None = None

    # --- the socket ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self.resume_writing()
        if self._task is not None:
            self._task.cancel()
        if self.control:
            self._server.closed.set()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def _send(self, piece: bytes | memoryview) -> None:
        self._transport.write(encode_prefix(Kind.CHUNK, None, len(piece)))
        self._transport.write(piece)
        while self._full:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    def data_received(self, data: bytes) -> None:
        for kind, header, body in self._reader.feed(data):
            if kind == Kind.CALL:
                head = _decode_call(header)
                self._cancelled = False
                if head.body_mode == STREAM:
                    self._head, self._body = head, [body]
                else:
                    self._begin(head, body)
            elif kind == Kind.CANCEL:
                self._cancel()
            elif kind == Kind.PING:
                self._transport.write(encode_frame(Kind.PONG))
            elif kind == Kind.LIMIT:
                self._server.memory.limit(_decode_limit(header).memory)
            elif self._server.parking and (answer := self._server.parking.answer(kind, header)) is not None:
                self._transport.write(answer)
            elif self._head is not None:
                if kind == Kind.BODY:
                    self._body.append(body)
                else:
                    self._body_ends()

    # --- the call ---

    def _body_ends(self) -> None:
        head, self._head = self._head, None
        assert head is not None
        body, self._body = b"".join(self._body), []
        self._begin(head, body)

    def _begin(self, head: CallHead, body: bytes) -> None:
        self._begun = False
        self._task = asyncio.get_running_loop().create_task(self._run(head, body))

    def _cancel(self) -> None:
        """The caller is gone. A CANCEL that comes after the answer belongs to a call that has ended."""
        self._cancelled = True
        if self._head is not None:
            self._body_ends()
        elif self._task is not None and self._begun:
            self._task.cancel()

    async def _run(self, head: CallHead, body: bytes) -> None:
        self._begun = True
        alone = self._server.alone
        call_lines.begin(head.call, alone)
        try:
            await self._answer(head, body)
        finally:
            call_lines.end(head.call, alone)
            self._task = None

    async def _answer(self, head: CallHead, body: bytes) -> None:
        server = self._server
        event, context = event_of(head, body), Context(head.call, server.function, server.device)
        failed = out_of_memory = False
        pieces: Pieces | None = None
        began = time.perf_counter()
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            answer, pieces = await called(server.handle, event, context)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            answer, out_of_memory, failed = self._failed(exc), is_out_of_memory(exc), True
        if answer.body is not None and len(answer.body) <= CHUNK_BYTES:
            run_s = time.perf_counter() - began
            peak = server.memory.grown() if out_of_memory else 0
            frame = whole_frame(answer, head.method, run_s, peak, out_of_memory, failed)
            self._transport.write(frame)
        else:
            await self._stream(answer, pieces, began, head.method)
        if grown := growth_frame(server.memory):
            self._transport.write(grown)

    def _failed(self, exc: BaseException) -> HandlerAnswer:
        """Return the answer of a call that ends with *exc*. Nobody reads that of a caller who is gone."""
        if self._cancelled and isinstance(exc, asyncio.CancelledError):
            return answer_of(exc)
        return failure(exc, self._server.memory)

    async def _stream(self, answer: HandlerAnswer, pieces: Pieces | None, began: float, method: str) -> None:
        error, out_of_memory = "", False
        length = declared_length(answer.headers) if answer.body is None else len(answer.body)
        self._transport.write(encode_frame(Kind.HEAD, AnswerHead(answer.status, answer.headers, length=length)))
        source = _all_of(answer.body or b"") if pieces is None else checked(pieces, -1 if method == "HEAD" else length)
        try:
            async for piece in source:
                for part in pieces_of(piece) if len(piece) > CHUNK_BYTES else (piece,):
                    if part:
                        await self._send(part)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            gone = self._cancelled and isinstance(exc, asyncio.CancelledError)
            if not gone:
                failure(exc, self._server.memory)
            error, out_of_memory = "cancelled" if gone else in_one_line(exc), is_out_of_memory(exc)
        finally:
            await closed(source)
        peak = self._server.memory.grown() if out_of_memory else 0
        end = EndHead(time.perf_counter() - began, peak, error, out_of_memory)
        self._transport.write(encode_frame(Kind.END, end))


async def _all_of(body: bytes) -> AsyncIterator[memoryview]:
    for piece in pieces_of(body):
        yield piece
