"""How a worker answers: the frames of answers, for handlers in threads and on an event loop."""

import time
from collections.abc import Iterable, Iterator
from typing import Final, Protocol, TypeAlias

import msgspec

from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.wire.bodies import CHUNK_BYTES
from gpufaas_core.wire.credit import Credit
from gpufaas_core.wire.heads import AnswerHead, AnswersHead, DroppedHead, EndHead, LaidHead, MeasuredHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame, encode_prefix
from gpufaas_functions.answers import Memory, check_length, declared_length, failure, in_one_line
from gpufaas_functions.areas import Area
from gpufaas_functions.author import HandlerAnswer

_JOINED: Final = 16 * 1024
"""The largest piece, in bytes, that goes at once with its prefix: to copy it costs less than to send twice."""
_FRAMING: Final = 64
"""Bytes of a head, or of one of its headers, beside names and values, at most."""
Small: TypeAlias = "tuple[int, AnswerHead, bytes]"
"""A small answer of a batch: the place of its call, head and body."""
_encode: Final = msgspec.msgpack.Encoder().encode


class Out(Protocol):
    """A worker's connection, for what it says."""

    def send(self, *frame: bytes | memoryview) -> None:
        """Send a frame, in pieces."""

    def later(self, frame: bytes, now: Seconds) -> None:
        """Send *frame*, the answer of a call that ended at *now*, with those that follow it at once."""

    def flush(self) -> None:
        """Send what waits for others."""


class Reply:
    """
    The answers of one slot. Each is sent at once (`whole`, `batch`), or in pieces: `begin`, then `piece` while there is
    `credit`, then `check` and `end`. Its methods raise what sending raises: `Closed` in threads.
    """

    __slots__ = ("_lane", "_length", "_memory", "_out", "_sent", "credit")

    def __init__(self, slot: int, out: Out, memory: Memory) -> None:
        self._lane = slot
        self._out = out
        self._memory = memory
        self.credit: Final = Credit()
        """Of the answers of all calls: so room may come late, behind another one."""
        self._length = -1
        """The bytes that the answer must have which goes in pieces; -1: any number."""
        self._sent = 0
        """The bytes of its pieces."""

    def whole(self, answer: HandlerAnswer, method: str, area: Area | None, began: Seconds) -> Seconds:
        """
        Send *answer* if it can go at once, in the *area* of its call or in its frame.

        :param began: when the handler began, by `time.perf_counter`
        :return: how long the handler ran; -1: the answer has to go in pieces
        """
        body = answer.body
        if body is None:
            return -1.0
        now = time.perf_counter()
        run_s = now - began
        if area is not None and method != "HEAD" and area.takes(len(body)):
            area.lay(body)
            laid = LaidHead(len(body), msgspec.Raw(_encode(self.head(answer, method, run_s))))
            self._out.send(encode_frame(Kind.LAID, laid, lane=self._lane))
            return run_s
        if len(body) > CHUNK_BYTES:
            return -1.0
        self._out.later(encode_frame(Kind.ANSWER, self.head(answer, method, run_s), body, self._lane), now)
        return run_s

    def head(self, answer: HandlerAnswer, method: str, run_s: Seconds) -> AnswerHead:
        """Return the head of a whole answer."""
        length = -1
        if method == "HEAD":
            # The body is left out: its length is what the handler declares, or that of the body it returned.
            declared = declared_length(answer.headers)
            length = declared if declared >= 0 else len(answer.body or b"") or -1
        peak = self._memory.grown() if answer.out_of_memory else 0
        return AnswerHead(answer.status, answer.headers, run_s, peak, answer.out_of_memory, answer.failed, length)

    def batch(self, answers: Iterable[Small]) -> None:
        """Send small answers of a batch."""
        for heads, body in together(answers):
            self._out.send(encode_frame(Kind.ANSWERS, heads, body, self._lane))

    def begin(self, answer: HandlerAnswer, method: str) -> None:
        """An answer begins to go in pieces."""
        length = declared_length(answer.headers) if answer.body is None else len(answer.body)
        self._length, self._sent = -1 if method == "HEAD" else length, 0
        self._out.send(
            encode_frame(Kind.HEAD, AnswerHead(answer.status, answer.headers, length=length), lane=self._lane)
        )

    def piece(self, piece: bytes | memoryview) -> None:
        """Send a *piece*, of `CHUNK_BYTES` at most. :raises ValueError: the answer is longer than it must be"""
        size = len(piece)
        self._sent += size
        if 0 <= self._length < self._sent:
            self.check()
        self.credit.spend(size)
        if size <= _JOINED:
            self._out.send(encode_frame(Kind.CHUNK, None, piece, self._lane))
        else:
            self._out.send(encode_prefix(Kind.CHUNK, None, size, self._lane), piece)

    def check(self) -> None:
        """All pieces were sent. :raises ValueError: the answer is shorter than it must be"""
        check_length(self._length, self._sent, is_over=True)

    def failure(self, exc: BaseException) -> tuple[str, bool]:
        """Log why an answer breaks off in its middle. Return what `end` says of that."""
        answer = failure(exc, self._memory)
        return in_one_line(exc), answer.out_of_memory

    def end(self, began: Seconds, error: str = "", out_of_memory: bool = False) -> None:
        """The answer is over. :param error: why it broke off; empty: it is whole"""
        peak = self._memory.grown() if out_of_memory else 0
        end = EndHead(time.perf_counter() - began, peak, error, out_of_memory)
        self._out.send(encode_frame(Kind.END, end, lane=self._lane))

    def room(self, room: Bytes) -> None:
        """Let the node send *room* bytes more of the body of the call."""
        self._out.send(encode_frame(Kind.ROOM, RoomHead(room), lane=self._lane))

    def drop(self, number: int) -> None:
        """The call or batch with that number was taken back."""
        self._out.send(encode_frame(Kind.DROPPED, DroppedHead(number), lane=self._lane))


def growth_frame(memory: Memory) -> bytes:
    """
    Measure *memory*, and return the frame that says its new peak; empty: it did not grow.

    Send it after the answer: to measure a large worker takes longer than many a call.
    """
    peak = memory.grown()
    return encode_frame(Kind.MEASURED, MeasuredHead(peak, memory.held())) if peak else b""


def together(answers: Iterable[Small]) -> Iterator[tuple[AnswersHead, bytes]]:
    """Yield head and body of ANSWERS with all of *answers*, in as few frames as their sizes allow."""
    heads: list[tuple[int, Bytes, AnswerHead]] = []
    bodies: list[bytes] = []
    size = 0
    for place, head, body in answers:
        one = _FRAMING + len(body) + sum(_FRAMING + len(name) + len(value) for name, value in head.headers)
        if heads and size + one > CHUNK_BYTES:
            yield AnswersHead(heads), b"".join(bodies)
            heads, bodies, size = [], [], 0
        heads.append((place, len(body), head))
        bodies.append(body)
        size += one
    if heads:
        yield AnswersHead(heads), b"".join(bodies)
