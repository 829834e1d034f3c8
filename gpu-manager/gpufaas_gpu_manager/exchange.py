"""
One call between a gateway and a slot of a worker. The answer goes through a bounded buffer.

An exchange is over for its worker when the handler has ended: `Finished` is reported then, and the slot is free. Its
caller may still be reading, but holds no device.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from gpufaas_core.answer_buffer import AnswerBuffer
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Grant
from gpufaas_core.model import Bytes, CallId
from gpufaas_core.wire.heads import AnswerHead, CallHead, EndHead
from gpufaas_functions.body_file import BodyFile
from gpufaas_gpu_manager import exchange_state as states

MODEL_BUFFER: Final[Bytes] = 8 * 1024 * 1024
"""Bytes of an answer that a node holds for a slow reader before the model has to wait."""
STREAM_BUFFER: Final[Bytes] = 256 * 1024
"""As many bytes of CPU functions, which hold no device and so may wait."""


class Slot(Protocol):
    """Carries one call at a time to a worker: a socket with frames, or a connection that speaks HTTP."""

    def begin(self, exchange: "Exchange", head: CallHead, body: bytes | memoryview) -> None:
        """Send the call. Its answer or failure goes first to the slot's owner (`on_done`), then to the exchange."""

    def cancel(self, exchange: "Exchange") -> None:
        """Stop a call that it has, as far as that is possible: nobody waits for its answer."""

    async def send_body(self, piece: bytes) -> None:
        """Send a piece of a streamed body; returns when there is room for another."""

    async def end_body(self) -> None: ...

    def pause(self) -> None:
        """Stop reading the answer, until `resume`."""

    def resume(self) -> None: ...


class AheadSlot(Slot, Protocol):
    """A slot that carries batches, too, and takes a call or batch beside that which it has, to begin it afterwards."""

    @property
    def marked(self) -> bool:
        """Whether what was marked last may be dropped yet: nothing else can be marked."""

    def begin_batch(self, calls: int) -> None:
        """The so many calls that begin next, at once, are a batch: if the slot has one, that which follows it."""

    @property
    def busy(self) -> bool:
        """Whether the worker has a call or batch to run."""

    @property
    def unbegun(self) -> bool:
        """Whether the worker has certainly not begun what it has to run, though all of that was sent."""

    def can_wait(self, exchange: "Exchange") -> bool:
        """Whether that call can be sent beside what the slot has, and be taken back."""

    def mark(self, *, all_of_it: bool = False) -> bool:
        """
        Have the worker drop what waits there, unless it has begun it: then `on_dropped` of the slot's owner is called,
        if `take_back` did not find that before. False: there is nothing that it could be told to drop.

        :param all_of_it: also what comes first, if the worker has not begun that
        """

    def take_back(self) -> "list[Exchange]":
        """Return what will certainly be dropped, since it was marked `begun.GRACE_S` ago: the slot has it no more."""

    def ping(self) -> None:
        """Ask the worker for a sign of life: `on_pong`, at the latest when it runs no call."""


