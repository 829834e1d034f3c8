"""
One call at a gateway: what is known of it, where it stands (`call_state`), what ends it from outside: a `Watch`, which
`LongCalls` gives to those that are not quick.
"""

import asyncio
import time
from math import inf
from typing import Any, Final

from gpufaas_core.driven import Driven
from gpufaas_core.errors import CallCancelled, DeadlineExceeded, GpufaasError
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import Asked, CallId, Seconds
from gpufaas_core.wire.bodies import INLINE, UPGRADE
from gpufaas_gateway import call_state as states
from gpufaas_gateway.asked import read_asked
from gpufaas_gateway.call_body import SPOOL_ABOVE, BodyStream, Caller
from gpufaas_gateway.call_headers import Header, ReadHead, asked_timeout, told_size
from gpufaas_gateway.catalogue import ServedRevision
from gpufaas_gateway.ports import CallExchange
from gpufaas_gateway.quotas import Passage
from gpufaas_gateway.request import Request

READ_BYTES_PER_S: Final = 32 * 1024
"""If the function has ended when the time is up, the caller may read the rest of the answer at this rate or faster."""
WATCH_AFTER_S: Final[Seconds] = 0.1
"""A call that takes longer is watched, after twice this time at the latest."""
SHORT_S: Final[Seconds] = 1.0
"""A call with a shorter time limit is watched from its beginning."""
_TO_WAIT: Final = "the limit to wait and load (annotation gpufaas.timeout sets one for these and the run together)"
_OF_RUN: Final = "the limit of its run"


