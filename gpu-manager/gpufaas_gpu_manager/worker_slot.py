"""
One slot of a worker, as its node has it: the frames of its calls go out. What the worker says is in `slot_answers`.

What the worker runs on the slot, and what it has behind that, is in `turn`.
"""

import asyncio
from typing import Final

from gpufaas_core.model import Bytes
from gpufaas_core.wire.bodies import INLINE, STREAM
from gpufaas_core.wire.credit import Credit, Window
from gpufaas_core.wire.heads import BatchHead, CallHead, CancelHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame, encode_prefix
from gpufaas_functions.begun import Counts, taken
from gpufaas_functions.body_file import give
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import HOLD
from gpufaas_gpu_manager.turn import Turns
from gpufaas_gpu_manager.worker_wire import WorkerWire

_WAITS: Final[Bytes] = 1024 * 1024
"""A call with a larger body does not wait at the worker: it would have to be read before what is said of the one that
runs, and before the worker could drop it."""


class WorkerSlot:
    """See module. It is a `Slot`, which takes batches, too, and a turn behind that which runs."""

    def __init__(self, wire: WorkerWire, index: int, counts: Counts) -> None:
        """:param counts: what the worker has begun on each of its slots (`functions/begun.py`)"""
        self.index = index
        self.wire = wire
        self.turns: Turns[Exchange] = Turns(counts.begun, index)
        self.window = Window()
        """The room for pieces of answers."""
        self.credit = Credit()
        """The room at the worker for pieces of a body."""
        self._counts = counts
        self.roomy = asyncio.Event()
        """Its call has ended, room has come, or the connection is closed: the sender of a body looks again."""

    def begin(self, exchange: Exchange, head: CallHead, body: bytes | memoryview) -> None:
        turns, wire, streams = self.turns, self.wire, head.body_mode == STREAM
        in_batch = turns.coming > 0
        turns.add(exchange, streams=streams)
        if streams:
            exchange.once, self.credit = True, Credit()
        if wire.closing:
            if not streams:
                exchange.step(HOLD)
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
        if (area := self.wire.areas.lend(exchange, lies, answered=alone)) is not None:
            body = b"" if area.body else body
            frame = encode_frame(Kind.AREA, area, lane=self.index)
        frame += encode_prefix(Kind.CALL, head, len(body), self.index)
        self.wire.write(frame, body)  # to join a large body to its head would copy it

    def begin_batch(self, calls: int) -> None:
        """The so many calls that begin next, at once, are a batch: if the slot has one, that which follows it."""
        self.turns.add_batch(calls)
        self.wire.hold(encode_frame(Kind.BATCH, BatchHead(calls), lane=self.index))

    def cancel(self, exchange: Exchange) -> None:
        """
        Tell the worker that nobody waits for this call. Its frames are dropped, its END still counts.

        The handler goes on with a batch, and what is small of its answers comes at once: of its calls, the worker is
        told only of that whose answer streams.
        """
        turn = self.turns.now
        if turn.call is exchange:
            self.wire.write(encode_frame(Kind.CANCEL, CancelHead(turn.place, turn.number), lane=self.index))
            self.roomy.set()
            self.resume()

    async def send_body(self, piece: bytes) -> None:
        turn, exchange = self.turns.now, self.turns.now.call
        while exchange is not None and turn.call is exchange and not exchange.abandoned and not self.wire.closing:
            if self.credit.is_left:
                self.credit.spend(len(piece))
                self.wire.write(encode_prefix(Kind.BODY, None, len(piece), self.index), piece)
                await self.wire.room.wait()
                return
            self.roomy.clear()
            await self.roomy.wait()
        # Nobody reads it any more; the slot may have another call, which has credit of its own.

    async def end_body(self) -> None:
        self.wire.write(encode_frame(Kind.BODY_END, lane=self.index))

    def pause(self) -> None:
        self.window.pause()

    def resume(self) -> None:
        self.give_room(self.window.resume())

    def give_room(self, room: Bytes) -> None:
        """Tell the worker that it may send so much more of its answers."""
        if room:
            self.wire.write(encode_frame(Kind.ROOM, RoomHead(room), lane=self.index))

    # --- what the worker has and has not begun ---

    def can_wait(self, exchange: Exchange) -> bool:
        """Whether that call can be sent while the worker runs another one, and be taken back."""
        head = exchange.head
        if head is None or head.body_mode == STREAM or len(exchange.body) > _WAITS:
            return False
        return self.turns.can_follow

    def mark(self, *, all_of_it: bool = False) -> bool:
        """
        Have the worker drop what waits there, unless it has begun it: it says so, or `take_back` finds it before.
        False: there is nothing that it could be told to drop.

        :param all_of_it: also what comes first, if the worker has not begun that
        """
        marked = self.turns.mark(all_of_it=all_of_it)
        if marked:
            self._counts.taken[self.index] = taken(marked[0], len(marked))
        return bool(marked)

    def take_back(self) -> list[Exchange]:
        """Return what will certainly be dropped, since it was marked `begun.GRACE_S` ago: the slot has it no more."""
        back = self.turns.take_back()
        self.let_go(back)
        return back

    def let_go(self, exchanges: list[Exchange]) -> None:
        """The worker does not run these any more."""
        self.wire.running -= len(exchanges)
        for each in exchanges:
            self.wire.areas.release(each)