class Exchange(AnswerBuffer):
    """See module."""

    __slots__ = (
        "_bound", "body", "bound_at", "file", "grant", "head", "kept", "name", "once", "opened_at", "slot", "state",
        "timeout_s", "watcher", "worker",
    )  # fmt: skip

    def __init__(self, grant: Grant, worker: Any, loop: asyncio.AbstractEventLoop, now: float) -> None:
        AnswerBuffer.__init__(self, loop, MODEL_BUFFER)
        self.grant = grant
        self.worker = worker
        """The node's `Worker`, which imports this module."""
        self.head: CallHead | None = None
        """The call, until a slot takes it."""
        self.body: bytes | memoryview = b""
        self.file: BodyFile | None = None
        """The body, if it lies in a file, until a worker has it."""
        self.name = grant.calls[0]
        """Of the call for its worker: before it comes, that of its grant."""
        self.slot: Slot | None = None
        self.kept = 0
        """The gateway keeps its grant, and it is so many'th call by it. 0: the end of the call is that of the grant."""
        self.once = False
        """It cannot run again: its body streams, or its answer does and has begun."""
        self.state: int = states.OPENED
        """One of `exchange_state`, and changed only by its steps."""
        self.opened_at = now
        self.timeout_s = 0.0
        """The time limit of its call, about from `bound_at`; 0.0: it is not known."""
        self.bound_at = now
        self.watcher: Callable[[], None] | None = None
        """Called when there may be more of the answer to `take`."""
        self._bound: asyncio.Future[None] | None = None
        """The sender of a body that streams waits for a slot. It runs beside the reader of the answer."""

    @property
    def finished(self) -> bool:
        """Whether its worker has finished it, or is gone."""
        return self.state >= states.FINISHED

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for its answer."""
        return self.state in states.GIVEN_UP

    @property
    def untouched(self) -> bool:
        """Whether its call can be placed again."""
        return self.state in states.UNTOUCHED

    @property
    def further(self) -> int:
        """How many calls ran before it by its grant."""
        return self.kept - 1 if self.kept else 0

    # --- the gateway's side ---

    def arrive(self, head: CallHead, body: bytes | memoryview) -> None:
        """Take its call, which has come."""
        self.state = states.ARRIVE[self.state]
        self.head, self.body, self.name, self.timeout_s = head, body, CallId(head.call), head.timeout_s

    @property
    def loading_s(self) -> float:
        return time.monotonic() - self.opened_at if self.worker.ready_head is None else 0.0

    async def send_body(self, piece: bytes) -> None:
        """Send a piece of a body that streams; wait while the worker does not read. Nothing, once the call is over."""
        slot = self.slot or await self._slot()
        if slot is not None and not self.finished:
            self.once = True
            await slot.send_body(piece)

    def when_runs(self, tell: Callable[[], None]) -> None:
        self.on_run = tell
        if self.slot is not None:
            tell()

    async def end_body(self) -> None:
        slot = self.slot or await self._slot()
        if slot is not None and not self.finished:
            await slot.end_body()

    def fail(self, error: GpufaasError) -> None:
        """Raise *error* in those who wait for the exchange."""
        if self._error is None:
            self._error = error
        self._wake()
        self._wake_sender()

    async def _slot(self) -> Slot | None:
        """Wait for a slot and return it; None: the call ended before it got one."""
        if self._error is None and not self.finished:
            self._bound = self._loop.create_future()
            await self._bound
        return self.slot

    def _pause_source(self) -> bool:
        if self.slot is not None:
            self.slot.pause()
        return self.slot is not None

    def _resume_source(self) -> None:
        if self.slot is not None:
            self.slot.resume()

    def _wake(self) -> None:
        if self.watcher is not None:
            self.watcher()
        else:
            self._wake_reader()

    def _wake_sender(self) -> None:
        if self._bound is not None and not self._bound.done():
            self._bound.set_result(None)

    # --- the worker's side ---

    def bind(self, slot: Slot, now: float, buffer: Bytes) -> None:
        """The slot takes the call. *buffer*: so much of its answer is kept for a slow caller."""
        self.state = states.BIND[self.state]
        self.slot = slot
        self.bound_at = now
        self.load_s = now - self.opened_at
        self._limit = buffer
        assert self.head is not None
        head, body = self.head, self.body
        self.head, self.body = None, b""
        slot.begin(self, head, body)
        if self.on_run is not None:
            self.on_run()
        self._wake_sender()

    def send_ahead(self, slot: Slot, now: float, buffer: Bytes) -> None:
        """The slot takes the call, and its worker begins it only when what it runs has ended."""
        self.bind(slot, now, buffer)
        if self.state == states.RUNNING:
            self.state = states.HOLD[self.state]

    def follow(self, now: float) -> None:
        """What ran before it has ended: its worker may have begun it."""
        self.bound_at = now
        if self.state == states.UNSENT:
            self.state = states.SEND[self.state]

    def on_answer(self, head: AnswerHead, body: bytes | memoryview) -> None:
        if self.state not in states.GIVEN_UP:
            self._chunks.append((head, body, True))
            if self.resume is not None:
                self.resume()  # in this turn of the loop: here is nothing left to do
            else:
                self._wake()

    def on_head(self, head: AnswerHead) -> None:
        self.once = True
        if not self.abandoned:
            self._chunks.append((head, b"", False))
            self._wake()

    def on_chunk(self, piece: bytes) -> None:
        if self.state not in states.GIVEN_UP:
            self._pass_or_keep(piece)

    def on_end(self, end: EndHead) -> None:
        self.end = end
        self._resume()  # the last pieces may have paused the slot, which takes another call from now on
        if end.error and not self.abandoned:
            self.fail(GpufaasError(f"the function's answer broke off: {end.error}"))
        self._wake()
