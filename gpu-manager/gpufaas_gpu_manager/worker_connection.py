"""
The node's end of the connection of a worker (`gpufaas_core.wire`), which its slots share.

The node reads it at all times, so that no slow reader of an answer holds up the calls beside it: ROOM limits how much a
slot may send.
"""

import asyncio
import socket
from typing import Final, cast

import msgspec

from gpufaas_core.loopback import count_unread
from gpufaas_core.model import Bytes
from gpufaas_core.plausible import shortened, why_no_phases, why_not_ready
from gpufaas_core.wire.bodies import CHUNK_BYTES
from gpufaas_core.wire.heads import FailedHead, LimitHead, MeasuredHead, ParkedHead, ReadyHead, WokenHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE, MAX_SAID, BrokenFrame, FrameReader, encode_frame
from gpufaas_functions.begun import Counts
from gpufaas_gpu_manager.areas import Areas
from gpufaas_gpu_manager.proc import state_of
from gpufaas_gpu_manager.slot_answers import SlotAnswers, check_figures, decoded
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_slot import WorkerSlot
from gpufaas_gpu_manager.worker_wire import WorkerWire

_SAID: Final = 2000
"""Characters of a reason."""
_OF_WORKER: Final = frozenset((Kind.READY, Kind.FAILED, Kind.MEASURED, Kind.PONG, Kind.PARKED, Kind.WOKEN))
_decode_ready: Final = msgspec.msgpack.Decoder(ReadyHead).decode
_decode_measured: Final = msgspec.msgpack.Decoder(MeasuredHead).decode
_decode_parked: Final = msgspec.msgpack.Decoder(ParkedHead).decode
_decode_woken: Final = msgspec.msgpack.Decoder(WokenHead).decode
_decode_failed: Final = msgspec.msgpack.Decoder(FailedHead).decode


class WorkerConnection(asyncio.Protocol):
    """See module. `slots` carry calls."""

    def __init__(
        self, worker: Worker, counts: Counts, areas: Areas | None = None, files: socket.socket | None = None
    ) -> None:
        """
        :param counts: of what the worker has begun on each of its slots (`functions/begun.py`)
        :param areas: for large bodies and answers; None: they are sent
        :param files: over which open files of bodies go; does not block
        """
        slots = len(counts.begun)
        self.wire = wire = WorkerWire(worker.loop, shared=slots > 1, areas=areas, files=files)
        self.slots = [WorkerSlot(wire, index, counts) for index in range(slots)]
        self._answers = [SlotAnswers(each, worker.calls) for each in self.slots]
        self.lost = False
        self._worker = worker
        self._reader = FrameReader(CHUNK_BYTES, slots, MAX_SAID)
        self._closed = False
        """This end closed it."""
        self._broken = False
        self._spoke = False
        """READY or FAILED has come."""
        self._asked = 0
        """The kind of the frame that answers what it was asked; 0: it was asked nothing."""

    # --- to the worker ---

    def limit(self, memory: Bytes) -> None:
        """Tell the worker how much it may occupy of its device."""
        self.wire.write(encode_frame(Kind.LIMIT, LimitHead(memory)))

    def ask(self, kind: int, head: msgspec.Struct | None = None) -> None:
        """Tell the worker to park, or to wake."""
        self._asked = Kind.PARKED if kind == Kind.PARK else Kind.WOKEN
        self.wire.write(encode_frame(kind, head))

    def end(self) -> None:
        """Let the worker end. What it says until then is heard."""
        if self.wire.transport is not None and not self.wire.closing:
            self.wire.transport.write_eof()
        self._closed = self.wire.closing = True

    def close(self) -> None:
        """The worker is gone, or the node closes. What it had not begun can be placed again."""
        self._closed = True
        for slot in self.slots:
            slot.turns.died()
        self.wire.close()

    @property
    def unread(self) -> Bytes:
        """What it has sent and waits to be read."""
        return 0 if self.wire.transport is None else count_unread(self.wire.transport)

    # --- from the worker ---

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        answers = self._answers
        try:
            for kind, header, body in self._reader.feed(data):
                what = kind & KIND
                if what in _OF_WORKER:
                    self._on_frame(what, header)
                else:
                    answers[kind >> LANE].on_frame(what, header, body)
        except BrokenFrame as exc:
            # The author's code writes to the socket, or the runner is out of step: no later frame can be trusted.
            self._broken = self._closed = self.wire.closing = True
            self._worker.kill(f"it sent what it must not: {exc}")
            if self.wire.transport is not None:
                self.wire.transport.abort()

    def _on_frame(self, kind: int, header: bytes) -> None:
        """:raises BrokenFrame: the frame may not come now, or its content is impossible"""
        wire = self.wire
        if kind == Kind.MEASURED and wire.ended:
            # Each of its threads may owe one yet; several slots have one thread more (`functions/slot_threads.py`).
            wire.ended = min(wire.ended, len(self.slots) + (len(self.slots) > 1)) - 1
            measured = decoded(_decode_measured, header)
            check_figures(0.0, measured.peak)
            check_figures(0.0, measured.held)
            self._worker.calls.memory.on_measured(measured.peak, measured.held)
        elif kind == Kind.PONG and wire.pings:
            wire.pings -= 1
        elif kind == self._asked == Kind.PARKED:
            self._asked = 0
            parked = decoded(_decode_parked, header)
            check_figures(0.0, parked.held)
            self._worker.parking.on_parked(msgspec.structs.replace(parked, failed=parked.failed[:_SAID]))
        elif kind == self._asked:
            self._asked = 0
            woken = decoded(_decode_woken, header)
            if wrong := why_no_phases(woken.phases):
                raise BrokenFrame(wrong)
            self._worker.parking.on_woken(msgspec.structs.replace(woken, failed=woken.failed[:_SAID]))
        elif kind == Kind.FAILED and not self._spoke:
            self._spoke = True
            self._worker.on_failed(shortened(decoded(_decode_failed, header)))
        elif kind == Kind.READY and not self._spoke:
            self._spoke = True
            head = decoded(_decode_ready, header)
            if wrong := why_not_ready(head):
                raise BrokenFrame(wrong)
            self._worker.on_ready(head)
        else:
            raise BrokenFrame(f"a frame of kind {kind}, which nothing asked for")

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.wire.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's

    def pause_writing(self) -> None:
        self.wire.room.clear()

    def resume_writing(self) -> None:
        self.wire.room.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self.lost = self.wire.closing = True
        self.resume_writing()
        for slot in self.slots:
            slot.roomy.set()
        worker = self._worker
        worker.last_words.on_lost()
        if not self._closed:
            worker.timers.later("closed", worker.run.death_known_s, self._kill_living)

    def _kill_living(self) -> None:
        """The worker has closed the connection, mostly since it dies. If it lives on, no call would be answered."""
        worker = self._worker
        if not worker.reaped and (worker.pid is None or state_of(worker.pid) not in ("", "Z", "X")):
            worker.kill("it closed a connection over which its calls come")
