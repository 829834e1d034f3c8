"""What ends a call from outside while it waits: its time limit, a caller who hangs up, the stop of the server."""

import asyncio
import time
from math import inf
from typing import Any, Final

from gpufaas_core.driven import Driven
from gpufaas_core.errors import CallCancelled, DeadlineExceeded, GpufaasError
from gpufaas_core.messages import Grant
from gpufaas_core.model import Seconds
from gpufaas_gateway.call_body import SPOOL_ABOVE, BodyStream, Caller
from gpufaas_gateway.catalogue import Deployed
from gpufaas_gateway.ports import CallExchange

READ_BYTES_PER_S: Final = 32 * 1024
"""If the function has ended when the time is up, the caller may read the rest of the answer at this rate or faster."""


class CallLife:
    """
    The time of one call, and what it waits for now.

    A quick call costs no task and no timer here: `Calls` calls `watch` for the others.
    """

    __slots__ = (
        "_reads_on", "_task", "_timer", "_told", "at_caller", "began", "caller", "deployed", "ends", "error",
        "exchange", "exec_s", "future", "has_run", "last", "load_s", "owner", "queue_s", "run_s", "status", "stream",
        "watched", "what", "whose",
    )  # fmt: skip

    def __init__(self, caller: Caller | None, owner: Driven | asyncio.Task[Any] | None, began: float) -> None:
        """
        :param owner: what runs it
        :param began: on the clock of `time.perf_counter`, as `ends`
        """
        self.caller = caller
        self.owner = owner
        self.began = began
        self.ends = 0.0
        """When its time is up: to wait and load, or to run."""
        self.last = inf
        """When it ends at the latest, whatever it does then."""
        self.exec_s: Seconds = inf
        """How long it may run."""
        self.deployed: Deployed | None = None
        self.stream: BodyStream | None = None
        """The rest of its body, if it streams."""
        self.at_caller = True
        """It reads from its caller or writes to it, which may take for ever: only a cancellation ends that."""
        self.future: asyncio.Future[Grant] | None = None
        self.exchange: CallExchange | None = None
        self.error: GpufaasError | None = None
        """Why it was ended."""
        self.whose = "its time limit (annotation gpufaas.timeout)"
        """Where `last` comes from, for the error."""
        self.has_run = False
        """A worker has it, and `ends` is the end of its `exec_s`."""
        self.what = "did not answer"
        self.watched = False
        """It is not quick."""
        self.status = 500
        """HTTP status that it is counted with."""
        self.queue_s: Seconds = 0.0
        self.load_s: Seconds = 0.0
        self.run_s: Seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        """Listens to a caller, who may hang up."""
        self._told = False
        """Its caller tells when he hangs up."""
        self._reads_on = False
        """Its time is up, and the caller reads the rest of the answer."""

    def fail(self, error: GpufaasError) -> None:
        """End the call with *error*, whatever it waits for. Only the first error counts."""
        if self.error is not None:
            return
        self.error = error
        if self.at_caller:
            assert self.owner is not None
            self.owner.cancel()
        elif self.exchange is not None:
            self.exchange.fail(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def was_cancelled_by_us(self) -> bool:
        """Return whether `fail` made the cancellation that just arrived; take that back then."""
        if self.error is None or self.owner is None or not self.at_caller:
            return False
        self.owner.uncancel()
        return True

    def watch(self) -> None:
        """Listen to the caller from now on, and let the time limit end the call: it is not quick."""
        self._count_down()
        self.attend()

    def attend(self) -> None:
        """Listen to the caller from now on."""
        self.watched = True
        if self.exchange is not None or self.future is not None:
            self.listen()

    def listen(self) -> None:
        """Listen to the caller from now on, who may hang up."""
        # While its body is passed on, `BodyStream` listens.
        if self._told or self._task is not None or self.caller is None:
            return
        if self.stream is None and self.caller.on_gone(self._gone):
            self._told = True
        elif self.stream is None or self.exchange is None:
            self._task = asyncio.get_running_loop().create_task(self._until_gone(self.caller))

    def begin_stream(self, exchange: CallExchange) -> None:
        """Pass the body on to *exchange* from now on."""
        assert self.stream is not None
        self.watched = True
        self.stop_watching()
        self._count_down()
        self.stream.begin(exchange)

    def end_within(self, seconds: Seconds) -> None:
        """End the call in *seconds*, when the call that made it ends, if its own limit is not earlier."""
        ends = time.perf_counter() + seconds
        if ends < self.last:
            self.last, self.whose = ends, "which is when the call that made it ends"
            self.watched = True
            self.end_at(self.ends)

    def run_begins(self) -> None:
        """A worker has it: from now on the time to run counts, and not that to wait."""
        ends = time.perf_counter() + self.exec_s
        self.has_run = ends < self.last
        self.end_at(ends)

    def waits(self, since: float) -> None:
        """It waits, and may be loaded for, from *since* on."""
        assert self.deployed is not None
        self.has_run = False
        self.end_at(since + self.deployed.timeout_s)

    def end_at(self, ends: float) -> None:
        self.ends = min(ends, self.last)
        if self.watched:
            self.watch()

    def stop_watching(self) -> None:
        """Let neither time limit nor caller end the call any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._told:
            assert self.caller is not None
            self.caller.on_gone(None)
            self._told = False
        if self.stream is not None:
            self.stream.end()

    def _gone(self) -> None:
        self._told = False
        self.fail(CallCancelled("the caller went away"))

    def _count_down(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left_s = max(0.0, self.ends - time.perf_counter())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    def _expire(self) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.end is not None and not self._reads_on:
            # The function has ended. A slow caller may read on, but not keep a file for hours.
            self._reads_on = True
            left = exchange.unread + SPOOL_ABOVE  # about so much is with the server and the kernel
            self._timer = asyncio.get_running_loop().call_later(left / READ_BYTES_PER_S, self._expire)
            return
        assert self.deployed is not None
        what, limit_s, whose = f"{self.deployed.name} {self.what}", self.ends - self.began, self.whose
        if self.exchange is None and self.future is None:
            what = f"the body for {self.deployed.name} did not arrive"
        if self.has_run:
            asked = "X-Timeout" if self.exec_s < self.deployed.exec_s else "environment exec_timeout"
            limit_s, whose = self.exec_s, f"the limit of its run ({asked})"
        elif self.ends < self.last:
            whose = "the limit to wait and load (annotation gpufaas.timeout sets one for these and the run together)"
        if exchange is not None and (loading_s := exchange.loading_s):
            self.load_s = loading_s
            whose += f"; its worker was still loading, for {loading_s:.3g} s of that"
        self.fail(DeadlineExceeded(f"{what} within {limit_s:g} s, {whose}"))

    async def _until_gone(self, caller: Caller) -> None:
        try:
            if self.stream is not None:
                await self.stream.hold()
                return
            while True:
                await caller.receive()
        except CallCancelled as error:
            self.fail(error)
