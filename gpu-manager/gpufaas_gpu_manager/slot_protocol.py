"""
The node's end of the socket of one slot of a worker (`gpufaas_core.frames`): it carries calls, and gives their answers
to their exchanges.
"""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar, cast

import msgspec

from gpufaas_core.errors import BadAnswer, GpufaasError
from gpufaas_core.frames import (
    CHUNK_BYTES,
    STREAM,
    AnswerHead,
    AnswersHead,
    BatchHead,
    BrokenFrame,
    CallHead,
    CancelHead,
    EndHead,
    FailedHead,
    FrameReader,
    Kind,
    LimitHead,
    MeasuredHead,
    ParkedHead,
    ReadyHead,
    WokenHead,
    encode_frame,
    encode_prefix,
)
from gpufaas_core.model import Bytes
from gpufaas_core.plausible import is_size, is_time, shortened, why_no_answer, why_no_phases, why_not_ready
from gpufaas_gpu_manager import exchange_state as states
from gpufaas_gpu_manager.exchange import Exchange, Slot

HeadT = TypeVar("HeadT")
_SAID: Final = 2000
"""Characters of a reason."""
_decode_answer: Final = msgspec.msgpack.Decoder(AnswerHead).decode
_decode_answers: Final = msgspec.msgpack.Decoder(AnswersHead).decode
_decode_end: Final = msgspec.msgpack.Decoder(EndHead).decode
_decode_ready: Final = msgspec.msgpack.Decoder(ReadyHead).decode
_decode_measured: Final = msgspec.msgpack.Decoder(MeasuredHead).decode
_decode_parked: Final = msgspec.msgpack.Decoder(ParkedHead).decode
_decode_woken: Final = msgspec.msgpack.Decoder(WokenHead).decode
_decode_failed: Final = msgspec.msgpack.Decoder(FailedHead).decode


class SlotOwner:
    """The worker of a slot, as the slot calls it."""

    on_ready: Callable[[ReadyHead], None]
    on_failed: Callable[[FailedHead], None]
    on_broken: Callable[[str], None]
    on_slot_lost: Callable[[], None]
    on_slot_closed: Callable[[], None]
    on_pong: Callable[[], None]
    on_parked: Callable[[ParkedHead], None]
    on_woken: Callable[[WokenHead], None]
    watch_abandoned: Callable[[], None]
    on_done: Callable[[Slot, Exchange, float, int, bool, bool], None]
    on_measured: Callable[[Bytes, Bytes], None]
    ran_out: Callable[[bytes], GpufaasError]


