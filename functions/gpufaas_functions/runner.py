"""
The main program of a worker: import the handler, load the model, then serve calls slot by slot.

It runs in a process of its own, forked from the zygote (gpufaas_gpu_manager.zygote) with torch already imported. Each
slot is a unix socket with one blocking thread; a model function has one slot, served by the main thread. The worker
ends when its manager closes the sockets, or ends.
"""

import contextlib
import importlib
import inspect
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from gpufaas_core.frames import (
    CHUNK_BYTES,
    FILE,
    PREFIX,
    STREAM,
    AnswerHead,
    CallHead,
    EndHead,
    FailedHead,
    Kind,
    ReadyHead,
    encode_frame,
    encode_prefix,
)
from gpufaas_functions import call_lines
from gpufaas_functions.author import BadBody, Context, Event, HandlerAnswer, to_answer
from gpufaas_functions.emulated import Emulated, EmulatedHandler, EmulatedMemory
from gpufaas_functions.memory import CpuMemory, CudaMemory, fork_point, is_out_of_memory

_SAID: Final = 2000
"""Characters of an exception's text that the caller gets. The text may hold a whole array."""
_OURS: Final = frozenset(
    (__file__, importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
)
Memory = CpuMemory | CudaMemory | EmulatedMemory
_decode_call: Final = msgspec.msgpack.Decoder(CallHead).decode


class WorkerStart(msgspec.Struct, frozen=True):
    """What the zygote gives a new worker, with its sockets."""

    function: str
    bundle: str
    """Directory of the installed bundle."""
    handler: str
    kind: str
    device: str
    """What the handler's load() gets: ``cpu`` or ``cuda:0``."""
    slots: int
    threads: int
    limit: int
    """Private memory in bytes that the worker may add after the fork; 0: the kernel sets no limit."""
    env: dict[str, str]
    check: bool = False
    """Only import the handler, and report whether that worked."""
    label: str = ""
    """The device's short name (``cpu:0``), for the process list."""
    cuda_share: float = 0.0
    """On CUDA: the share of the device's memory that its allocator may take; 0: all."""
    emulated: Emulated | None = None
    """On an emulated device: the author's handler is not run."""


class Closed(Exception):
    """The manager closed the slot."""


class Cancel(BaseException):
    """The caller is gone. Raised in the loop over a generator, never in the author's own code."""


def run(start: WorkerStart, sockets: list[socket.socket]) -> int:
    """
    Serve until the sockets close; return the exit status.

    :param sockets: of the slots; on an emulated device, as many clocks follow
    """
    slots, clocks = (sockets, []) if start.emulated is None else _halves(sockets)
    memory = _memory_of(start, len(slots))
    control = slots[0]
    phases: list[tuple[str, float]] = []
    try:
        began = time.perf_counter()
        about = start.emulated
        handler = import_handler(start) if about is None else EmulatedHandler(about, start.function, clocks)
        phases.append(("import", time.perf_counter() - began))
        handle: Callable[[Event, Context], Any]
        if start.check:
            control.sendall(encode_frame(Kind.READY, ReadyHead(0, phases)))
            return 0
        if start.kind == "model":
            began = time.perf_counter()
            model = handler.load(start.device)
            memory.synchronize()
            phases.append(("load", time.perf_counter() - began))
            author_handle = handler.handle

            def handle(event: Event, context: Context) -> Any:
                return author_handle(model, event, context)
        else:
            handle = handler.handle
    except BaseException as exc:
        # Every error of a load ends this worker. The manager gets a summary, the log the whole traceback.
        text = _utf8("".join(traceback.format_exception(_from_the_author(exc))))
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
            control.sendall(
                encode_frame(Kind.FAILED, FailedHead(_in_one_line(exc), text[-16 * _SAID :], is_out_of_memory(exc)))
            )
        return 1
    occupation = memory.peak()
    if len(slots) > 1:
        for index, slot in enumerate(slots[1:], 1):
            serving = SlotServer(slot, handle, start, memory, alone=False)
            threading.Thread(target=serving.serve, name=f"slot-{index}", daemon=True).start()
    control.sendall(encode_frame(Kind.READY, ReadyHead(occupation, phases, fork_point().data)))
    SlotServer(control, handle, start, memory, alone=len(slots) == 1).serve()
    return 0


def _halves(sockets: list[socket.socket]) -> tuple[list[socket.socket], list[socket.socket]]:
    middle = len(sockets) // 2
    return sockets[:middle], sockets[middle:]


def _memory_of(start: WorkerStart, slots: int) -> Memory:
    if start.emulated is not None:
        return EmulatedMemory(start.emulated)
    return CudaMemory(start.device) if start.device.startswith("cuda") else CpuMemory(slots)


def import_handler(start: WorkerStart) -> Any:
    """
    Import the author's module and check that it has what its kind calls.

    :raises AttributeError: it lacks ``handle`` (or ``load``); other errors are the module's own
    """
    module = importlib.import_module(start.handler)
    for name in ("load", "handle") if start.kind == "model" else ("handle",):
        if not callable(getattr(module, name, None)):
            raise AttributeError(f"{start.handler}.py defines no function {name}()")
        if inspect.iscoroutinefunction(getattr(module, name)) or inspect.isasyncgenfunction(getattr(module, name)):
            raise TypeError(f"{start.handler}.py: {name}() is async, which is not supported: write def {name}")
    return module


class SlotServer:
    """Serves the calls of one slot: one socket, one thread, one call at a time."""

    def __init__(
        self,
        sock: socket.socket,
        handle: Callable[[Event, Context], Any],
        start: WorkerStart,
        memory: Memory,
        *,
        alone: bool,
    ) -> None:
        """:param alone: the worker has no other slot"""
        self._sock = sock
        self._handle = handle
        self._function = start.function
        self._device = start.device
        self._memory = memory
        self._alone = alone
        self._buffer = bytearray(64 * 1024)
        self._view = memoryview(self._buffer)
        self._at = 0
        self._filled = 0

    def serve(self) -> None:
        """Answer calls until the manager closes the socket."""
        try:
            while True:
                kind, header, body = self._read()
                if kind == Kind.CALL:
                    head = _decode_call(header)
                    call_lines.begin(head.call, self._alone)
                    try:
                        self._call(head, body)
                    finally:
                        call_lines.end(head.call, self._alone)
                # A CANCEL, BODY or BODY_END that comes here belongs to a call that has ended.
        except (Closed, OSError):
            return

    def _call(self, head: CallHead, body: bytes) -> None:
        stream: _BodyStream | None = None
        if head.body_mode == STREAM:
            stream = _BodyStream(self, body)
            event = Event(head.method, head.path, head.query, head.headers, None, stream.chunks)
        elif head.body_mode == FILE:
            event = Event(head.method, head.path, head.query, head.headers, None, file=head.body_path)
        else:
            event = Event(head.method, head.path, head.query, head.headers, body)
        context = Context(head.call, self._function, self._device)
        failed = out_of_memory = False
        began = time.perf_counter()
        try:
            answer = to_answer(self._handle(event, context))
        except BaseException as exc:
            if isinstance(exc, (Closed, KeyboardInterrupt)):
                raise
            answer, out_of_memory, failed = self._failure(exc), is_out_of_memory(exc), True
            exc = None  # type: ignore[assignment]
        if stream is not None and answer.body is not None:
            stream.drain()
        if answer.body is not None and len(answer.body) <= CHUNK_BYTES:
            run_s = time.perf_counter() - began
            length = -1
            if head.method == "HEAD":
                # The body is left out: its length is what the handler declares, or that of the body it returned.
                declared = _declared_length(answer.headers)
                length = declared if declared >= 0 else len(answer.body) or -1
            answer_head = AnswerHead(
                answer.status, answer.headers, run_s, self._memory.grown(), out_of_memory, failed, length
            )
            self._sock.sendall(encode_frame(Kind.ANSWER, answer_head, answer.body))
            return
        self._stream_answer(answer, began, stream, head.method)

    def _stream_answer(self, answer: HandlerAnswer, began: float, stream: "_BodyStream | None", method: str) -> None:
        error, out_of_memory = "", False
        length = _declared_length(answer.headers) if answer.body is None else len(answer.body)
        self._send(encode_frame(Kind.HEAD, AnswerHead(answer.status, answer.headers, length=length)))
        chunks: Iterator[bytes | memoryview] | None = answer.chunks
        if answer.body is not None:
            chunks = iter(_pieces(answer.body))
        assert chunks is not None
        if length >= 0 and method != "HEAD":
            chunks = _exactly(length, chunks)
        try:
            for chunk in chunks:
                # While the body still comes, its reader reads a CANCEL too.
                if (stream is None or stream.ended) and self._cancelled():
                    raise Cancel
                for piece in _pieces(chunk) if len(chunk) > CHUNK_BYTES else (chunk,):
                    if piece:
                        self._send(encode_prefix(Kind.CHUNK, None, len(piece)))
                        self._send(piece)
        except Cancel:
            error = "cancelled"
        except Closed:
            raise
        except BaseException as exc:
            self._failure(exc)
            error, out_of_memory = _in_one_line(exc), is_out_of_memory(exc)
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):
                    close()
        if stream is not None:
            stream.drain()
        end = EndHead(time.perf_counter() - began, self._memory.grown(), error, out_of_memory)
        self._send(encode_frame(Kind.END, end))

    def _send(self, piece: bytes | memoryview) -> None:
        """Send a part of a stream. An OSError would look like an error of the author's generator: raise `Closed`."""
        try:
            self._sock.sendall(piece)
        except OSError:
            raise Closed from None

    def _failure(self, exc: BaseException) -> HandlerAnswer:
        """
        Return an answer 500 with the text of the exception, and write the traceback to the function's log.

        A body that is not what the handler asked for is the caller's fault: 400, and nothing in the log. If memory ran
        out, the manager replaces the text, since it knows how much there is.
        """
        if isinstance(exc, BadBody):
            return HandlerAnswer(400, [(b"content-type", b"text/plain; charset=utf-8")], str(exc).encode(), None)
        traceback.print_exception(_from_the_author(exc), file=sys.stderr)
        if is_out_of_memory(exc):
            self._memory.release()
        return HandlerAnswer(500, [(b"content-type", b"text/plain; charset=utf-8")], _in_one_line(exc).encode(), None)

    def _cancelled(self) -> bool:
        """Whether a CANCEL has come. Asked between chunks, to stop an answer that never ends."""
        if self._filled == self._at:
            try:
                if not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise Closed
            except BlockingIOError:
                return False
            except OSError:
                raise Closed from None
        kind, _, _ = self._read()
        return bool(kind == Kind.CANCEL)

    # Reading: one recv for a small frame; a large body is received into its own buffer.

    def _read(self) -> tuple[int, bytes, bytes]:
        self._need(16)
        kind, _, _, header_bytes, body_bytes = PREFIX.unpack_from(self._buffer, self._at)
        header_at = self._at + 16
        body_at = header_at + header_bytes
        self._at = body_at + body_bytes
        if self._at <= self._filled:  # nearly always: all of the frame is here
            return kind, bytes(self._view[header_at:body_at]), bytes(self._view[body_at : self._at])
        self._at = header_at
        return kind, self._take(header_bytes), self._take(body_bytes)

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
        ready = self._filled - self._at
        if size <= ready:
            taken = bytes(self._view[self._at : self._at + size])
            self._at += size
            return taken
        whole = bytearray(size)
        whole[:ready] = self._view[self._at : self._filled]
        self._at = self._filled = 0
        view = memoryview(whole)
        while ready < size:
            ready += self._receive(view[ready:])
        return bytes(whole)

    def _receive(self, view: memoryview) -> int:
        count = self._sock.recv_into(view)
        if not count:
            raise Closed
        return count


