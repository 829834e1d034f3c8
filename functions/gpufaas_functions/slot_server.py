"""Runs the calls of one slot of a worker: one call or batch at a time, in the thread that has its turn."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from queue import SimpleQueue
from typing import Final, Protocol

import msgspec

from gpufaas_core.model import Seconds
from gpufaas_core.wire.bodies import CHUNK_BYTES, STREAM, pieces_of
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import AnswerHead, CallHead, CancelHead, EndHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame, encode_prefix
from gpufaas_functions import call_lines
from gpufaas_functions.answers import (
    Handle,
    Memory,
    declared_length,
    event_of,
    failure,
    growth_frame,
    in_one_line,
    laid_frame,
    opened,
    whole_frame,
)
from gpufaas_functions.areas import Area
from gpufaas_functions.author import Context, Event, HandlerAnswer, to_answer
from gpufaas_functions.connection import Absent, Body, CallBody, Closed, Connection, Frame
from gpufaas_functions.memory import is_out_of_memory

_JOINED: Final = 16 * 1024
"""A piece of at most so many bytes goes with its prefix, at once: to copy it costs less than to send twice."""
_decode_cancel: Final = msgspec.msgpack.Decoder(CancelHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode


class Cancel(BaseException):
    """The caller is gone. Raised in the loop over a generator, never in the author's own code."""


def no_room() -> MemoryError:
    """Return what a call fails with whose body has no room in memory."""
    return MemoryError("for the body of the call")


class Work:
    """A call, or the calls of a batch, that a slot got."""

    __slots__ = ("areas", "batch", "calls", "frames", "left")

    def __init__(self, batch: int = 0) -> None:
        """:param batch: the number of its calls; 0: it is one call"""
        self.batch = batch
        self.left = batch or 1
        """Calls that have not come."""
        self.calls: list[tuple[CallHead, CallBody]] = []
        self.areas: tuple[Area, ...] = ()
        """Those that its calls have."""
        self.frames: SimpleQueue[Frame] = SimpleQueue()
        """What has come for it, and was not looked at."""


class Turns(Protocol):
    """Who gives slots their turns (`slot_threads`)."""

    def long(self, slot: "SlotServer") -> None:
        """The call of *slot* may take long, however quick the handler is."""

    def await_frame(self, slot: "SlotServer") -> None:
        """*slot* waits for a frame of its call: let it come. :raises Closed: the connection is closed"""

    def look(self, slot: "SlotServer") -> None:
        """Let frames for the call of *slot* come that are there. :raises Closed: the connection is closed"""


