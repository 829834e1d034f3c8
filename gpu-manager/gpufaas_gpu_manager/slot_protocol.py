"""
The node's end of the calls of one slot of a worker (`gpufaas_core.wire`): it sends them, and gives their answers to
their exchanges. Slots share a connection (`worker_connection`).
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import msgspec

from gpufaas_core.errors import BadAnswer, GpufaasError
from gpufaas_core.model import Bytes
from gpufaas_core.plausible import MAX_BYTES, MAX_S, why_no_answer
from gpufaas_core.wire.bodies import INLINE, STREAM
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import (
    AnswerHead,
    AnswersHead,
    AreaHead,
    BatchHead,
    CallHead,
    CancelHead,
    DroppedHead,
    EndHead,
    FailedHead,
    LaidHead,
    ParkedHead,
    ReadyHead,
    RoomHead,
    WokenHead,
)
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import BrokenFrame, encode_frame, encode_prefix
from gpufaas_functions.areas import MIN
from gpufaas_functions.begun import UNKNOWN, Counts, taken
from gpufaas_functions.body_file import give
from gpufaas_gpu_manager import exchange_state as states
from gpufaas_gpu_manager.areas import Area, Areas
from gpufaas_gpu_manager.exchange import Exchange, Slot

HeadT = TypeVar("HeadT")
SMALL: Final = 16 * 1024
"""A body of at most so many bytes is copied behind its head."""
_BEHIND: Final = 2
"""So many calls and batches at most has a worker that it has not begun: one of them was taken back then."""
_WAITS: Final = 1024 * 1024
"""A call with a larger body does not wait at the worker: it would have to be read before what is said of the one that
runs, or of which the worker is told to take it back."""
_decode_answer: Final = msgspec.msgpack.Decoder(AnswerHead).decode
_decode_answers: Final = msgspec.msgpack.Decoder(AnswersHead).decode
_decode_end: Final = msgspec.msgpack.Decoder(EndHead).decode
_decode_laid: Final = msgspec.msgpack.Decoder(LaidHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode
_decode_dropped: Final = msgspec.msgpack.Decoder(DroppedHead).decode


class SlotOwner:
    """The worker of a connection and its slots, as these call it."""

    loop: asyncio.AbstractEventLoop
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
    on_dropped: Callable[[Slot, list[Exchange]], None]
    ran_out: Callable[[bytes], GpufaasError]
    caller_first: bool = False
    """Its calls hold no device that others wait for: the caller gets an answer before the engine learns of it."""


class Wire(Protocol):
    """The connection of the worker."""

    closing: bool
    """Nothing can be sent any more: the worker has died, or will be killed for this."""
    running: int
    """Calls that were sent and have not ended."""
    shared: bool
    """It has several slots."""
    areas: Areas | None
    files: socket.socket | None
    """Over which open files of bodies go."""
    small: Bytes
    """Bodies and answers of at most so many bytes go in their frames: `SMALL`, or -1 while answers are large."""
    ended: int
    """Calls that have ended, or were dropped, for each of which the worker may say once what memory it needed."""

    def write(self, *frame: bytes | memoryview) -> None:
        """Send a frame, in pieces, behind those that are held; nothing if the connection is closing."""

    def hold(self, frame: bytes) -> None:
        """Send *frame* with those that follow it in this turn of the loop."""

    def flush(self) -> None:
        """Send what is held."""

    def ping(self) -> None: ...

    async def drain(self) -> None:
        """Wait while the worker does not take more."""


class WorkerSlot:
    """The calls of one slot: their frames out, and what the worker sends."""

    def __init__(self, worker: SlotOwner, wire: Wire, index: int, counts: Counts) -> None:
        self.index = index
        self._worker = worker
        self._wire = wire
        self._counts = counts
        self._exchange: Exchange | None = None
        """The call that it has; of a batch, that whose answer streams now."""
        self._place = 0
        """The place of `_exchange` in its batch."""
        self._batch: dict[int, tuple[Exchange, bool]] = {}
        """The calls of a batch that are not answered, by their place; and whether their answers have no body."""
        self._next: dict[int, tuple[Exchange, bool]] = {}
        """As `_batch`, of the call or batch that the worker has beside what it runs, and begins after that."""
        self._next_alone = False
        """It is a call."""
        self._beginning = 0
        """So many calls of a batch begin next."""
        self._follows = False
        """These are of the batch that follows what the worker runs."""
        self._sent = 0
        """So many calls and batches were sent: the number of the last one. The worker counts those that it begins."""
        self._number = 0
        """The number of the one that it has."""
        self._marked: range = range(0)
        """The numbers of those that were marked, and may be dropped yet: there must be no others. The worker can write
        what the page says, so that is not read."""
        self._streams = False
        """The body of its call comes in pieces."""
        self._answering = False
        """HEAD has come, END has not."""
        self._left = -1
        """Bytes that are left of the declared Content-Length; -1: none was declared."""
        self._bodiless = False
        self._room = WINDOW
        """So much of answers may come yet."""
        self._owed = 0
        """So much of answers has come, and the worker was not told that more may."""
        self._paused = False
        """The reader of the answer is slow."""
        self._lent: dict[Exchange, Area] = {}
        """What its calls have of the memory shared with the worker."""
        self._body_room = 0
        """So much of its body may be sent yet."""
        self._roomy: asyncio.Future[None] | None = None
        """The sender of the body waits for it."""

    def begin(self, exchange: Exchange, head: CallHead, body: bytes | memoryview) -> None:
        streams = head.body_mode == STREAM
        ends_batch = False
        if in_batch := self._beginning > 0:
            self._beginning -= 1
            ends_batch = not self._beginning
            batch = self._next if self._follows else self._batch
            batch[len(batch)] = exchange, head.method == "HEAD"
        else:
            self._sent += 1
            if self._exchange is not None or self._batch:
                self._next[0], self._next_alone = (exchange, head.method == "HEAD"), True
            else:
                self._exchange = exchange
                self._bodiless = head.method == "HEAD"
                self._number = self._sent
                self._streams, self._body_room = streams, WINDOW
        wire = self._wire
        if wire.closing:
            if not streams:
                exchange.state = states.HOLD[exchange.state]
            return  # its worker ends: then its calls are failed or placed again
        if exchange.file is not None and wire.files is not None:
            head, exchange.file = give(wire.files, exchange.file, head), None
        if len(body) > wire.small:
            self._send_large(exchange, head, body, alone=not in_batch)
        elif in_batch or (wire.running and wire.shared):  # else the worker waits for it, or no other call comes with it
            wire.hold(encode_prefix(Kind.CALL, head, len(body), self.index) + body)
        else:
            wire.write(encode_prefix(Kind.CALL, head, len(body), self.index) + body)
        wire.running += 1
        if ends_batch:
            wire.flush()

    def _send_large(self, exchange: Exchange, head: CallHead, body: bytes | memoryview, *, alone: bool) -> None:
        """Send a call whose body, or whose answer, may be large. *alone*: it is not in a batch."""
        frame, areas = b"", self._wire.areas
        size = len(body) if head.body_mode == INLINE and len(body) > MIN else 0
        wanted = 0 if areas is None else max(size, areas.expects if alone else 0)
        if areas is not None and wanted and (area := areas.take(wanted)) is not None:
            self._lent[exchange] = area
            if size:
                areas.put(area, body)
                body = b""
            frame = encode_frame(Kind.AREA, AreaHead(area.at, area.size, size), lane=self.index)
        frame += encode_prefix(Kind.CALL, head, len(body), self.index)
        self._wire.write(frame, body)  # to join a large body to its head would copy it

    def _release(self, exchange: Exchange) -> None:
        """*exchange* has ended, and has an area."""
        assert self._wire.areas is not None
        self._wire.areas.give_back(self._lent.pop(exchange))

    def begin_batch(self, calls: int) -> None:
        self._beginning = calls
        self._follows = self.busy
        self._sent += 1
        if self._follows:
            self._next_alone = False
        else:
            self._number, self._streams = self._sent, False
        self._wire.hold(encode_frame(Kind.BATCH, BatchHead(calls), lane=self.index))

    def ping(self) -> None:
        self._wire.ping()

    def cancel(self, exchange: Exchange) -> None:
        """
        Tell the worker that nobody waits for this call. Its frames are dropped, its END still counts.

        The handler goes on with a batch, and what is small of its answers comes at once: of its calls, the worker is
        told only of that whose answer streams.
        """
        if self._exchange is exchange:
            self._wire.write(encode_frame(Kind.CANCEL, CancelHead(self._place, self._number), lane=self.index))
            self.wake_sender()
            self.resume()

    # --- what the worker has beside what it runs ---

    @property
    def marked(self) -> bool:
        return bool(self._marked)

    @property
    def busy(self) -> bool:
        return self._exchange is not None or bool(self._batch)

    @property
    def unbegun(self) -> bool:
        return self.busy and not (self._streams or self._answering) and self._waits(self._number)

    def can_wait(self, exchange: Exchange) -> bool:
        """Whether that call can be sent while the worker runs another one, and be taken back."""
        head = exchange.head
        if head is None or head.body_mode == STREAM or len(exchange.body) > _WAITS:
            return False
        return not self._streams and self._counts.begun[self.index] != UNKNOWN

    def mark(self, *, all_of_it: bool = False) -> bool:
        first = self._number if all_of_it and self.unbegun else self._sent
        if first == self._number and not self.unbegun:  # parts of a body that streams are with the worker alone
            return False
        if not self._waits(first) or (self._marked and self._marked[0] <= first):
            return False
        self._marked = range(first, self._sent + 1)
        self._counts.taken[self.index] = taken(first, len(self._marked))
        return True

    def take_back(self) -> list[Exchange]:
        begun, back = self._counts.begun[self.index], []
        if self._number in self._marked and begun < self._number:
            back = self._had()
            self._exchange, self._batch, self._number = None, {}, 0
        if self._next and self._sent in self._marked and begun < self._sent:
            back += [each for each, _ in self._next.values()]
            self._next = {}
        self._let_go(back)
        return back

    def _had(self) -> list[Exchange]:
        """Return what the worker has to run."""
        return [self._exchange] if self._exchange is not None else [each for each, _ in self._batch.values()]

    def _let_go(self, exchanges: list[Exchange]) -> None:
        """The worker does not run these."""
        self._wire.running -= len(exchanges)
        for each in exchanges:
            if each in self._lent:
                self._release(each)

    def _on_dropped(self, number: int) -> None:
        """:raises BrokenFrame: nothing with that number was marked, or the worker has not come to it"""
        if number not in self._marked:
            raise BrokenFrame(f"number {number} was dropped, which was not marked")
        if self._next and number != self._number:
            raise BrokenFrame(f"number {number} was dropped, before what ran was answered")
        self._marked = range(number + 1, self._marked.stop)
        self._wire.ended += 1
        if number != self._number:
            return  # it was taken back before
        if not self.busy or self._answering:
            raise BrokenFrame(f"number {number} was dropped, and answered")
        dropped = self._had()
        self._let_go(dropped)
        self._exchange, self._batch = None, {}
        self._begin_next()
        self._worker.on_dropped(self, dropped)

    async def send_body(self, piece: bytes) -> None:
        exchange = self._exchange
        while self._body_room <= 0:
            if exchange is None or self._exchange is not exchange or exchange.abandoned or self._wire.closing:
                return  # nobody reads it any more
            self._roomy = asyncio.get_running_loop().create_future()
            await self._roomy
        self._body_room -= len(piece) + PIECE_COST
        self._wire.write(encode_prefix(Kind.BODY, None, len(piece), self.index), piece)
        await self._wire.drain()

    async def end_body(self) -> None:
        self._wire.write(encode_frame(Kind.BODY_END, lane=self.index))

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._give_room()

    def _give_room(self) -> None:
        if self._owed >= WINDOW // 2 and not self._paused:
            room, self._owed = self._owed, 0
            self._room += room
            self._wire.write(encode_frame(Kind.ROOM, RoomHead(room), lane=self.index))

    def wake_sender(self) -> None:
        """Its call has ended, room has come, or the connection is closed: the sender of a body looks again."""
        if self._roomy is not None and not self._roomy.done():
            self._roomy.set_result(None)

    def end(self) -> None:
        """Its worker is dead: what it had not begun can be placed again."""
        for lent in list(self._lent):
            self._release(lent)
        if self._next and not self._waits(self._sent):
            for exchange, _ in self._next.values():
                if exchange.state == states.UNSENT:
                    exchange.state = states.SEND[exchange.state]  # it has died before it could say so
        if self._answering or self._streams or not self._waits(self._number):
            return
        for each in (self._exchange, *(each for each, _ in self._batch.values())):
            if each is not None and each.state == states.RUNNING:
                each.state = states.HOLD[each.state]

    def _waits(self, number: int) -> bool:
        """Whether the worker has certainly not begun *number*."""
        begun = self._counts.begun[self.index]
        return begun != UNKNOWN and 1 <= number - begun <= _BEHIND

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """:raises BrokenFrame: the frame may not come now, or its content is impossible"""
        exchange = self._exchange
        if kind == Kind.ANSWER and exchange is not None and not self._answering:
            head = decoded(_decode_answer, header)
            if len(body) > self._wire.small:
                self._note(len(body))
            check_figures(head.run_s, head.peak)
            self._ended()
            error = self._why_none(head, body)
            worker = self._worker
            # Its device runs already what went ahead, or it holds none.
            caller_first = error is None and (self._exchange is not None or worker.caller_first)
            try:
                if caller_first:
                    exchange.on_answer(head, body)
            finally:
                # The engine may have the next call for this slot.
                ok = not head.failed and error is None
                worker.on_done(self, exchange, head.run_s, head.peak, head.out_of_memory, ok)
            if error is not None:
                exchange.fail(error)
            elif not caller_first:
                exchange.on_answer(head, body)
        elif kind == Kind.DROPPED:
            self._on_dropped(decoded(_decode_dropped, header).number)
        elif kind == Kind.ANSWERS and exchange is None:
            self._on_answers(decoded(_decode_answers, header), body)
        elif exchange is None:
            if kind != Kind.HEAD or not self._batch:
                raise BrokenFrame(f"a frame of kind {kind}, while it had no call")
            self._stream_next(decoded(_decode_answer, header))
        elif kind == Kind.LAID and not self._answering:
            laid = decoded(_decode_laid, header)
            view = self._laid(exchange, laid.size, len(body))
            self.on_frame(Kind.ANSWER, bytes(laid.head), view)  # type: ignore[arg-type]  # ANSWER takes both
        elif kind == Kind.CHUNK and self._answering:
            if not body or self._room <= 0:
                raise BrokenFrame("an empty piece of an answer, or one for which there is no room")
            self._room -= len(body) + PIECE_COST
            self._owed += len(body) + PIECE_COST
            if self._left >= 0:
                self._left -= len(body)
                if self._left < 0:
                    raise BrokenFrame("an answer that is longer than its Content-Length")
            exchange.on_chunk(body)
            if self._owed >= WINDOW // 2:
                self._give_room()
        elif kind == Kind.HEAD and not self._answering:
            self._answering = True
            self._on_head(exchange, decoded(_decode_answer, header))
        elif kind == Kind.END and self._answering:
            end = decoded(_decode_end, header)
            check_figures(end.run_s, end.peak)
            if self._left > 0 and not end.error:
                raise BrokenFrame("an answer that is shorter than its Content-Length")
            self._place = 0
            self._answering = False
            self._ended()
            self._worker.on_done(self, exchange, end.run_s, end.peak, end.out_of_memory, not end.error)
            exchange.on_end(end)
        elif kind == Kind.ROOM and self._streams:
            self._body_room += decoded(_decode_room, header).room
            if not 0 < self._body_room <= WINDOW:
                raise BrokenFrame("room for more of a body than was sent")
            self.wake_sender()
        else:
            raise BrokenFrame(f"a frame of kind {kind} {'in the middle of' if self._answering else 'before'} an answer")

    def _laid(self, exchange: Exchange, size: Bytes, in_frame: Bytes) -> memoryview:
        """Return the body of an answer that lies in the area of its call."""
        area = self._lent.get(exchange)
        if area is None or in_frame or not 0 < size <= area.size or self._bodiless:
            raise BrokenFrame(f"an answer of {size} bytes in memory that its call does not have")
        assert self._wire.areas is not None
        del self._lent[exchange]
        return self._wire.areas.view(area, size)

    def _note(self, size: Bytes) -> None:
        """A call, and no batch, was answered with *size* bytes."""
        if (areas := self._wire.areas) is not None:
            areas.answered(size)
            self._wire.small = -1 if areas.expects else SMALL

    def _ended(self) -> None:
        """Its call has ended."""
        if self._lent and self._exchange in self._lent:
            self._release(self._exchange)
        self._exchange = None
        self._wire.ended += 1
        self._wire.running -= 1
        self._paused = False
        if self._streams:
            self.wake_sender()
        if self._owed:
            self._give_room()
        if self._next or self._marked:
            self._begin_next()

    def _why_none(self, head: AnswerHead, body: bytes | memoryview) -> GpufaasError | None:
        """Return what the caller gets in place of this answer; None: the answer."""
        if wrong := why_no_answer(head.status, head.headers):
            return _no_answer(wrong)
        return self._worker.ran_out(bytes(body)) if head.out_of_memory else None

    def _on_answers(self, said: AnswersHead, bodies: bytes) -> None:
        """Small answers of a batch have come."""
        found: list[tuple[Exchange, AnswerHead, bytes]] = []
        at = 0
        for place, size, head in said.answers:
            check_figures(head.run_s, head.peak)
            exchange, _ = self._batch.pop(place, _NOBODY)
            if exchange is None or not 0 <= size <= len(bodies) - at:
                raise BrokenFrame(f"an answer of {size} bytes for call {place} of its batch")
            found.append((exchange, head, bodies[at : at + size]))
            at += size
        if at < len(bodies):
            raise BrokenFrame("bytes of no answer")
        self._wire.ended += len(found)
        self._let_go([each for each, _, _ in found])
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
        """If all that the worker ran is answered, it begins what waits there."""
        if self._batch:
            return
        if self._number in self._marked:
            self._marked = range(self._number + 1, self._marked.stop)  # it was begun before
        if not self._next:
            return
        following, self._next = self._next, {}
        self._number = self._sent
        if not self._next_alone:
            self._batch = following
            return
        self._exchange, self._bodiless = exchange, _ = following[0]
        if exchange.abandoned:
            self.cancel(exchange)

    def _stream_next(self, head: AnswerHead) -> None:
        """The first answer of a batch begins to stream that was too large for ANSWERS."""
        self._answering = True
        self._place = place = next(iter(self._batch))
        self._exchange, self._bodiless = exchange, _ = self._batch.pop(place)
        self._on_head(exchange, head)
        if exchange.abandoned:
            self.cancel(exchange)

    def _on_head(self, exchange: Exchange, head: AnswerHead) -> None:
        if head.length > MIN and not self._batch:
            self._note(head.length)
        self._left = -1 if self._bodiless else head.length
        if wrong := why_no_answer(head.status, head.headers):
            self._left = -1
            exchange.state = states.ABANDON[exchange.state]  # drop the rest of it, until END
            exchange.fail(_no_answer(wrong))
            self.cancel(exchange)
            self._worker.watch_abandoned()
        else:
            exchange.on_head(head)


_NOBODY: Final[tuple[None, bool]] = (None, False)


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
