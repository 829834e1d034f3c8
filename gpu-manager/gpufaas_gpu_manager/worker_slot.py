"""
One slot of a worker, as its node has it: the frames of its calls go out, and its answers go to their exchanges.

Which frame may come when is a table, `wire.order`. What the worker runs and what it has behind that is in `turn`.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import msgspec

from gpufaas_core.errors import BadAnswer, GpufaasError
from gpufaas_core.model import Bytes
from gpufaas_core.plausible import MAX_BYTES, MAX_S, why_no_answer
from gpufaas_core.wire.bodies import INLINE, STREAM
from gpufaas_core.wire.credit import Credit, Window
from gpufaas_core.wire.heads import (
    AnswerHead,
    AnswersHead,
    BatchHead,
    CallHead,
    CancelHead,
    DroppedHead,
    EndHead,
    LaidHead,
    RoomHead,
)
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.order import FROM_WORKER
from gpufaas_core.wire.prefix import BrokenFrame, encode_frame, encode_prefix
from gpufaas_functions.areas import MIN
from gpufaas_functions.begun import Counts, taken
from gpufaas_functions.body_file import give
from gpufaas_gpu_manager import node_call as states
from gpufaas_gpu_manager.exchange import CallOwner, Exchange
from gpufaas_gpu_manager.turn import Turns
from gpufaas_gpu_manager.worker_wire import WorkerWire

HeadT = TypeVar("HeadT")
_WAITS: Final[Bytes] = 1024 * 1024
"""A call with a larger body does not wait at the worker: it would have to be read before what is said of the one that
runs, or of which the worker is told to take it back."""
_decode_answer: Final = msgspec.msgpack.Decoder(AnswerHead).decode
_decode_answers: Final = msgspec.msgpack.Decoder(AnswersHead).decode
_decode_end: Final = msgspec.msgpack.Decoder(EndHead).decode
_decode_laid: Final = msgspec.msgpack.Decoder(LaidHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode
_decode_dropped: Final = msgspec.msgpack.Decoder(DroppedHead).decode


class SlotOwner(CallOwner, Protocol):
    """The calls of the worker, as a `WorkerSlot` uses them."""

    caller_first: bool
    """Its calls hold no device that others wait for: the caller gets an answer before the engine learns of it."""

    def on_follows(self, exchanges: list[Exchange]) -> None:
        """What went ahead begins now."""

    def on_dropped(self, slot: "WorkerSlot", dropped: list[Exchange]) -> None:
        """The worker has dropped *dropped*, which was being taken back, and came next."""

    def ran_out(self, said: bytes) -> GpufaasError:
        """Return the error of a call that hit the memory limit. :param said: the text of its exception"""


class WorkerSlot:
    """See module. It is a `Slot`, which takes batches, too, and a turn behind that which runs."""

    def __init__(self, owner: SlotOwner, wire: WorkerWire, index: int, counts: Counts) -> None:
        """:param counts: what the worker has begun on each of its slots (`functions/begun.py`)"""
        self.index = index
        self.turns: Turns[Exchange] = Turns()
        self._owner = owner
        self._wire = wire
        self._counts = counts
        self._left = -1
        """Bytes that are left of the declared Content-Length; -1: none was declared."""
        self._window = Window()
        """The room for pieces of answers."""
        self._credit = Credit()
        """The room at the worker for pieces of a body."""
        self._roomy: asyncio.Future[None] | None = None
        """The sender of the body waits for it."""

    # --- to the worker ---

    def begin(self, exchange: Exchange, head: CallHead, body: bytes | memoryview) -> None:
        turns, wire, streams = self.turns, self._wire, head.body_mode == STREAM
        in_batch = turns.coming > 0
        turns.add(exchange, streams=streams)
        if streams:
            self._credit = Credit()
        if wire.closing:
            if not streams:
                exchange.step(states.HOLD)
            return  # its worker ends: then its calls are failed or placed again
        if exchange.file is not None and wire.files is not None:
            head, exchange.file = give(wire.files, exchange.file, head), None
        if len(body) > wire.areas.small:
            self._send_large(exchange, head, body, alone=not in_batch)
        elif in_batch or (wire.running and wire.shared):  # else the worker waits for it, or no other call comes with it
            wire.hold(encode_prefix(Kind.CALL, head, len(body), self.index) + body)
        else:
            wire.write(encode_prefix(Kind.CALL, head, len(body), self.index) + body)
        wire.running += 1
        if in_batch and not turns.coming:
            wire.flush()

    def _send_large(self, exchange: Exchange, head: CallHead, body: bytes | memoryview, *, alone: bool) -> None:
        """Send a call whose body, or whose answer, may be large. :param alone: it is not in a batch"""
        frame, lies = b"", body if head.body_mode == INLINE else b""
        if (area := self._wire.areas.lend(exchange, lies, answered=alone)) is not None:
            body = b"" if area.body else body
            frame = encode_frame(Kind.AREA, area, lane=self.index)
        frame += encode_prefix(Kind.CALL, head, len(body), self.index)
        self._wire.write(frame, body)  # to join a large body to its head would copy it

    def begin_batch(self, calls: int) -> None:
        """The so many calls that begin next, at once, are a batch: if the slot has one, that which follows it."""
        self.turns.add_batch(calls)
        self._wire.hold(encode_frame(Kind.BATCH, BatchHead(calls), lane=self.index))

    def cancel(self, exchange: Exchange) -> None:
        """
        Tell the worker that nobody waits for this call. Its frames are dropped, its END still counts.

        The handler goes on with a batch, and what is small of its answers comes at once: of its calls, the worker is
        told only of that whose answer streams.
        """
        turn = self.turns.now
        if turn.call is exchange:
            self._wire.write(encode_frame(Kind.CANCEL, CancelHead(turn.place, turn.number), lane=self.index))
            self.wake_sender()
            self.resume()

    async def send_body(self, piece: bytes) -> None:
        turn, exchange = self.turns.now, self.turns.now.call
        while not self._credit.is_left:
            if exchange is None or turn.call is not exchange or exchange.abandoned or self._wire.closing:
                return  # nobody reads it any more
            self._roomy = asyncio.get_running_loop().create_future()
            await self._roomy
        self._credit.spend(len(piece))
        self._wire.write(encode_prefix(Kind.BODY, None, len(piece), self.index), piece)
        await self._wire.drain()

    async def end_body(self) -> None:
        self._wire.write(encode_frame(Kind.BODY_END, lane=self.index))

    def pause(self) -> None:
        self._window.pause()

    def resume(self) -> None:
        self._give_room(self._window.resume())

    def _give_room(self, room: Bytes) -> None:
        if room:
            self._wire.write(encode_frame(Kind.ROOM, RoomHead(room), lane=self.index))

    def wake_sender(self) -> None:
        """Its call has ended, room has come, or the connection is closed: the sender of a body looks again."""
        if self._roomy is not None and not self._roomy.done():
            self._roomy.set_result(None)

    # --- what the worker has and has not begun ---

    @property
    def _begun(self) -> int:
        return self._counts.begun[self.index]

    @property
    def busy(self) -> bool:
        """Whether the worker has a call or batch to run."""
        return self.turns.busy

    @property
    def unbegun(self) -> bool:
        """Whether the worker has certainly not begun what it has to run, though all of that was sent."""
        return self.turns.unbegun(self._begun)

    def can_wait(self, exchange: Exchange) -> bool:
        """Whether that call can be sent while the worker runs another one, and be taken back."""
        head = exchange.head
        if head is None or head.body_mode == STREAM or len(exchange.body) > _WAITS:
            return False
        return self.turns.can_follow(self._begun)

    def mark(self, *, all_of_it: bool = False) -> bool:
        """
        Have the worker drop what waits there, unless it has begun it: then `on_dropped` of the slot's owner is called,
        if `take_back` did not find that before. False: there is nothing that it could be told to drop.

        :param all_of_it: also what comes first, if the worker has not begun that
        """
        marked = self.turns.mark(self._begun, all_of_it=all_of_it)
        if marked:
            self._counts.taken[self.index] = taken(marked[0], len(marked))
        return bool(marked)

    def take_back(self) -> list[Exchange]:
        """Return what will certainly be dropped, since it was marked `begun.GRACE_S` ago: the slot has it no more."""
        back = self.turns.take_back(self._begun)
        self._let_go(back)
        return back

    def end(self) -> None:
        """Its worker is dead: what it had not begun can be placed again."""
        self.turns.died(self._begun)

    def _let_go(self, exchanges: list[Exchange]) -> None:
        """The worker does not run these any more."""
        self._wire.running -= len(exchanges)
        for each in exchanges:
            self._wire.areas.release(each)

    # --- from the worker ---

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """:raises BrokenFrame: the frame may not come now, or its content is impossible"""
        if kind == Kind.DROPPED:  # also of what was taken back before
            self._on_dropped(header)
            return
        turn = self.turns.now
        turn.state = FROM_WORKER[kind][turn.state]
        _ON[kind](self, header, body)

    def _on_answer(self, header: bytes, body: bytes | memoryview) -> None:
        head, exchange = decoded(_decode_answer, header), self.turns.now.call
        assert exchange is not None  # the table of its order
        check_figures(head.run_s, head.peak)
        if len(body) > self._wire.areas.small:
            self._wire.areas.note(len(body))
        free = self._ended(exchange)
        error = self._why_none(head, body)
        # Its device runs already what went ahead, or it holds none.
        caller_first = error is None and (self._owner.caller_first or self.turns.now.call is not None)
        try:
            if caller_first:
                exchange.on_answer(head, body)
        finally:
            # The engine may have the next call for this slot.
            ok = not head.failed and error is None
            self._owner.on_done(self, exchange, head.run_s, head.peak, head.out_of_memory, ok, free)
        if error is not None:
            exchange.fail(error)
        elif not caller_first:
            exchange.on_answer(head, body)

    def _on_laid(self, header: bytes, body: bytes) -> None:
        """The body of the answer lies in the area of its call."""
        laid = decoded(_decode_laid, header)
        if body:
            raise BrokenFrame(f"an answer of {laid.size} bytes in memory, and one in its frame")
        self._on_answer(bytes(laid.head), self._wire.areas.laid(self._call, laid.size))

    def _on_head(self, header: bytes, _: bytes) -> None:
        head, turn = decoded(_decode_answer, header), self.turns.now
        if (exchange := turn.call) is None:
            exchange = self.turns.stream()  # it was too large for ANSWERS
            if exchange.abandoned:
                self.cancel(exchange)  # its worker was not told before
        if head.length > MIN and not turn.batch:
            self._wire.areas.note(head.length)
        self._left = -1 if exchange.bodiless else head.length
        if wrong := why_no_answer(head.status, head.headers):
            self._left = -1
            exchange.step(states.ABANDON)  # drop the rest of it, until END
            exchange.fail(_no_answer(wrong))
            self._owner.cancel(exchange)
        else:
            exchange.on_head(head)

    def _on_chunk(self, _: bytes, body: bytes) -> None:
        if not body:
            raise BrokenFrame("an empty piece of an answer")
        self._window.came(len(body))
        if self._left >= 0:
            self._left -= len(body)
            if self._left < 0:
                raise BrokenFrame("an answer that is longer than its Content-Length")
        self._call.on_chunk(body)
        self._give_room(self._window.room())

    def _on_end(self, header: bytes, _: bytes) -> None:
        end, exchange = decoded(_decode_end, header), self._call
        check_figures(end.run_s, end.peak)
        if self._left > 0 and not end.error:
            raise BrokenFrame("an answer that is shorter than its Content-Length")
        self.resume()
        free = self._ended(exchange)
        self._owner.on_done(self, exchange, end.run_s, end.peak, end.out_of_memory, not end.error, free)
        exchange.on_end(end)

    def _on_room(self, header: bytes, _: bytes) -> None:
        if not self.turns.now.streams:
            raise BrokenFrame("room for a body that does not stream")
        self._credit.add(decoded(_decode_room, header).room)
        self.wake_sender()

    def _on_answers(self, header: bytes, bodies: bytes) -> None:
        """Small answers of a batch have come."""
        batch = self.turns.now.batch
        found: list[tuple[Exchange, AnswerHead, bytes]] = []
        at = 0
        for place, size, head in decoded(_decode_answers, header).answers:
            check_figures(head.run_s, head.peak)
            exchange = batch.pop(place, None)
            if exchange is None or not 0 <= size <= len(bodies) - at:
                raise BrokenFrame(f"an answer of {size} bytes for call {place} of its batch")
            found.append((exchange, head, bodies[at : at + size]))
            at += size
        if at < len(bodies):
            raise BrokenFrame("bytes of no answer")
        self._wire.ended += len(found)
        self._let_go([each for each, _, _ in found])
        if self.turns.end() and self.busy:
            self._begin_next()
        errors = [self._why_none(head, body) for _, head, body in found]
        # The engine first, as it may have the next batch for this slot. Then the callers.
        for place, (exchange, head, _) in enumerate(found, 1):
            ok = not head.failed and errors[place - 1] is None
            free = place == len(found) and not self.busy
            self._owner.on_done(self, exchange, head.run_s, head.peak, head.out_of_memory, ok, free)
        for (exchange, head, body), error in zip(found, errors, strict=True):
            if error is not None:
                exchange.fail(error)
            else:
                exchange.on_answer(head, body)

    def _on_dropped(self, header: bytes) -> None:
        dropped = self.turns.drop(decoded(_decode_dropped, header).number)
        self._wire.ended += 1
        if dropped:
            self._let_go(dropped)
            if self.busy:
                self._begin_next()
            self._owner.on_dropped(self, dropped)

    @property
    def _call(self) -> Exchange:
        """The call that is answered."""
        call = self.turns.now.call
        assert call is not None  # the table of its order
        return call

    def _ended(self, exchange: Exchange) -> bool:
        """The call has ended. Return whether the slot is free."""
        wire, turns = self._wire, self.turns
        if wire.areas.lent:
            wire.areas.release(exchange)
        wire.ended += 1
        wire.running -= 1
        if turns.now.streams:
            self.wake_sender()
        if turns.end() and turns.now.number:
            self._begin_next()
        return not turns.now.number

    def _begin_next(self) -> None:
        """The worker begins what it has behind what it ran."""
        turn = self.turns.now
        self._owner.on_follows(turn.calls)
        if turn.call is not None and turn.call.abandoned:
            self.cancel(turn.call)

    def _why_none(self, head: AnswerHead, body: bytes | memoryview) -> GpufaasError | None:
        """Return what the caller gets in place of this answer; None: the answer."""
        if wrong := why_no_answer(head.status, head.headers):
            return _no_answer(wrong)
        return self._owner.ran_out(bytes(body)) if head.out_of_memory else None


_ON: Final[dict[int, Callable[[WorkerSlot, bytes, bytes], None]]] = {
    Kind.ANSWER: WorkerSlot._on_answer,
    Kind.LAID: WorkerSlot._on_laid,
    Kind.ANSWERS: WorkerSlot._on_answers,
    Kind.HEAD: WorkerSlot._on_head,
    Kind.CHUNK: WorkerSlot._on_chunk,
    Kind.END: WorkerSlot._on_end,
    Kind.ROOM: WorkerSlot._on_room,
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
