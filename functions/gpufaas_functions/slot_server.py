"""Serves the calls of one slot of a worker: one socket, one call or batch at a time."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from gpufaas_core.frames import (
    CHUNK_BYTES,
    FILE,
    PREFIX,
    STREAM,
    AnswerHead,
    BatchHead,
    CallHead,
    CancelHead,
    EndHead,
    Kind,
    LimitHead,
    encode_frame,
    encode_prefix,
)
from gpufaas_core.model import Seconds
from gpufaas_functions import call_lines
from gpufaas_functions.answers import (
    Handle,
    Memory,
    declared_length,
    event_of,
    exactly,
    failure,
    growth_frame,
    in_one_line,
    pieces_of,
    whole_frame,
)
from gpufaas_functions.author import Context, Event, HandlerAnswer, to_answer
from gpufaas_functions.memory import is_out_of_memory
from gpufaas_functions.parking import Parking

_JOINED: Final = 16 * 1024
"""A piece of at most so many bytes goes with its prefix, at once: to copy it costs less than to send twice."""
_LOOK_S: Final[Seconds] = 0.02
"""An answer that streams looks so often whether its caller has left."""
_decode_call: Final = msgspec.msgpack.Decoder(CallHead).decode
_decode_batch: Final = msgspec.msgpack.Decoder(BatchHead).decode
_decode_cancel: Final = msgspec.msgpack.Decoder(CancelHead).decode
_decode_limit: Final = msgspec.msgpack.Decoder(LimitHead).decode


class Closed(Exception):
    """The manager closed the slot."""


class Cancel(BaseException):
    """The caller is gone. Raised in the loop over a generator, never in the author's own code."""


def no_room() -> MemoryError:
    """Return what a call fails with whose body has no room in memory."""
    return MemoryError("for the body of the call")