class _BodyStream:
    """
    The body of a call that streams: what came with the CALL, then BODY frames until BODY_END.

    Reading it raises ConnectionAbortedError if the caller goes away before the end.
    """

    def __init__(self, slot: SlotServer, first: bytes) -> None:
        self._slot = slot
        self._first = first
        self.ended = False

    def chunks(self) -> Iterator[bytes]:
        first, self._first = self._first, b""
        if first:
            yield first
        while not self.ended:
            kind, _, body = self._slot._read()
            if kind == Kind.BODY:
                yield body
            elif kind == Kind.CANCEL:
                self.ended = True
                raise ConnectionAbortedError("the caller went away before its body was whole")
            else:
                self.ended = True

    def drain(self) -> None:
        """Read what the handler did not, so that the next frame is a CALL."""
        with contextlib.suppress(ConnectionAbortedError):
            for _ in self.chunks():
                pass


def _pieces(body: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(body)
    return (view[at : at + CHUNK_BYTES] for at in range(0, len(body), CHUNK_BYTES))


def _declared_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the Content-Length that a handler gave; -1: none, or not a number."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return -1


def _exactly(length: int, chunks: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """
    Yield *chunks*.

    :raises ValueError: together they do not have *length* bytes
    """
    left = length
    try:
        for chunk in chunks:
            left -= len(chunk)
            if left < 0:
                raise ValueError(f"the answer is longer than its Content-Length, {length}")
            yield chunk
        if left:
            raise ValueError(f"the answer ended {left} bytes before its Content-Length, {length}")
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


def _from_the_author(exc: BaseException) -> BaseException:
    """Remove the frames of the runner and of the import that come before the author's: they explain nothing."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return exc.with_traceback(trace) if trace is not None else exc


def _in_one_line(exc: BaseException) -> str:
    """
    Return the type and the text of *exc* in one line. The last line alone would not do: it may be advice (CUDA) or a
    note. Indented lines at the beginning are the place of a syntax error, and are left out.
    """
    lines = _utf8("".join(traceback.format_exception_only(exc))).rstrip().splitlines()
    begin = next((at for at, line in enumerate(lines) if line.strip() and not line[0].isspace()), 0)
    return " ".join(" ".join(lines[begin:]).split())[:_SAID] or type(exc).__name__


def _utf8(text: str) -> str:
    """Escape lone surrogates, which have no UTF-8: a file name in a message may have them."""
    return text.encode(errors="backslashreplace").decode()