class Call:
    """See module. A quick call costs no task, no timer and no `Watch`."""

    __slots__ = (
        "asked", "asked_size", "began", "body", "crossing", "deployed", "ends", "error", "exchange", "exec_s", "file",
        "future", "grant", "id", "last", "length", "load_s", "mode", "name", "ours", "outer", "owner",
        "passage", "passed", "queue_s", "ran_out", "refused", "request", "run_s", "size", "state", "status", "stream",
        "told", "watch", "whose", "whose_last",
    )  # fmt: skip

    def __init__(
        self, request: Request, began: float, read: ReadHead, name: str, call_id: str, outer: Outer | None,
        ours: list[Header],
    ) -> None:  # fmt: skip
        """
        :param began: on the clock of `time.perf_counter`, as `ends`
        :param name: X-Call-Id: the caller's, or ours
        :param call_id: the scheduler's id of the call
        :param ours: headers of every answer to it
        """
        self.state = states.READING
        """One of `call_state`, and changed only by its steps."""
        self.request = request
        self.owner: Driven | asyncio.Task[Any] | None = request.driven or asyncio.current_task()
        """What runs it."""
        self.name = name
        self.id = CallId(call_id)
        self.outer = outer
        self.ours = ours
        self.passed, _, self.length, self.told = read
        """The headers that the function gets; Content-Length, -1: unknown; those that ask something of the platform."""
        self.asked: Asked | None
        """What its caller asks for beside its function; set when it is admitted."""
        self.crossing = False
        """The platform's headers say which origins may read the answer; the function's are dropped."""
        self.deployed: ServedRevision | None = None
        self.passage: Passage | None = None
        self.body: bytes | memoryview = b""
        self.mode = INLINE
        self.file = ""
        self.stream: BodyStream | None = None
        """The rest of its body, if it streams."""
        self.size: float = 0.0
        """The size of the body in bytes, or `asked_size`: what the scheduler is told."""
        self.asked_size: float | None = None
        self.future: asyncio.Future[Grant] | None = None
        """The scheduler has promised a grant, which has not come."""
        self.grant: Grant | None = None
        self.refused: Exception | None = None
        """Why it could not begin in the moment in which its grant came."""
        self.exchange: CallExchange | None = None
        self.ran_out = False
        """It ran out of memory once, and runs again."""
        self.error: GpufaasError | None = None
        """Why it was ended from outside."""
        self.status = 500
        """HTTP status that it is counted with."""
        self.queue_s = self.load_s = self.run_s = 0.0
        self.began = began
        self.ends = 0.0
        """When its time is up: to wait and load, or to run."""
        self.last = inf
        """When it ends at the latest, whatever it does then."""
        self.exec_s: Seconds = inf
        """How long it may run."""
        self.whose, self.whose_last = _TO_WAIT, "its time limit (annotation gpufaas.timeout)"
        """Where `ends` and `last` come from, for the error."""
        self.watch: Watch | None = None

    def ask(self, told: dict[bytes, bytes], deployed: ServedRevision) -> None:
        """
        Take what its caller asks for. Size and time of a WebSocket do not count.

        :raises InvalidSpec: it cannot be read
        :raises Unsatisfiable: *deployed* can never be what is asked for
        """
        self.asked = read_asked(told, deployed.function, deployed.asked)
        if self.mode == UPGRADE:
            return
        if size := told.get(b"x-gpufaas-size"):
            self.asked_size = told_size(size)
        if timeout := told.get(b"x-timeout"):
            self.exec_s = min(self.exec_s, asked_timeout(timeout))

    # --- its end from outside ---

    def fail(self, error: GpufaasError) -> None:
        """End the call with *error*, whatever it waits for (`call_state`). Only the first error counts."""
        if self.error is not None:
            return
        self.error = error
        if self.state in states.WITH_CALLER:
            assert self.owner is not None
            self.owner.cancel()
        elif self.exchange is not None:
            self.exchange.fail(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def was_cancelled_by_us(self) -> bool:
        """Return whether `fail` made the cancellation that just arrived; take that back then."""
        if self.error is None or self.owner is None or self.state not in states.WITH_CALLER:
            return False
        self.owner.uncancel()
        return True

    def watched(self) -> "Watch":
        """Return what ends it when its caller hangs up or its time is up; it has that from now on."""
        if self.watch is None:
            self.watch = Watch(self)
        return self.watch

    def stop_watching(self) -> None:
        """Let neither time limit nor caller end the call any more."""
        watch, self.watch = self.watch, None  # they refer to each other
        if watch is not None:
            watch.stop()
        if self.stream is not None:
            self.stream.end()

    def begin_stream(self, exchange: CallExchange) -> None:
        """Pass the rest of its body on to *exchange* from now on, which listens to the caller, too."""
        assert self.stream is not None
        self.stop_watching()
        self.watched().attend()
        self.stream.begin(exchange)

    # --- its time ---

    @property
    def ran_s(self) -> Seconds:
        """How long it has run until now."""
        return time.perf_counter() - self.began - self.queue_s - self.load_s

    def end_within(self, seconds: Seconds) -> None:
        """End the call in *seconds*, when the call that made it ends, if its own limit is not earlier."""
        ends = time.perf_counter() + seconds
        if ends < self.last:
            self.last, self.whose_last = ends, "which is when the call that made it ends"
            self._end_at(self.ends, self.whose)
            self.watched().attend()

    def run_begins(self) -> None:
        """A worker has it: from now on the time to run counts, and not that to wait."""
        self._end_at(time.perf_counter() + self.exec_s, _OF_RUN)

    def waits(self, since: float) -> None:
        """It waits, and may be loaded for, from *since* on."""
        assert self.deployed is not None
        self._end_at(since + self.deployed.timeout_s, _TO_WAIT)

    def _end_at(self, ends: float, whose: str) -> None:
        self.ends, self.whose = min(ends, self.last), whose
        if self.watch is not None and self.watch.attends:
            self.watch.attend()

    def overdue(self) -> DeadlineExceeded:
        """Return the error of a call whose time is up."""
        deployed, exchange = self.deployed, self.exchange
        assert deployed is not None
        what = f"{deployed.name} did not answer" + (" a WebSocket handshake" if self.mode == UPGRADE else "")
        if self.state == states.READING:
            what = f"the body for {deployed.name} did not arrive"
        limit_s, whose = self.ends - self.began, self.whose if self.ends < self.last else self.whose_last
        if whose is _OF_RUN:
            limit_s, asked = self.exec_s, self.exec_s < deployed.exec_s
            whose += " (X-Timeout)" if asked else " (environment exec_timeout)"
        if exchange is not None and (loading_s := exchange.loading_s):
            self.load_s = loading_s
            whose += f"; its worker was still loading, for {loading_s:.3g} s of that"
        return DeadlineExceeded(f"{what} within {limit_s:g} s, {whose}")


class Watch:
    """Ends one call when its time is up or its caller hangs up."""

    __slots__ = ("_call", "_listener", "_reads_on", "_timer", "_told", "attends")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.attends = False
        """It does, and does not only listen."""
        self._timer: asyncio.TimerHandle | None = None
        self._told = False
        """The caller tells when he hangs up."""
        self._listener: asyncio.Task[None] | None = None
        """Waits at a caller who does not tell."""
        self._reads_on = False
        """The time is up, and the caller reads the rest of the answer."""

    def attend(self) -> None:
        """The call is not quick: listen to its caller, and count its time limit, which may be another one now."""
        self.attends = True
        self._expire_in(self._call.ends - time.perf_counter())
        if self._call.state != states.READING:  # else who reads the body notices that the caller hangs up
            self.listen()

    def listen(self) -> None:
        """Listen to the caller, who may hang up."""
        call, caller = self._call, self._call.request.caller
        if self._told or self._listener is not None or caller is None:
            return
        if call.stream is None and caller.on_gone(self._gone):
            self._told = True
        elif call.stream is None or call.exchange is None:  # else `BodyStream` listens
            self._listener = asyncio.get_running_loop().create_task(self._until_gone(caller))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
        if self._told:
            assert self._call.request.caller is not None
            self._call.request.caller.on_gone(None)
            self._told = False

    def _gone(self) -> None:
        self._told = False
        self._call.fail(CallCancelled("the caller went away"))

    async def _until_gone(self, caller: Caller) -> None:
        try:
            if self._call.stream is not None:
                await self._call.stream.hold()
                return
            while True:
                await caller.receive()
        except CallCancelled as error:
            self._call.fail(error)

    def _expire_in(self, seconds: Seconds) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._expire)

    def _expire(self) -> None:
        exchange = self._call.exchange
        if exchange is not None and exchange.end is not None and not self._reads_on:
            # The function has ended. A slow caller may read on, but not keep a file for hours.
            self._reads_on = True
            left = exchange.unread + SPOOL_ABOVE  # about so much is with the server and the kernel
            self._expire_in(left / READ_BYTES_PER_S)
        else:
            self._call.fail(self._call.overdue())


class LongCalls:
    """Finds the calls that are not quick, and has them watched. A quick call costs no timer. One event loop owns it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._young: set[Call] = set()
        """Calls that began after the last sweep."""
        self._older: set[Call] = set()
        """Calls that began before it. The next sweep watches them."""
        self._sweeping: asyncio.TimerHandle | None = None

    def begin(self, call: Call) -> None:
        self._young.add(call)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(WATCH_AFTER_S, self._sweep)

    def end(self, call: Call) -> None:
        """Watch *call* no more."""
        self._young.discard(call)
        self._older.discard(call)
        call.stop_watching()

    def _sweep(self) -> None:
        """Watch the calls that began before the last sweep."""
        older, self._older, self._young = self._older, self._young, set()
        for call in older:
            if call.watch is None or not call.watch.attends:
                call.watched().attend()
        self._sweeping = self._loop.call_later(WATCH_AFTER_S, self._sweep) if self._older else None