class SlotServer:
    """See module."""

    def __init__(
        self,
        index: int,
        connection: Connection,
        handle: Handle,
        function: str,
        device: str,
        memory: Memory,
        *,
        alone: bool,
    ) -> None:
        """:param alone: the worker has no other slot"""
        self.index = index
        self.out = connection
        self.turns: Turns
        self.token: Work | None = None
        """What it had its turn for (`SlotThreads`)."""
        self._handle = handle
        self._function = function
        self._device = device
        self.memory = memory
        self._alone = alone
        self.serve_batch: Callable[[list[tuple[CallHead, CallBody]]], None] | None = None
        """Answers a batch; None: none comes."""
        self.took: Seconds = -1.0
        """How long the handler ran for the last call or batch; -1: its body streamed."""
        self.frames: SimpleQueue[Frame] = SimpleQueue()
        """What has come for the call that runs."""
        self.place = 0
        """Of a batch: the place of the call whose answer streams."""
        self._area: Area | None = None
        """What its call has of the memory shared with the node."""
        self._pieces: deque[Body] = deque()
        """Of its body, that it has not taken."""
        self._whole = True
        """All of its body has come, or its caller is gone."""
        self._cancelled = False
        self._sent = 0
        self._may_send = WINDOW
        """Of answers that stream, both since the worker began: so ROOM may come late, behind another call."""

    def run(self, work: Work) -> None:
        """Run *work* in a copy of the context: no other call sees what it sets. :raises Closed: so is the connection"""
        copy_context().run(self._run, work)

    def _run(self, work: Work) -> None:
        self.frames = work.frames
        self._cancelled, self._whole, self.place = False, True, 0
        if self._pieces:
            self._pieces.clear()
        if work.batch:
            assert self.serve_batch is not None
            began = time.perf_counter()
            self.serve_batch(work.calls)
            self.took = time.perf_counter() - began
            for each in work.areas:
                each.end()
            return
        head, body = work.calls.pop()  # its slot has the work until the next call
        if work.areas:
            self._area = work.areas[0]
        call_lines.begin(head.call, self._alone)
        try:
            self._call(head, body)
        finally:
            call_lines.end(head.call, self._alone)
            if work.areas:
                self._area = None
                work.areas[0].end()

    def _call(self, head: CallHead, body: CallBody) -> None:
        stream: _BodyStream | None = None
        if head.body_mode == STREAM:
            self._whole = False
            self.turns.long(self)
            stream = _BodyStream(self, body)
            event = Event(head.method, head.path, head.query, head.headers, None, stream.chunks)
        else:
            event = event_of(head, b"" if isinstance(body, Absent) else body)
        context = Context(head.call, self._function, self._device)
        failed = out_of_memory = False
        began = time.perf_counter()
        try:
            if stream is None and type(body) is Absent:
                raise no_room()
            answer = to_answer(self._handle(event, context))
            if answer.chunks is not None:
                answer = opened(answer, -1 if head.method == "HEAD" else declared_length(answer.headers))
        except BaseException as exc:
            if isinstance(exc, (Closed, KeyboardInterrupt)):
                raise
            answer, out_of_memory, failed = failure(exc, self.memory), is_out_of_memory(exc), True
            exc = None  # type: ignore[assignment]
        if stream is not None and answer.body is not None:
            stream.drain()
        if self._area is not None and self._lay(answer, head.method, began, failed=failed):
            self.took = -1.0 if stream is not None else time.perf_counter() - began
            return
        if answer.body is not None and len(answer.body) <= CHUNK_BYTES:
            now = time.perf_counter()
            run_s = now - began
            self.took = -1.0 if stream is not None else run_s
            peak = self.memory.grown() if out_of_memory else 0
            self.out.later(whole_frame(answer, head.method, run_s, peak, out_of_memory, failed, self.index), now)
            return
        self.stream_answer(answer, began, stream)
        self.took = -1.0 if stream is not None else time.perf_counter() - began

    def _lay(self, answer: HandlerAnswer, method: str, began: float, *, failed: bool) -> bool:
        """Put *answer* into the area of its call, if it can be there, and send it; else the area's body is over."""
        area, self._area = self._area, None
        assert area is not None
        if answer.body is None:
            return False  # a generator may read the body yet
        if method == "HEAD" or not area.takes(len(answer.body)):
            area.end()
            return False
        self.out.send(laid_frame(answer, area, time.perf_counter() - began, failed, self.index))
        return True

    def context(self, head: CallHead) -> Context:
        return Context(head.call, self._function, self._device)

    def say_growth(self) -> None:
        """Measure memory after calls, and say a new peak. :raises Closed: the connection is closed"""
        if frame := growth_frame(self.memory):
            self.out.send(frame)

    def begin_answer(self, place: int) -> None:
        """The answer of the call at *place* of the batch streams next: the caller before it may have left."""
        self.place, self._cancelled = place, False

    def stream_answer(self, answer: HandlerAnswer, began: float, stream: "_BodyStream | None" = None) -> None:
        """:raises Closed: the connection is closed"""
        error, out_of_memory = "", False
        length = declared_length(answer.headers) if answer.body is None else len(answer.body)
        self._send(Kind.HEAD, AnswerHead(answer.status, answer.headers, length=length))
        chunks: Iterator[bytes | memoryview] | None = answer.chunks
        if answer.body is not None:
            chunks = iter(pieces_of(answer.body))
        assert chunks is not None
        try:
            for chunk in chunks:
                self.turns.look(self)
                while not self.frames.empty():
                    self._on_frame(*self.frames.get())
                if self._cancelled:
                    raise Cancel
                for piece in pieces_of(chunk) if len(chunk) > CHUNK_BYTES else (chunk,):
                    if piece:
                        self._send_piece(piece)
        except Cancel:
            error = "cancelled"
        except Closed:
            raise
        except BaseException as exc:
            failure(exc, self.memory)
            error, out_of_memory = in_one_line(exc), is_out_of_memory(exc)
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):
                    close()
        if stream is not None:
            stream.drain()
        peak = self.memory.grown() if out_of_memory else 0
        self._send(Kind.END, EndHead(time.perf_counter() - began, peak, error, out_of_memory))

    def _send(self, kind: int, head: msgspec.Struct) -> None:
        self.out.send(encode_frame(kind, head, lane=self.index))

    def _send_piece(self, piece: bytes | memoryview) -> None:
        """:raises Cancel: the caller left while there was no room"""
        while self._sent >= self._may_send:
            if self._cancelled:
                raise Cancel
            self.wait()
        self._sent += len(piece) + PIECE_COST
        if len(piece) <= _JOINED:
            self.out.send(encode_frame(Kind.CHUNK, None, piece, self.index))
        else:
            self.out.send(encode_prefix(Kind.CHUNK, None, len(piece), self.index), piece)

    # --- what comes for the call that runs ---

    def on_room(self, frame: Frame) -> None:
        """More of an answer may be sent. Called by who reads frames."""
        self._may_send += _decode_room(frame[1]).room
        self.frames.put(frame)

    def wait(self) -> None:
        """Wait for a frame. :raises Closed: the connection is closed"""
        if self.frames.empty():
            self.turns.await_frame(self)
        self._on_frame(*self.frames.get())

    def next_piece(self) -> Body | None:
        """
        Wait for the next piece of its body, and return it; None: there is none.

        :raises ConnectionAbortedError: the caller is gone
        """
        while not self._pieces:
            if self._cancelled and not self._whole:
                self._whole = True
                raise ConnectionAbortedError("the caller went away before its body was whole")
            if self._whole:
                return None
            self.wait()
        return self._pieces.popleft()

    def give_room(self, room: int) -> None:
        """So much of its body was taken. :raises Closed: the connection is closed"""
        if not self._whole:
            self._send(Kind.ROOM, RoomHead(room))

    def _on_frame(self, kind: int, header: bytes, body: Body) -> None:
        if kind == Kind.BODY:
            self._pieces.append(body)
        elif kind == Kind.BODY_END:
            self._whole = True
        elif kind == Kind.CANCEL and _decode_cancel(header).place == self.place:
            self._cancelled = True


class _BodyStream:
    """
    The body of a call that streams: what came with the CALL, then BODY frames until BODY_END.

    Reading it raises ConnectionAbortedError if the caller goes away before the end.
    """

    def __init__(self, slot: SlotServer, first: CallBody) -> None:
        self._slot = slot
        assert isinstance(first, (bytes, Absent))  # a body that streams lies nowhere
        self._first = first
        self._taken = 0
        """Bytes that the node was not told of yet."""

    def chunks(self) -> Iterator[bytes]:
        first, self._first = self._first, b""
        piece: Body | None = first
        while piece is not None:
            if isinstance(piece, Absent):
                raise no_room()
            if piece:
                yield piece
            piece = self._next()

    def drain(self) -> None:
        """Read what the handler did not: its answer comes after its body, unless there is no room to wait for that."""
        while True:
            try:
                if self._next() is None:
                    return
            except ConnectionAbortedError:
                pass
            except MemoryError:
                return

    def _next(self) -> Body | None:
        piece = self._slot.next_piece()
        if piece is not None:
            self._taken += len(piece) + PIECE_COST
            if self._taken >= WINDOW // 2:
                self._slot.give_room(self._taken)
                self._taken = 0
        return piece