class _SlotSocket(asyncio.Protocol):
    """The socket itself: a writer waits while it is full, and reading pauses for a slow reader of an answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._writable: asyncio.Future[None] | None = None
        self._full = False
        self._closed = False
        """This end closed it."""
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's

    async def _write(self, prefix: bytes, piece: bytes) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._transport.write(prefix + piece if len(piece) <= 16 * 1024 else prefix)
        if len(piece) > 16 * 1024:
            self._transport.write(piece)
        while self._full and not self.lost:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def eof_received(self) -> bool:
        return False

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.abort()


class SlotProtocol(_SlotSocket):
    """The calls of one slot: their frames out, and what the worker sends."""

    def __init__(self, worker: SlotOwner, index: int) -> None:
        super().__init__()
        self.index = index
        self._worker = worker
        self._reader = FrameReader(CHUNK_BYTES)
        self._exchange: Exchange | None = None
        """The call that it has; of a batch, that whose answer streams now."""
        self._place = 0
        """The place of `_exchange` in its batch."""
        self._batch: dict[int, tuple[Exchange, bool]] = {}
        """The calls of a batch that are not answered, by their place; and whether their answers have no body."""
        self._next: dict[int, tuple[Exchange, bool]] = {}
        """As `_batch`, of the batch that the worker has beside what it runs, and begins after that."""
        self._beginning = 0
        """So many calls of a batch begin next."""
        self._follows = False
        """These are of the batch that follows what the worker runs."""
        self._spoke = False
        """READY or FAILED has come."""
        self._answering = False
        """HEAD has come, END has not."""
        self._grew = False
        """A call has ended, and MEASURED may follow."""
        self._left = -1
        """Bytes that are left of the declared Content-Length; -1: none was declared."""
        self._bodiless = False
        self._whole = False
        """Its calls begin when all that was sent is read, and none of them has been answered."""
        self._behind = False
        """Something was sent behind the batch that went ahead."""
        self._broken = False
        self._asked = 0
        """The kind of the frame that answers what it was asked; 0: it was asked nothing."""
        self._pings = 0
        """The number of pings that are not answered yet."""

    def begin(self, exchange: Exchange, head: CallHead, body: bytes | memoryview) -> None:
        if self._beginning:
            self._beginning -= 1
            batch = self._next if self._follows else self._batch
            batch[len(batch)] = exchange, head.method == "HEAD"
        else:
            self._exchange = exchange
            self._bodiless = head.method == "HEAD"
        assert self._transport is not None
        if self._transport.is_closing():
            if head.body_mode != STREAM:
                exchange.state = states.HOLD[exchange.state]
            return  # the worker has died, or will be killed for this: then its calls are failed or placed again
        if not self._next:
            self._whole = head.body_mode != STREAM
        frame = encode_prefix(Kind.CALL, head, len(body))
        if len(body) <= 16 * 1024:
            self._transport.write(frame + body)
        else:
            # Two writes: to join a large body to its head would copy it.
            self._transport.write(frame)
            self._transport.write(body)

    def limit(self, memory: Bytes) -> None:
        """Tell the worker how much it may occupy of its device."""
        if self._transport is not None and not self._transport.is_closing():
            # A thread that runs a call does not read this: what is unread may be this, and not the call.
            self._whole, self._behind = False, bool(self._next)
            self._transport.write(encode_frame(Kind.LIMIT, LimitHead(memory)))

    def ask(self, kind: int, head: msgspec.Struct | None = None) -> None:
        """Tell the worker to park, or to wake."""
        if self._transport is not None and not self._transport.is_closing():
            self._asked = Kind.PARKED if kind == Kind.PARK else Kind.WOKEN
            self._transport.write(encode_frame(kind, head))

    def begin_batch(self, calls: int) -> None:
        self._beginning = calls
        self._follows = self._exchange is not None or bool(self._batch)
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(encode_frame(Kind.BATCH, BatchHead(calls)))

    def ping(self) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._pings += 1
            self._transport.write(encode_frame(Kind.PING))

    def cancel(self, exchange: Exchange) -> None:
        """
        Tell the worker that nobody waits for this call. Its frames are dropped, its END still counts.

        The handler goes on with a batch, and what is small of its answers comes at once: of its calls, the worker is
        told only of that whose answer streams. Nothing is said behind a batch that went ahead: it would come too late.
        """
        if self._exchange is exchange and self._transport is not None and not self._transport.is_closing():
            if not self._next:
                self._transport.write(encode_frame(Kind.CANCEL, CancelHead(self._place)))
            self.resume()

    async def send_body(self, piece: bytes) -> None:
        await self._write(encode_prefix(Kind.BODY, None, len(piece)), piece)

    async def end_body(self) -> None:
        await self._write(encode_frame(Kind.BODY_END), b"")

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        try:
            for kind, header, body in self._reader.feed(data):
                self._on_frame(kind, header, body)
        except BrokenFrame as exc:
            # The author's code writes to the socket, or the runner is out of step: no later frame can be trusted.
            self._broken = True
            self._worker.on_broken(f"it sent what it must not: {exc}")
            self.close()

    def _on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """:raises BrokenFrame: the frame may not come now, or its content is impossible"""
        exchange = self._exchange
        if kind == Kind.ANSWER and exchange is not None and not self._answering:
            head = _decoded(_decode_answer, header)
            _check_figures(head.run_s, head.peak)
            self._exchange = None
            self._grew = True
            self._begin_next()
            error = self._why_none(head, body)
            # The engine first: it may have the next call for this slot. Then the caller.
            ok = not head.failed and error is None
            self._worker.on_done(self, exchange, head.run_s, head.peak, head.out_of_memory, ok)
            if error is not None:
                exchange.fail(error)
            else:
                exchange.on_answer(head, body)
        elif kind == Kind.ANSWERS and exchange is None:
            self._on_answers(_decoded(_decode_answers, header), body)
        elif kind == Kind.READY or kind == Kind.FAILED:
            self._on_spoken(kind, header)
        elif kind == Kind.MEASURED and self._grew and not self._answering:
            self._grew = False
            measured = _decoded(_decode_measured, header)
            _check_figures(0.0, measured.peak)
            _check_figures(0.0, measured.held)
            self._worker.on_measured(measured.peak, measured.held)
        elif kind == Kind.PONG and self._pings:
            self._pings -= 1
            self._worker.on_pong()
        elif kind == self._asked and exchange is None:
            self._asked = 0
            self._on_asked(kind, header)
        elif exchange is None:
            if kind != Kind.HEAD or not self._batch:
                raise BrokenFrame(f"a frame of kind {kind}, while it had no call")
            self._stream_next(_decoded(_decode_answer, header))
        elif kind == Kind.CHUNK and self._answering:
            if not body:  # empty pieces fill no buffer, so nothing would slow them down
                raise BrokenFrame("an empty piece of an answer")
            if self._left >= 0:
                self._left -= len(body)
                if self._left < 0:
                    raise BrokenFrame("an answer that is longer than its Content-Length")
            exchange.on_chunk(body)
        elif kind == Kind.HEAD and not self._answering:
            self._answering = True
            self._on_head(exchange, _decoded(_decode_answer, header))
        elif kind == Kind.END and self._answering:
            end = _decoded(_decode_end, header)
            _check_figures(end.run_s, end.peak)
            if self._left > 0 and not end.error:
                raise BrokenFrame("an answer that is shorter than its Content-Length")
            self._exchange = None
            self._place = 0
            self._answering = False
            self._grew = True
            self._begin_next()
            self._worker.on_done(self, exchange, end.run_s, end.peak, end.out_of_memory, not end.error)
            exchange.on_end(end)
        else:
            raise BrokenFrame(f"a frame of kind {kind} {'in the middle of' if self._answering else 'before'} an answer")

    def _why_none(self, head: AnswerHead, body: bytes) -> GpufaasError | None:
        """Return what the caller gets in place of this answer; None: the answer."""
        if wrong := why_no_answer(head.status, head.headers):
            return _no_answer(wrong)
        return self._worker.ran_out(body) if head.out_of_memory else None

    def _on_answers(self, said: AnswersHead, bodies: bytes) -> None:
        """Small answers of a batch have come."""
        found: list[tuple[Exchange, AnswerHead, bytes]] = []
        at = 0
        for place, size, head in said.answers:
            _check_figures(head.run_s, head.peak)
            exchange, _ = self._batch.pop(place, _NOBODY)
            if exchange is None or not 0 <= size <= len(bodies) - at:
                raise BrokenFrame(f"an answer of {size} bytes for call {place} of its batch")
            found.append((exchange, head, bodies[at : at + size]))
            at += size
        if at < len(bodies):
            raise BrokenFrame("bytes of no answer")
        self._grew, self._whole = True, False
        self._begin_next()
        errors = [self._why_none(head, body) for _, head, body in found]
        # The engine first, as it may have the next batch for this slot. Then the callers.
        for (exchange, head, _), error in zip(found, errors, strict=True):
            ok = not head.failed and error is None
            self._worker.on_done(self, exchange, head.run_s, head.peak, head.out_of_memory, ok)
        for (exchange, head, body), error in zip(found, errors, strict=True):
            if error is not None:
                exchange.fail(error)
            else:
                exchange.on_answer(head, body)

    def _begin_next(self) -> None:
        """If all that the worker ran is answered, it begins the batch that went ahead."""
        if self._next and not self._batch:
            self._batch, self._next, self._whole, self._behind = self._next, {}, not self._behind, False

    def _stream_next(self, head: AnswerHead) -> None:
        """The first answer of a batch begins to stream that was too large for ANSWERS."""
        self._answering, self._whole = True, False
        self._place = place = next(iter(self._batch))
        self._exchange, self._bodiless = exchange, _ = self._batch.pop(place)
        self._on_head(exchange, head)
        if exchange.abandoned:
            self.cancel(exchange)

    def _on_head(self, exchange: Exchange, head: AnswerHead) -> None:
        self._left = -1 if self._bodiless else head.length
        if wrong := why_no_answer(head.status, head.headers):
            self._left = -1
            exchange.state = states.ABANDON[exchange.state]  # drop the rest of it, until END
            exchange.fail(_no_answer(wrong))
            self.cancel(exchange)
            self._worker.watch_abandoned()
        else:
            exchange.on_head(head)

    def _on_asked(self, kind: int, header: bytes) -> None:
        if kind == Kind.PARKED:
            parked = _decoded(_decode_parked, header)
            _check_figures(0.0, parked.held)
            self._worker.on_parked(msgspec.structs.replace(parked, failed=parked.failed[:_SAID]))
            return
        woken = _decoded(_decode_woken, header)
        if wrong := why_no_phases(woken.phases):
            raise BrokenFrame(wrong)
        self._worker.on_woken(msgspec.structs.replace(woken, failed=woken.failed[:_SAID]))

    def _on_spoken(self, kind: int, header: bytes) -> None:
        if self.index or self._spoke:
            raise BrokenFrame(f"a frame of kind {kind}, after its load")
        self._spoke = True
        if kind == Kind.FAILED:
            self._worker.on_failed(shortened(_decoded(_decode_failed, header)))
            return
        head = _decoded(_decode_ready, header)
        if wrong := why_not_ready(head):
            raise BrokenFrame(wrong)
        self._worker.on_ready(head)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        # The kernel says so if the worker closed it, or died, before it had read all.
        unread = isinstance(exc, (ConnectionResetError, BrokenPipeError)) and self._whole and not self._answering
        unread = unread and not self._next
        for exchange in (self._exchange, *(each for each, _ in self._batch.values())) if unread else ():
            if exchange is not None and exchange.state == states.RUNNING:
                exchange.state = states.HOLD[exchange.state]
        self.resume_writing()
        self._worker.on_slot_lost()
        if not self._closed:
            self._worker.on_slot_closed()


_NOBODY: Final[tuple[None, bool]] = (None, False)


def _no_answer(wrong: str) -> BadAnswer:
    return BadAnswer(f"the function's answer cannot be sent: {wrong}")


def _decoded(decode: Callable[[bytes], HeadT], header: bytes) -> HeadT:
    """:raises BrokenFrame: *header* is not a head of that kind"""
    try:
        return decode(header)
    except (ValueError, RecursionError) as exc:
        raise BrokenFrame(f"no head of a frame: {exc}") from exc


def _check_figures(run_s: float, peak: int) -> None:
    """:raises BrokenFrame: no call can take so long, or use so much memory"""
    if not is_time(run_s) or not is_size(peak):
        raise BrokenFrame(f"its call took {run_s} s and {peak} bytes")
