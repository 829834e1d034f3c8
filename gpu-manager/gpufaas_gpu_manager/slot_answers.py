"""What a worker says of the calls of one slot. Which frame may come when is a table, `wire.order`."""

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from gpufaas_core.errors import BadAnswer, GpufaasError
from gpufaas_core.plausible import MAX_BYTES, MAX_S, why_no_answer
from gpufaas_core.wire.heads import AnswerHead, AnswersHead, DroppedHead, EndHead, LaidHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.order import FROM_WORKER
from gpufaas_core.wire.prefix import BrokenFrame
from gpufaas_functions.areas import MIN
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import ABANDON
from gpufaas_gpu_manager.worker_calls import WorkerCalls
from gpufaas_gpu_manager.worker_slot import WorkerSlot

HeadT = TypeVar("HeadT")
_decode_answer: Final = msgspec.msgpack.Decoder(AnswerHead).decode
_decode_answers: Final = msgspec.msgpack.Decoder(AnswersHead).decode
_decode_end: Final = msgspec.msgpack.Decoder(EndHead).decode
_decode_laid: Final = msgspec.msgpack.Decoder(LaidHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode
_decode_dropped: Final = msgspec.msgpack.Decoder(DroppedHead).decode


class SlotAnswers:
    """See module. Each answer goes to the owner of its call, and to its exchange."""

    def __init__(self, slot: WorkerSlot, owner: WorkerCalls) -> None:
        self._slot = slot
        self._turns = slot.turns
        self._wire = slot.wire
        self._areas = slot.wire.areas
        self._owner = owner
        self._left = -1
        """Bytes that are left of the declared Content-Length; -1: none was declared."""

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """:raises BrokenFrame: the frame may not come now, or its content is impossible"""
        if kind == Kind.DROPPED:  # also of what was taken back before
            self._on_dropped(header)
            return
        turn = self._turns.now
        turn.state = FROM_WORKER[kind][turn.state]
        _ON[kind](self, header, body)

    def _on_answer(self, header: bytes, body: bytes | memoryview) -> None:
        head, exchange = decoded(_decode_answer, header), self._turns.now.call
        assert exchange is not None  # the table of its order
        check_figures(head.run_s, head.peak)
        if len(body) > self._areas.small:
            self._areas.answered(len(body))
        free = self._ended(exchange)
        error = self._why_none(head, body)
        # Its device runs already what went ahead, or it holds none.
        caller_first = error is None and (self._owner.caller_first or self._turns.now.call is not None)
        try:
            if caller_first:
                exchange.on_answer(head, body)
        finally:
            # The engine may have the next call for this slot.
            ok = not head.failed and error is None
            self._owner.on_done(self._slot, exchange, head.run_s, head.peak, head.out_of_memory, ok, free)
        if error is not None:
            exchange.fail(error)
        elif not caller_first:
            exchange.on_answer(head, body)

    def _on_laid(self, header: bytes, body: bytes) -> None:
        """The body of the answer lies in the area of its call."""
        laid = decoded(_decode_laid, header)
        if body:
            raise BrokenFrame(f"an answer of {laid.size} bytes in memory, and one in its frame")
        self._on_answer(bytes(laid.head), self._areas.laid(self._call, laid.size))

    def _on_head(self, header: bytes, _: bytes) -> None:
        head, turn = decoded(_decode_answer, header), self._turns.now
        if (exchange := turn.call) is None:
            exchange = self._turns.stream()  # it was too large for ANSWERS
            if exchange.abandoned:
                self._slot.cancel(exchange)  # its worker was not told before
        if head.length > MIN and not turn.batch:
            self._areas.answered(head.length)
        self._left = -1 if exchange.bodiless else head.length
        if wrong := why_no_answer(head.status, head.headers):
            self._left = -1
            exchange.step(ABANDON)  # drop the rest of it, until END
            exchange.fail(_no_answer(wrong))
            self._owner.cancel(exchange)
        else:
            exchange.on_head(head)

    def _on_chunk(self, _: bytes, body: bytes) -> None:
        if not body:
            raise BrokenFrame("an empty piece of an answer")
        slot, exchange = self._slot, self._turns.now.call
        assert exchange is not None  # the table of its order
        gives = slot.window.came(len(body))
        if self._left >= 0:
            self._left -= len(body)
            if self._left < 0:
                raise BrokenFrame("an answer that is longer than its Content-Length")
        exchange.on_chunk(body)
        if gives:
            slot.give_room(slot.window.room())

    def _on_end(self, header: bytes, _: bytes) -> None:
        end, exchange = decoded(_decode_end, header), self._call
        check_figures(end.run_s, end.peak)
        if self._left > 0 and not end.error:
            raise BrokenFrame("an answer that is shorter than its Content-Length")
        self._slot.resume()
        free = self._ended(exchange)
        self._owner.on_done(self._slot, exchange, end.run_s, end.peak, end.out_of_memory, not end.error, free)
        exchange.on_end(end)

    def _on_room(self, header: bytes, _: bytes) -> None:
        if not self._turns.now.streams:
            raise BrokenFrame("room for a body that does not stream")
        self._slot.credit.add(decoded(_decode_room, header).room)
        self._slot.roomy.set()

    def _on_answers(self, header: bytes, bodies: bytes) -> None:
        """Small answers of a batch have come."""
        batch = self._turns.now.batch
        found: list[tuple[Exchange, AnswerHead, bytes, GpufaasError | None]] = []
        at = 0
        for place, size, head in decoded(_decode_answers, header).answers:
            check_figures(head.run_s, head.peak)
            exchange = batch.pop(place, None)
            if exchange is None or not 0 <= size <= len(bodies) - at:
                raise BrokenFrame(f"an answer of {size} bytes for call {place} of its batch")
            found.append((exchange, head, body := bodies[at : at + size], self._why_none(head, body)))
            at += size
        if at < len(bodies):
            raise BrokenFrame("bytes of no answer")
        self._wire.ended += len(found)
        self._slot.let_go([each for each, *_ in found])
        if self._turns.end() and self._turns.busy:
            self._begin_next()
        # The engine first, as it may have the next batch for this slot. Then the callers.
        for place, (exchange, head, _, error) in enumerate(found, 1):
            ok = not head.failed and error is None
            free = place == len(found) and not self._turns.busy
            self._owner.on_done(self._slot, exchange, head.run_s, head.peak, head.out_of_memory, ok, free)
        for exchange, head, body, error in found:
            if error is not None:
                exchange.fail(error)
            else:
                exchange.on_answer(head, body)

    def _on_dropped(self, header: bytes) -> None:
        dropped = self._turns.drop(decoded(_decode_dropped, header).number)
        self._wire.ended += 1
        if dropped:
            self._slot.let_go(dropped)
            if self._turns.busy:
                self._begin_next()
            self._owner.back.dropped(self._slot, dropped)

    @property
    def _call(self) -> Exchange:
        """The call that is answered."""
        call = self._turns.now.call
        assert call is not None  # the table of its order
        return call

    def _ended(self, exchange: Exchange) -> bool:
        """The call has ended. Return whether the slot is free."""
        wire, turns = self._wire, self._turns
        if self._areas.lent:
            self._areas.release(exchange)
        wire.ended += 1
        wire.running -= 1
        if turns.now.streams:
            self._slot.roomy.set()
        if turns.end() and turns.now.number:
            self._begin_next()
        return not turns.now.number

    def _begin_next(self) -> None:
        """The worker begins what it has behind what it ran."""
        turn = self._turns.now
        self._owner.on_follows(turn.calls)
        if turn.call is not None and turn.call.abandoned:
            self._slot.cancel(turn.call)

    def _why_none(self, head: AnswerHead, body: bytes | memoryview) -> GpufaasError | None:
        """Return what the caller gets in place of this answer; None: the answer."""
        if wrong := why_no_answer(head.status, head.headers):
            return _no_answer(wrong)
        return self._owner.memory.ran_out(bytes(body)) if head.out_of_memory else None


_ON: Final[dict[int, Callable[[SlotAnswers, bytes, bytes], None]]] = {
    Kind.ANSWER: SlotAnswers._on_answer,
    Kind.LAID: SlotAnswers._on_laid,
    Kind.ANSWERS: SlotAnswers._on_answers,
    Kind.HEAD: SlotAnswers._on_head,
    Kind.CHUNK: SlotAnswers._on_chunk,
    Kind.END: SlotAnswers._on_end,
    Kind.ROOM: SlotAnswers._on_room,
}


def _no_answer(wrong: str) -> BadAnswer:
    return BadAnswer(f"the function's answer cannot be sent: {wrong}")


def decoded(decode: Callable[[bytes], HeadT], header: bytes) -> HeadT:
    """:raises BrokenFrame: *header* is not a head of that kind"""
    try:
        return decode(header)
    except (ValueError, RecursionError) as exc:
        raise BrokenFrame(f"no head of a frame: {exc}") from exc


def check_figures(run_s: float, peak: int) -> None:
    """:raises BrokenFrame: no call can take so long, or use so much memory"""
    if not (0.0 <= run_s <= MAX_S and 0 <= peak <= MAX_BYTES):
        raise BrokenFrame(f"its call took {run_s} s and {peak} bytes")