class SlotServer:
    """Serves the calls of one slot: one socket, one call or batch at a time."""

    def __init__(
        self,
        sock: socket.socket,
        handle: Handle,
        function: str,
        device: str,
        memory: Memory,
        *,
        alone: bool,
    ) -> None:
        """:param alone: the worker has no other slot"""
        self.sock = sock
        self._handle = handle
        self._function = function
        self._device = device
        self.memory = memory
        self._alone = alone
        self.took: Seconds = -1.0
        """How long the handler ran for the last call or batch; -1: what came was none, or its body streamed."""
        self.long: Callable[[], None] | None = None
        """Called before a call that may take long, however quick the handler is."""
        self.serve_batch: Callable[[int], None] | None = None
        """Answers a batch of that many calls; None: none comes."""
        self.parking: Parking | None = None
        self._buffer = bytearray(64 * 1024)
        self._view = memoryview(self._buffer)
        self._at = 0
        self._filled = 0

    def serve(self) -> None:
        """Answer calls until the manager closes the socket."""
        try:
            while True:
                self.serve_next()
        except (Closed, OSError):
            return

    def serve_next(self) -> None:
        """
        Read a frame, and answer the call or batch that begins with it.

        :raises Closed, OSError: the socket is closed
        """
        kind, header, body = self._read()
        self.took = -1.0
        if kind == Kind.CALL:
            head = _decode_call(header)
            call_lines.begin(head.call, self._alone)
            try:
                self._call(head, body)
            finally:
                call_lines.end(head.call, self._alone)
        elif kind == Kind.BATCH and self.serve_batch is not None:
            began = time.perf_counter()
            self.serve_batch(_decode_batch(header).calls)
            self.took = time.perf_counter() - began
        else:
            self.take(kind, header)
        # A CANCEL, BODY or BODY_END that comes here belongs to a call that has ended.

    @property
    def more(self) -> bool:
        """Whether more has come than was read."""
        return self._filled > self._at

    def _call(self, head: CallHead, body: bytes | None) -> None:
        stream: _BodyStream | None = None
        if head.body_mode == STREAM:
            if self.long is not None:
                self.long()
            stream = _BodyStream(self, body)
            event = Event(head.method, head.path, head.query, head.headers, None, stream.chunks)
        elif head.body_mode == FILE:
            event = event_of(head, b"")
        else:
            event = Event(head.method, head.path, head.query, head.headers, body)
        context = Context(head.call, self._function, self._device)
        failed = out_of_memory = False
        began = time.perf_counter()
        try:
            if body is None and stream is None:
                raise no_room()
            answer = to_answer(self._handle(event, context))
        except BaseException as exc:
            if isinstance(exc, (Closed, KeyboardInterrupt)):
                raise
            answer, out_of_memory, failed = failure(exc, self.memory), is_out_of_memory(exc), True
            exc = None  # type: ignore[assignment]
        if stream is not None and answer.body is not None:
            stream.drain()
        if answer.body is not None and len(answer.body) <= CHUNK_BYTES:
            run_s = time.perf_counter() - began
            if stream is None:
                self.took = run_s
            peak = self.memory.grown() if out_of_memory else 0
            self.sock.sendall(whole_frame(answer, head.method, run_s, peak, out_of_memory, failed))
            self.say_growth()
            return
        self.stream_answer(answer, began, stream, head.method)
        if stream is None:
            self.took = time.perf_counter() - began
        self.say_growth()

    def context(self, head: CallHead) -> Context:
        return Context(head.call, self._function, self._device)

    def say_growth(self) -> None:
        """Measure memory after a call, and say a new peak."""
        if frame := growth_frame(self.memory):
            self.send(frame)

    def take(self, kind: int, header: bytes) -> bool:
        """Take a frame that belongs to no call; return whether it was one."""
        if kind != Kind.LIMIT:
            answer = None if self.parking is None else self.parking.answer(kind, header)
            if answer is not None:
                self.send(answer)
            return answer is not None
        self.memory.limit(_decode_limit(header).memory)
        return True

    def next_call(self) -> tuple[CallHead, bytes | None]:
        """Return the next call, which is one of a batch, and its body, as `_read` does."""
        while True:
            kind, header, body = self._read()
            if kind == Kind.CALL:
                return _decode_call(header), body
            self.take(kind, header)

    def stream_answer(
        self, answer: HandlerAnswer, began: float, stream: "_BodyStream | None", method: str, place: int = 0
    ) -> None:
        """:param place: of its call in its batch"""
        error, out_of_memory = "", False
        length = declared_length(answer.headers) if answer.body is None else len(answer.body)
        self.send(encode_frame(Kind.HEAD, AnswerHead(answer.status, answer.headers, length=length)))
        chunks: Iterator[bytes | memoryview] | None = answer.chunks
        if answer.body is not None:
            chunks = iter(pieces_of(answer.body))
        assert chunks is not None
        if length >= 0 and method != "HEAD":
            chunks = exactly(length, chunks)
        look_at = 0.0
        try:
            for chunk in chunks:
                # While the body still comes, its reader reads a CANCEL too.
                if (now := time.perf_counter()) >= look_at and (stream is None or stream.ended):
                    if self._cancelled(place):
                        raise Cancel
                    look_at = now + _LOOK_S
                for piece in pieces_of(chunk) if len(chunk) > CHUNK_BYTES else (chunk,):
                    if len(piece) > _JOINED:
                        self.send(encode_prefix(Kind.CHUNK, None, len(piece)))
                        self.send(piece)
                    elif piece:
                        self.send(encode_frame(Kind.CHUNK, None, piece))
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
        self.send(encode_frame(Kind.END, EndHead(time.perf_counter() - began, peak, error, out_of_memory)))

    def send(self, piece: bytes | memoryview) -> None:
        """Send frames of an answer. An OSError would look like an error of the author's generator: raise `Closed`."""
        try:
            self.sock.sendall(piece)
        except OSError:
            raise Closed from None

    def _cancelled(self, place: int) -> bool:
        """Whether a CANCEL of this call has come. Asked now and then, to stop an answer that never ends."""
        if self._filled > self._at:
            kind = self._buffer[self._at]
        else:
            try:
                peeked = self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                raise Closed from None
            if not peeked:
                raise Closed
            kind = peeked[0]
        if kind == Kind.BATCH:
            return False  # it went ahead, and nothing about this call comes behind it
        kind, header, _ = self._read()
        self.take(kind, header)
        return kind == Kind.CANCEL and _decode_cancel(header).place == place

    # Reading: one recv for a small frame; a large body is received into its own buffer.

    def _read(self) -> tuple[int, bytes, bytes | None]:
        """Return the next frame: kind, header and body; None: there is no memory for the body, which is left out."""
        self._need(16)
        kind, _, _, header_bytes, body_bytes = PREFIX.unpack_from(self._buffer, self._at)
        header_at = self._at + 16
        body_at = header_at + header_bytes
        self._at = body_at + body_bytes
        if self._at <= self._filled:  # nearly always: all of the frame is here
            return kind, bytes(self._view[header_at:body_at]), bytes(self._view[body_at : self._at])
        self._at = header_at
        header = self._take(header_bytes)
        try:
            return kind, header, self._take(body_bytes)
        except MemoryError:
            return kind, header, None

    def _need(self, size: int) -> None:
        """Receive until *size* bytes, at most those of the buffer, are ready at `_at`."""
        ready = self._filled - self._at
        if ready >= size:
            return
        if not ready:
            self._at = self._filled = 0
        elif self._at:
            self._buffer[:ready] = self._buffer[self._at : self._filled]
            self._at, self._filled = 0, ready
        while self._filled < size:
            self._filled += self._receive(self._view[self._filled :])

    def _take(self, size: int) -> bytes:
        """:raises MemoryError: there is none for so many bytes, which are received all the same"""
        ready = self._filled - self._at
        if size <= ready:
            taken = bytes(self._view[self._at : self._at + size])
            self._at += size
            return taken
        try:
            whole = bytearray(size)
        except MemoryError:
            self._at = self._filled = 0
            while ready < size:
                ready += self._receive(self._view[: size - ready])
            raise
        whole[:ready] = self._view[self._at : self._filled]
        self._at = self._filled = 0
        view = memoryview(whole)
        while ready < size:
            ready += self._receive(view[ready:])
        return bytes(whole)

    def _receive(self, view: memoryview) -> int:
        count = self.sock.recv_into(view)
        if not count:
            raise Closed
        return count


class _BodyStream:
    """
    The body of a call that streams: what came with the CALL, then BODY frames until BODY_END.

    Reading it raises ConnectionAbortedError if the caller goes away before the end.
    """

    def __init__(self, slot: SlotServer, first: bytes | None) -> None:
        self._slot = slot
        self._first = first
        self.ended = False

    def chunks(self) -> Iterator[bytes]:
        first, self._first = self._first, b""
        if first is None:
            raise no_room()
        if first:
            yield first
        while not self.ended:
            kind, header, body = self._slot._read()
            if kind == Kind.BODY:
                if body is None:
                    raise no_room()
                yield body
            elif kind == Kind.CANCEL:
                self.ended = True
                raise ConnectionAbortedError("the caller went away before its body was whole")
            elif not self._slot.take(kind, header):
                self.ended = True

    def drain(self) -> None:
        """Read what the handler did not, so that the next frame is a CALL."""
        while not self.ended:
            with contextlib.suppress(ConnectionAbortedError, MemoryError):
                for _ in self.chunks():
                    pass
