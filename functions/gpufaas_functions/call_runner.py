"""Runs the calls of a worker whose handler is a plain function: a call or a batch in the thread that has its turn."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import copy_context
from functools import partial
from typing import NamedTuple

from gpufaas_core.model import Seconds
from gpufaas_core.wire.bodies import CHUNK_BYTES, pieces_of
from gpufaas_functions import call_lines
from gpufaas_functions.answers import Handle, Memory, answer_of, declared_length, failure, opened
from gpufaas_functions.author import Context, HandlerAnswer, to_answer
from gpufaas_functions.batches import BatchHandler, Result
from gpufaas_functions.connection import Absent, Body, Closed
from gpufaas_functions.inbox import BodyStream, Call, Work, event_of, no_room
from gpufaas_functions.parking import ModelParking
from gpufaas_functions.reply import Small


class Served(NamedTuple):
    """The function of a worker, and where it runs."""

    function: str
    device: str
    handle: Handle
    memory: Memory
    together: BatchHandler | None = None
    """Runs batches; None: none comes."""
    parking: ModelParking | None = None
    """None: the worker is never parked."""


class CallRunner:
    """See module. A subclass gives threads to calls, and says how these wait for what comes (`slot_threads`)."""

    def __init__(self, served: Served, *, alone: bool) -> None:
        """:param alone: the worker has one slot"""
        self._served = served
        self._alone = alone

    def wait(self, work: Work) -> None:
        """Wait until something may have come for *work*. :raises Closed: the connection is closed"""
        raise NotImplementedError

    def look(self) -> None:
        """Let come what is there. :raises Closed: the connection is closed"""
        raise NotImplementedError

    def run(self, work: Work) -> Seconds:
        """
        Run *work* in a copy of the context: no other call sees what it sets.

        :return: how long the handler ran; -1: its body streamed
        :raises Closed: the connection is closed
        """
        return copy_context().run(self._batch if work.batch else self._one, work)

    def _one(self, work: Work) -> Seconds:
        call = work.calls[0]
        call_lines.begin(call.head.call, self._alone)
        try:
            return self._call(work, call)
        finally:
            call_lines.end(call.head.call, self._alone)
            if call.area is not None:
                call.area.end()

    def _call(self, work: Work, call: Call) -> Seconds:
        head, body, reply, served = call.head, call.take_body(), work.slot.reply, self._served
        stream, pieces = None, None
        if isinstance(body, BodyStream):
            stream, pieces = body, partial(self._pieces, work, body)
        began = time.perf_counter()
        try:
            event = event_of(head, body, pieces)
            answer = to_answer(served.handle(event, Context(head.call, served.function, served.device)))
            if answer.chunks is not None:
                answer = opened(answer, -1 if head.method == "HEAD" else declared_length(answer.headers))
        except BaseException as exc:
            if isinstance(exc, (Closed, KeyboardInterrupt)):
                raise
            answer = failure(exc, self._served.memory)
        if stream is not None and answer.body is not None:
            self._drain(work, stream)
        run_s = reply.whole(answer, head.method, call.area, began)
        if run_s < 0.0:
            self._stream(work, call, answer, began, stream)
            run_s = time.perf_counter() - began
        return -1.0 if stream is not None else run_s

    def _stream(
        self, work: Work, call: Call, answer: HandlerAnswer, began: Seconds, body: BodyStream | None = None
    ) -> None:
        """:raises Closed: the connection is closed"""
        reply = work.slot.reply
        error, out_of_memory = "", False
        reply.begin(answer, call.head.method)
        chunks = answer.chunks if answer.body is None else pieces_of(answer.body)
        assert chunks is not None
        try:
            for chunk in chunks:
                self.look()
                if not self._sent(work, call, chunk):
                    error = "cancelled"
                    break
            else:
                reply.check()
        except Closed:
            raise
        except BaseException as exc:
            error, out_of_memory = reply.failure(exc)
        finally:
            with contextlib.suppress(Exception):
                chunks.close()  # type: ignore[union-attr]  # both are generators
        if body is not None:
            self._drain(work, body)
        reply.end(began, error, out_of_memory)

    def _sent(self, work: Work, call: Call, chunk: bytes | memoryview) -> bool:
        """Send *chunk*, as there is room. Return whether it went: False if the caller is gone."""
        reply = work.slot.reply
        for piece in pieces_of(chunk) if len(chunk) > CHUNK_BYTES else (chunk,):
            while not (call.cancelled or reply.credit.is_left):
                self.wait(work)
            if call.cancelled:
                return False
            if piece:
                reply.piece(piece)
        return True

    # --- a body that streams ---

    def _pieces(self, work: Work, stream: BodyStream) -> Iterator[bytes]:
        """
        Yield what comes of the body.

        :raises ConnectionAbortedError: the caller is gone
        :raises MemoryError: there was no room for a piece
        """
        while (piece := self._next(work, stream)) is not None:
            if isinstance(piece, Absent):
                raise no_room()
            if piece:
                yield piece

    def _drain(self, work: Work, stream: BodyStream) -> None:
        """Read what the handler did not: its answer comes after its body, unless there is no room to wait for that."""
        with contextlib.suppress(ConnectionAbortedError, MemoryError):
            while self._next(work, stream) is not None:
                pass

    def _next(self, work: Work, stream: BodyStream) -> Body | None:
        """Wait for the next piece; None: there is none. :raises ConnectionAbortedError: the caller is gone"""
        call = work.calls[0]
        while not stream.is_there:
            if call.cancelled:
                raise ConnectionAbortedError("the caller went away before its body was whole")
            self.wait(work)
        piece = stream.take()
        if room := stream.room():
            work.slot.reply.room(room)
        return piece

    # --- a batch ---

    def _batch(self, work: Work) -> Seconds:
        """Answer a batch. What is printed meanwhile belongs to none of its calls."""
        began = time.perf_counter()
        large = self._run_batch(work, began)
        for place in sorted(large):  # after the others: their callers may read slowly
            self._stream(work, work.calls[place], large.pop(place), began)
        for call in work.calls:
            if call.area is not None:
                call.area.end()
        return time.perf_counter() - began

    def _run_batch(self, work: Work, began: Seconds) -> dict[int, HandlerAnswer]:
        """Run a batch, and send its small answers. Return the others by the place of their calls."""
        served = self._served
        assert served.together is not None
        try:
            events = [event_of(each.head, each.take_body()) for each in work.calls]
        except MemoryError:
            for each in work.calls:
                each.take_body()
            return self._answer_batch(work, dict.fromkeys(range(len(work.calls)), no_room()), began)
        contexts = [Context(each.head.call, served.function, served.device) for each in work.calls]
        large: dict[int, HandlerAnswer] = {}
        for results in served.together.run(events, contexts):
            large |= self._answer_batch(work, results, began)
        return large

    def _answer_batch(self, work: Work, results: Mapping[int, Result], began: Seconds) -> dict[int, HandlerAnswer]:
        """Send *results*, by the place of their calls, and return those that are too large."""
        run_s, reply = time.perf_counter() - began, work.slot.reply
        small: list[Small] = []
        large: dict[int, HandlerAnswer] = {}
        shown: dict[int, str] = {}
        for place, result in results.items():
            head = work.calls[place].head
            answer = self._failure(head.call, result, shown) if isinstance(result, BaseException) else result
            assert answer.body is not None
            if len(answer.body) > CHUNK_BYTES:
                large[place] = answer
            else:
                small.append((place, reply.head(answer, head.method, run_s), answer.body))
        reply.batch(small)
        return large

    def _failure(self, call: str, exc: BaseException, shown: dict[int, str]) -> HandlerAnswer:
        """Return the answer of a *call* that failed. The traceback of an exception that several have is logged once."""
        call_lines.begin(call, alone=False)
        try:
            first = shown.setdefault(id(exc), call)
            if first == call:
                return failure(exc, self._served.memory)
            print(f"{type(exc).__name__} in one batch with call {first}, which has the traceback", file=sys.stderr)
            return answer_of(exc)
        finally:
            call_lines.end(call, alone=False)
