"""
One call between a gateway and a slot of a worker. The answer goes through a bounded buffer.

An exchange is over for its worker when the handler has ended: `Finished` is reported then, and the slot is free. Its
caller may still be reading, but holds no device.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from gpufaas_core.answer_buffer import AnswerBuffer
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Grant
from gpufaas_core.model import Bytes, CallId, Seconds
from gpufaas_core.steps import Step
from gpufaas_core.wire.heads import AnswerHead, CallHead, EndHead, ReadyHead
from gpufaas_functions.body_file import BodyFile
from gpufaas_gpu_manager.node_call import BIND, FOLLOW, GIVEN_UP, NodeCall


class Slot(Protocol):
    """Carries one call at a time to a worker: a connection with frames, or one that speaks HTTP."""

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


class CallWorker(Protocol):
    """The worker of a call."""

    spec: WorkerSpec
    ready_head: ReadyHead | None
    """What it has said when it was ready; None: it loads."""

    @property
    def serves(self) -> bool:
        """Whether it is ready, and is not told to end."""


class CallOwner(Protocol):
    """The calls of one worker (`WorkerCalls`), as their exchanges and grants use them."""

    exchanges: "dict[CallId, Exchange]"
    """The calls that have a grant on the worker and are not over."""
    free: list[Slot]
    """The slots that have no call."""

    @property
    def worker(self) -> CallWorker: ...

    def bound(self) -> "Iterator[Exchange]": ...

    def bind(self, exchange: "Exchange") -> None: ...

    def bind_waiting(self) -> None: ...

    def come(self, exchange: "Exchange") -> None: ...

    def cancel(self, exchange: "Exchange") -> None: ...

    def take_back(self, exchange: "Exchange", reason: str) -> None: ...

    def leave(self, exchange: "Exchange") -> None: ...

    def refuse(self, exchange: "Exchange", reason: str, *, blameless: bool = False) -> None: ...


class Exchange(AnswerBuffer, NodeCall):
    """See module: a `NodeCall`, and the answer on its way to the caller."""

    __slots__ = (
        "_bound", "bodiless", "body", "bound_at", "file", "grant", "head", "kept", "name", "once", "opened_at", "owner",
        "slot", "state", "stopped", "timeout_s", "watcher",
    )  # fmt: skip

    def __init__(self, grant: Grant, owner: CallOwner, loop: asyncio.AbstractEventLoop, now: Seconds) -> None:
        AnswerBuffer.__init__(self, loop, limit=0)  # `bind` says it
        NodeCall.__init__(self, grant, now)
        self.owner = owner
        """Its worker's calls."""
        self.file: BodyFile | None = None
        """The body, if it lies in a file, until a worker has it."""
        self.slot: Slot | None = None
        """The slot that has the call, from its begin or from when it went ahead."""
        self.watcher: Callable[[], None] | None = None
        """Called when there may be more of the answer to `take`."""
        self._bound: asyncio.Future[None] | None = None
        """The sender of a body that streams waits for a slot. It runs beside the reader of the answer."""

    # --- the gateway's side ---

    @property
    def loading_s(self) -> float:
        return time.monotonic() - self.opened_at if self.owner.worker.ready_head is None else 0.0

    async def send_body(self, piece: bytes) -> None:
        """Send a piece of a body that streams; wait while the worker does not read. Nothing, once the call is over."""
        if (slot := self.slot or await self._slot()) and not self.finished:
            await slot.send_body(piece)

    def when_runs(self, tell: Callable[[], None]) -> None:
        self.on_run = tell
        if self.slot is not None:
            tell()

    async def end_body(self) -> None:
        if (slot := self.slot or await self._slot()) and not self.finished:
            await slot.end_body()

    def fail(self, error: GpufaasError) -> None:
        """Raise *error* in those who wait for the exchange."""
        if self.error is None:
            self.error = error
        self._wake()
        self._wake_sender()

    async def _slot(self) -> Slot | None:
        """Wait for a slot and return it; None: the call ended before it got one."""
        if self.error is None and not self.finished:
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

    def bind(self, slot: Slot, now: Seconds, buffer: Bytes, step: Step[int] = BIND) -> None:
        """
        The slot takes the call.

        :param buffer: so much of its answer is kept for a slow caller
        :param step: `GO_AHEAD`: its worker begins it only when what it runs has ended
        """
        self.state = step[self.state]
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

    def follow(self, now: Seconds) -> None:
        """What ran before it has ended: its worker may have begun it."""
        self.bound_at = now
        self.state = FOLLOW[self.state]

    def on_answer(self, head: AnswerHead, body: bytes | memoryview) -> None:
        if self.state not in GIVEN_UP:
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
        if self.state not in GIVEN_UP:
            self._pass_or_keep(piece)

    def on_end(self, end: EndHead) -> None:
        self.end = end
        self._resume()  # the last pieces may have paused the slot, which takes another call from now on
        if end.error and not self.abandoned:
            self.fail(GpufaasError(f"the function's answer broke off: {end.error}"))
        self._wake()
