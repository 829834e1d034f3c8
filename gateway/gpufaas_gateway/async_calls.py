"""
`AsyncCalls`: accepts asynchronous calls, executes them, delivers their callbacks.

Everything that touches the queue goes through one turn at a time: what was accepted and what came out since the last
one is committed together (one fsync for many requests), then as many due calls are claimed as there is room for. A turn
happens when there is a reason (a call, an outcome, the earliest retry is due), so nothing polls, and an idle platform
is idle.

Calls are executed as all other calls are (`Execute`): they wait in the engine's queue as every other call does.
How many are there at once is bounded, per function and per queue, so that synchronous callers do not stand behind a
backlog; callbacks have a bound of their own, so that a slow receiver holds up no execution.

A queue is a name for functions that share these bounds. Which one a function goes through is asked each time, and kept
nowhere: an update that names another one takes the function's backlog along.
"""

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpufaas_core.errors import BadAnswer, GpufaasError, Overloaded, StorageFailed
from gpufaas_core.units import Seconds, format_bytes
from gpufaas_gateway.async_call import (
    INLINE_ANSWER,
    MAX_ANSWER,
    AcceptedCall,
    Answer,
    Answered,
    Body,
    CallStatus,
    Cancelled,
    ClaimedCall,
    Dead,
    Done,
    Execute,
    Execution,
    Header,
    Outcome,
    Phase,
    QueueStatus,
    Redeliver,
    Retry,
    State,
    Waiting,
)
from gpufaas_gateway.callbacks import CallbackFailed, CallbackRefused, Callbacks
from gpufaas_gateway.errors import status_of
from gpufaas_gateway.ports import AsyncQueue, SpooledBody
from gpufaas_gateway.retry import GiveUp, RetryPolicy, Settled, TryAgain, backoff_s, decide, parse_retry_after
from gpufaas_gateway.spec import DEFAULT_QUEUE

log = logging.getLogger(__name__)

_STORAGE_RETRY_S: Final[Seconds] = 1.0
"""Outcomes that could not be written are tried again this often; nothing new is claimed until they are."""
_NEVER_TO_CALLBACK: Final = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"content-length", b"x-call-id", b"x-start-time", b"x-duration-seconds",
    b"x-function-name", b"x-function-status", b"x-retry", b"x-retry-max", b"user-agent", b"host",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The bounds of one queue."""

    at_once: int
    """Executions."""
    limit: int
    """Calls that have not ended."""


@dataclass(frozen=True, slots=True)
class AsyncSettings:
    max_queue: int = 100_000
    """Calls of one function that have not ended."""
    queues: Mapping[str, QueueSettings] = field(default_factory=dict)
    """Those whose bounds were given. What follows holds for the others."""
    queue_limit: int = 1_000_000
    """Calls of one queue that have not ended."""
    at_once_in_named: int = 16
    """Executions of a queue that functions name and nobody configured."""
    at_once: int = 64
    """Executions of the default queue in the engine, its queue included."""
    at_once_per_function: int = 16
    """In the default queue. Twice the slots of a CPU function's worker: one call runs in each, one is there when it
    ends."""
    callbacks_at_once: int = 64
    """Of one queue."""
    callbacks_at_once_per_function: int = 16
    callback_retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(10, frozenset(), 1.0, 120.0))
    """About ten minutes; its codes are not used."""
    retry_after_s: Seconds = 5.0
    """Told to whom a full queue refuses."""
    grace_s: Seconds = 10.0
    """How long executions and callbacks may take to end when the platform is asked to stop."""

    def of_queue(self, queue: str) -> QueueSettings:
        if queue in self.queues:
            return self.queues[queue]
        return QueueSettings(self.at_once if queue == DEFAULT_QUEUE else self.at_once_in_named, self.queue_limit)

    def bounds(self, phase: Phase, queue: str) -> tuple[int, int]:
        """Return how many calls of *queue* may be worked on at once, and how many of one function."""
        if phase == "callback":
            return self.callbacks_at_once, self.callbacks_at_once_per_function
        at_once = self.of_queue(queue).at_once
        # Whoever gave a queue a number meant it for the functions in it, also if it is only one.
        return at_once, self.at_once_per_function if queue == DEFAULT_QUEUE else at_once


class _Lane:
    """Calls of one phase: where some are due, and how many are being worked on."""

    def __init__(self, phase: Phase, settings: AsyncSettings, queue_of: Callable[[str], str]) -> None:
        self.phase: Phase = phase
        self._settings = settings
        self._queue_of = queue_of
        self._busy: Counter[str] = Counter()
        self.busy_in: Counter[str] = Counter()
        """By queue, of which a function's calls may be in two: it was updated."""
        self.due: dict[str, float] = {}
        """By function: when its next call that is not claimed is due. Its order is whose turn it is."""

    def expect(self, function: str, at: float) -> None:
        self.due[function] = min(at, self.due.get(function, math.inf))

    def wanted(self, now: float) -> list["_Wanted"]:
        """Return what to claim: for each function that is due, as many calls as there is room for in its queue."""
        rooms: dict[str, tuple[int, int]] = {}
        wanted: list[_Wanted] = []
        for function, due in self.due.items():
            if due > now:
                continue
            queue = self._queue_of(function)
            if queue not in rooms:
                at_once, per_function = self._settings.bounds(self.phase, queue)
                rooms[queue] = at_once - self.busy_in[queue], per_function
            room, per_function = rooms[queue]
            if (count := min(room, per_function - self._busy[function])) > 0:
                wanted.append(_Wanted(self.phase, function, queue, count))
                rooms[queue] = room - count, per_function
        return wanted

    def claimed(self, function: str, queue: str, count: int, next_due: float | None) -> None:
        self.due.pop(function, None)
        if next_due is not None:
            self.due[function] = next_due  # at the end: the others come first next time
        if count:
            self._busy[function] += count
            self.busy_in[queue] += count

    def ended(self, function: str, queue: str) -> None:
        for busy, name in ((self._busy, function), (self.busy_in, queue)):
            busy[name] -= 1
            if not busy[name]:
                del busy[name]

    def next_due(self, now: float) -> float | None:
        """Return when something becomes due; what is due already waits for room, which is an event of its own."""
        return min((due for due in self.due.values() if due > now), default=None)


class _Wanted(NamedTuple):
    """Calls to be claimed."""

    phase: Phase
    function: str
    queue: str
    limit: int


class AsyncCalls:
    """
    Run `run` beside the server; `begin` once functions can be called; `stop` when the platform is asked to stop, and
    `finish` when nobody can send calls any more: then `run` returns.
    """

    def __init__(
        self,
        queue: AsyncQueue,
        execute: Execute,
        callbacks: Callbacks,
        policy_of: Callable[[str], RetryPolicy],
        settings: AsyncSettings | None = None,
        *,
        queue_of: Callable[[str], str] = lambda _: DEFAULT_QUEUE,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        :param policy_of: by ``NAME.NAMESPACE``; asked after each execution, so that an update counts
        :param queue_of: the name of the queue that a function's calls go through, by ``NAME.NAMESPACE``
        :param clock: Unix seconds, because what is due outlives the process
        """
        self._queue = queue
        self._run = execute
        self._callbacks = callbacks
        self._policy_of = policy_of
        self._settings = settings or AsyncSettings()
        self._rng = rng or random.Random()
        self._clock = clock
        self._queue_of = queue_of
        phases: tuple[Phase, Phase] = ("queued", "callback")
        self._lanes: dict[Phase, _Lane] = {phase: _Lane(phase, self._settings, queue_of) for phase in phases}
        self._open: Counter[str] = Counter()
        """Calls that have not ended, by function; those being accepted count."""
        self._open_in: Counter[str] = Counter()
        """The same by queue, made anew with each turn: functions may have gone over to another."""
        self._accepted: list[tuple[AcceptedCall, asyncio.Future[None]]] = []
        self._outcomes: list[tuple[str, Outcome]] = []
        self._requeued: list[Waiting] = []
        self._to_cancel: list[tuple[str, asyncio.Future[bool]]] = []
        self._cancelled: set[int] = set()
        """Calls that were cancelled while they were claimed, until that claim ends: they are counted no more."""
        self._working: dict[int, asyncio.Task[None]] = {}
        """By the queue's key of a call."""
        self._wake = asyncio.Event()
        self._looked_at = 0.0
        """The time by which the last turn claimed."""
        self.counted = asyncio.Event()
        """Set when what the queue had at the start is known."""
        self._claiming = False
        self._finishing = False
        self._thread = ThreadPoolExecutor(1, "async-queue")

    # --- its life ---

    async def run(self) -> None:
        """:raises StorageFailed: the queue cannot be read at all"""
        timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        try:
            for waiting in await self._in_thread(self._queue.waiting):
                self._count(waiting.function, waiting.count)
                self._lanes[waiting.phase].expect(waiting.function, waiting.due_at)
            self.counted.set()
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    if timer is not None:
                        timer.cancel()
                    written = await self._turn(tasks)
                    if self._finishing and not self._working and not self._accepted and not self._to_cancel:
                        if not self._outcomes or not written:
                            break
                        continue
                    # Measured from when the turn looked: what has become due since then was not claimed.
                    due = [at for lane in self._lanes.values() if (at := lane.next_due(self._looked_at)) is not None]
                    wait_s = max(0.0, min(due) - self._clock()) if due and self._claiming else None
                    if not written:
                        wait_s = _STORAGE_RETRY_S
                    if wait_s is not None:
                        timer = loop.call_later(wait_s, self._wake.set)
        finally:
            if timer is not None:
                timer.cancel()
            self._thread.shutdown(wait=False)

    def begin(self) -> None:
        """Functions can be called: execute what waits."""
        self._claiming = True
        self._wake.set()

    def stop(self) -> None:
        """Claim nothing more. What runs has its grace; then it is given up, and stays queued."""
        if self._finishing or not self._claiming:
            return
        self._claiming = False
        asyncio.get_running_loop().call_later(self._settings.grace_s, self._give_up)

    def finish(self) -> None:
        self.stop()
        self._finishing = True
        self._wake.set()

    def _give_up(self) -> None:
        for task in self._working.values():
            task.cancel()

    # --- for who accepts calls, and asks about them ---

    def reserve(self, function: str) -> None:
        """
        Take a place in the queue; `accept` fills it, or `release` gives it back.

        :raises Overloaded: there is none
        """
        settings = self._settings
        queue = self._queue_of(function)
        for count, limit, whose in (
            (self._open[function], settings.max_queue, f"the asynchronous queue of {function}"),
            (self._open_in[queue], settings.of_queue(queue).limit, f"the asynchronous queue {queue}"),
        ):
            if count >= limit:
                raise Overloaded(
                    f"{whose} is full: {limit} calls have not ended; send it again later", settings.retry_after_s
                )
        self._count(function, 1)
        self._open_in[queue] += 1

    def release(self, function: str) -> None:
        self._count(function, -1)
        self._open_in[self._queue_of(function)] -= 1

    async def accept(self, call: AcceptedCall) -> None:
        """
        Return once *call* is durable: from then on it is executed, whatever becomes of this process.

        :raises StorageFailed: it is not, and will not be executed; its place is given back
        """
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepted.append((call, durable))
        self._wake.set()
        # Whoever hangs up now has sent it all the same; `_turn` alone decides what became of it.
        await asyncio.shield(durable)

    def new_file(self) -> SpooledBody:
        return self._queue.new_file()

    async def status(self, call: str) -> CallStatus | None:
        return await asyncio.to_thread(self._queue.get, call)

    async def dead(self, function: str | None, limit: int) -> list[CallStatus]:
        return await asyncio.to_thread(self._queue.list_dead, function, limit)

    async def retry(self, call: str) -> bool:
        """Let a dead letter wait again; whether there was one."""
        waiting = await self._in_thread(self._queue.requeue, call, self._clock())
        if waiting is None:
            return False
        # Not put into the lane here: a turn may be about to overwrite it with what it read before.
        self._requeued.append(waiting)
        self._wake.set()
        return True

    async def cancel(self, call: str) -> State | None:
        """
        Take every call of this id back that has not ended: one that runs is aborted, and a callback that is due not
        made. Durable when it returns.

        Return ``cancelled``; or what the call is instead, which had ended before; None: there is none of that id.

        :raises StorageFailed: nothing was cancelled
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._to_cancel.append((call, done))
        self._wake.set()
        if await asyncio.shield(done):
            return "cancelled"
        found = await self.status(call)
        return None if found is None else found.state

    async def discard(self, call: str) -> bool:
        """Forget a dead letter; whether there was one."""
        return await asyncio.to_thread(self._queue.discard, call)

    def find(self, waiting: Sequence[Waiting]) -> None:
        """Take up calls that were another gateway's, which is gone, and are in our queue now."""
        self._requeued += waiting
        self._wake.set()

    def lose(self, key: int, function: str, is_claimed: bool) -> None:
        """Work no more on a call that the queue does not have any more, or not for us: it was cancelled, or taken."""
        self._count(function, -1)
        if is_claimed:
            self._cancelled.add(key)
            # It may have come to its end meanwhile: then its outcome waits for the next turn.
            if (task := self._working.get(key)) is not None:
                task.cancel()

    def counts(self) -> dict[str, int]:
        """Return how many calls have not ended, by ``NAME.NAMESPACE``, for metrics and for scaling by queue."""
        return dict(self._open)

    def queues(self) -> dict[str, QueueStatus]:
        """Return the queues that are configured, have calls, or are the default one."""
        pending = self._by_queue()
        names = {DEFAULT_QUEUE, *self._settings.queues, *pending, *(n for x in self._lanes.values() for n in x.busy_in)}
        running, delivering = self._lanes["queued"].busy_in, self._lanes["callback"].busy_in
        return {
            name: QueueStatus(each.at_once, each.limit, pending[name], running[name], delivering[name])
            for name, each in ((name, self._settings.of_queue(name)) for name in sorted(names))
        }

    def _by_queue(self) -> Counter[str]:
        pending: Counter[str] = Counter()
        for function, count in self._open.items():
            pending[self._queue_of(function)] += count
        return pending

    def _count(self, function: str, change: int) -> None:
        self._open[function] += change
        if not self._open[function]:
            del self._open[function]

    # --- the turn ---

    async def _turn(self, tasks: asyncio.TaskGroup) -> bool:
        """Commit what there is, claim what there is room for. Return whether it could be written."""
        accepted, self._accepted = self._accepted, []
        outcomes, self._outcomes = self._outcomes, []
        requeued, self._requeued = self._requeued, []
        to_cancel, self._to_cancel = self._to_cancel, []
        late = self._cancelled & {outcome.key for _, outcome in outcomes}
        for waiting in requeued:
            self._count(waiting.function, waiting.count)
            self._lanes[waiting.phase].expect(waiting.function, waiting.due_at)
        for call, _ in accepted:
            self._lanes["queued"].expect(call.function, call.accepted_at)
        for function, outcome in outcomes:
            match outcome:
                case _ if outcome.key in late:
                    pass
                case Retry():
                    self._lanes["queued"].expect(function, outcome.at)
                case Answered() | Redeliver():
                    self._lanes["callback"].expect(function, outcome.at)
                case Done() | Dead():
                    pass
        # A call's time is that of the request, which may be a moment ahead of a clock that was set back.
        now = self._looked_at = max([self._clock(), *(call.accepted_at for call, _ in accepted)])
        wanted = [each for lane in self._lanes.values() for each in lane.wanted(now)] if self._claiming else []
        try:
            cancelled, claimed = await self._in_thread(self._exchange, accepted, outcomes, to_cancel, wanted, now)
        except StorageFailed as exc:
            for call, durable in accepted:
                self._count(call.function, -1)
                durable.set_exception(exc)
            for _, done in to_cancel:
                done.set_exception(exc)
            if outcomes:
                log.warning("async.not_written outcomes=%d: %s", len(outcomes), exc)
            self._outcomes[:0] = outcomes
            self._open_in = self._by_queue()
            return not outcomes and not wanted
        for _, durable in accepted:
            durable.set_result(None)
        late = self._cancelled & {outcome.key for _, outcome in outcomes}  # some may have been lost meanwhile
        for function, outcome in outcomes:
            if isinstance(outcome, Done | Dead) and outcome.key not in late:
                self._count(function, -1)
        self._cancelled -= late
        self._settle_cancelled(to_cancel, cancelled)
        for (phase, function, queue, _), (calls, next_due) in zip(wanted, claimed, strict=True):
            self._lanes[phase].claimed(function, queue, len(calls), next_due)
            work = self._execute if phase == "queued" else self._deliver
            for each in calls:
                self._working[each.key] = tasks.create_task(self._work(work, self._lanes[phase], queue, each))
        self._open_in = self._by_queue()
        return True

    def _settle_cancelled(
        self,
        asked: Sequence[tuple[str, asyncio.Future[bool]]],
        cancelled: Sequence[Sequence[Cancelled]] | StorageFailed,
    ) -> None:
        if isinstance(cancelled, StorageFailed):
            for _, done in asked:
                done.set_exception(cancelled)
            return
        for (_, done), found in zip(asked, cancelled, strict=True):
            for each in found:
                if each.is_ours:
                    self.lose(each.key, each.function, each.is_claimed)
            done.set_result(bool(found))

    def _exchange(
        self,
        accepted: Sequence[tuple[AcceptedCall, object]],
        outcomes: Sequence[tuple[str, Outcome]],
        to_cancel: Sequence[tuple[str, object]],
        wanted: Sequence[_Wanted],
        now: float,
    ) -> tuple[list[list[Cancelled]] | StorageFailed, list[tuple[list[ClaimedCall], float | None]]]:
        """The turn's part of the queue's thread."""
        if accepted or outcomes:
            self._queue.write([call for call, _ in accepted], [outcome for _, outcome in outcomes])
        cancelled: list[list[Cancelled]] | StorageFailed = []
        if to_cancel:
            try:
                cancelled = self._queue.cancel([call for call, _ in to_cancel], now)
            except StorageFailed as exc:  # what was written before stays
                cancelled = exc
        return cancelled, [self._claim(each, now) for each in wanted]

    def _claim(self, wanted: _Wanted, now: float) -> tuple[list[ClaimedCall], float | None]:
        try:
            return self._queue.claim(wanted.phase, wanted.function, now, wanted.limit)
        except StorageFailed as exc:
            # What was written before is durable, and what was claimed before is ours: only this is tried again.
            log.warning("async.not_claimed function=%s: %s", wanted.function, exc)
            return [], now + _STORAGE_RETRY_S

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _work(
        self, work: Callable[[ClaimedCall], Awaitable[Outcome]], lane: _Lane, queue: str, claimed: ClaimedCall
    ) -> None:
        function = claimed.call.function
        try:
            outcome = await work(claimed)
            self._outcomes.append((function, outcome))  # only now: each turn begins a list of its own
        except asyncio.CancelledError:
            if claimed.key in self._cancelled:
                # The queue knows already, and only ends the claim.
                self._outcomes.append((function, Dead(claimed.key, self._clock(), claimed.attempts, None, "")))
            elif self._claiming:
                raise
            # Else the grace is over: without an outcome it stays as it was, for the next start.
        finally:
            lane.ended(function, queue)
            del self._working[claimed.key]
            self._wake.set()

    # --- an execution ---

    async def _execute(self, claimed: ClaimedCall) -> Outcome:
        call = claimed.call
        policy = self._policy_of(call.function)
        answer = _Answered(None if call.callback_url is None else self._queue.new_file)
        began = time.perf_counter()
        kept = False
        try:
            try:
                await answer.take(await self._run(call))
            except Exception as exc:  # the edge of the invocation path, as `serving.app` is for the server
                if not answer.begun:
                    log.exception("async.execution_failed call=%s function=%s", call.id, call.function)
                answer.failed(GpufaasError(f"the answer broke off: {exc}"), 502 if answer.begun else 500)
            duration_s = time.perf_counter() - began
            now = self._clock()
            retry_after_s = parse_retry_after(found, now) if (found := answer.header(b"retry-after")) else None
            decision = decide(policy, answer.status, answer.internal, retry_after_s, claimed.attempts, self._rng)
            attempts = claimed.attempts + 1
            exhausted: str | None = None
            match decision:
                case TryAgain(wait_s, attempts):
                    return Retry(claimed.key, now + wait_s, attempts, answer.status, answer.reason)
                case GiveUp(reason):
                    exhausted = f"{answer.reason}; {reason}"
                case Settled():
                    pass
            if call.callback_url is None:
                if exhausted is not None:
                    return Dead(claimed.key, now, attempts, answer.status, exhausted)
                return Done(claimed.key, now, answer.status, attempts)
            try:
                body = await answer.keep()
            except StorageFailed as exc:
                # It was executed, but what it answered is lost: that is an attempt like any other that failed.
                log.warning("async.answer_not_kept call=%s: %s", call.id, exc)
                wait_s = backoff_s(attempts, policy.min_wait_s, policy.max_wait_s, self._rng)
                return Retry(claimed.key, now + wait_s, attempts, answer.status, str(exc))
            kept = True
            given = Answer(answer.status, tuple(answer.headers), body, duration_s, policy.attempts)
            return Answered(claimed.key, now, attempts, given, exhausted)
        finally:
            if not kept:
                answer.discard()

    # --- a callback ---

    async def _deliver(self, claimed: ClaimedCall) -> Outcome:
        call, answer = claimed.call, claimed.answer
        assert answer is not None
        assert call.callback_url is not None
        policy = self._settings.callback_retry
        deliveries = claimed.deliveries + 1
        headers = [pair for pair in answer.headers if pair[0].lower() not in _NEVER_TO_CALLBACK]
        headers += [
            (b"X-Call-Id", call.id.encode("latin-1")),
            (b"X-Start-Time", b"%d" % call.start_ns),
            (b"X-Duration-Seconds", b"%.6f" % answer.duration_s),
            (b"X-Function-Name", call.name.encode("latin-1")),
            (b"X-Function-Status", b"%d" % answer.status),
            (b"X-Retry", b"%d" % claimed.attempts),
            (b"X-Retry-Max", b"%d" % answer.attempts_allowed),
        ]
        reason: str
        try:
            await self._callbacks.deliver(call.callback_url, headers, answer.body)
        except CallbackFailed as exc:
            now, reason = self._clock(), str(exc)
            if deliveries < policy.attempts:
                wait_s = backoff_s(deliveries, policy.min_wait_s, policy.max_wait_s, self._rng)
                return Redeliver(claimed.key, now + wait_s, deliveries, reason)
            reason += f"; the last of {policy.attempts} attempts failed"
        except CallbackRefused as exc:
            now, reason = self._clock(), str(exc)
        else:
            now = self._clock()
            if claimed.exhausted is None:
                return Done(claimed.key, now, answer.status, claimed.attempts)
            return Dead(claimed.key, now, claimed.attempts, answer.status, claimed.exhausted)
        log.warning("async.callback_gave_up call=%s function=%s: %s", call.id, call.function, reason)
        if claimed.exhausted is not None:
            return Dead(claimed.key, now, claimed.attempts, answer.status, f"{claimed.exhausted}; {reason}")
        return Dead(claimed.key, now, claimed.attempts, answer.status, reason, undelivered=True)


class _Answered:
    """Keeps an answer, in memory as long as it is small; only its size if nobody wants it."""

    def __init__(self, new_file: Callable[[], SpooledBody] | None) -> None:
        self.status = 500
        self.headers: list[Header] = []
        self.begun = False
        self._new_file = new_file
        self._pieces: list[bytes] = []
        self._size = 0
        self._file: SpooledBody | None = None

    @property
    def internal(self) -> bool:
        """Whether the platform made it."""
        return self.header(b"x-openfaas-internal") is not None

    @property
    def reason(self) -> str:
        text = f"status {self.status}"
        if self.internal and self._pieces:
            text += " of the platform: " + b"".join(self._pieces)[:500].decode("utf-8", "replace").strip()
        return text

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == name), None)

    async def take(self, execution: Execution) -> None:
        """Take it to its end."""
        self.status, self.headers = execution.status, execution.headers
        self.begun = True
        if execution.stream is None:
            self._keep(execution.body)
            return
        with execution.stream as stream:
            while (piece := await stream.chunk()) is not None:
                self._keep(piece)

    def _keep(self, piece: bytes) -> None:
        if not piece or (self._new_file is None and not self.internal):
            return
        self._size += len(piece)
        if self._size > MAX_ANSWER:
            raise BadAnswer(f"it has more than the {format_bytes(MAX_ANSWER)} that are kept for a callback")
        self._pieces.append(piece)
        if self._size > INLINE_ANSWER and self._new_file is not None:
            if self._file is None:
                self._file = self._new_file()
            for each in self._pieces:
                self._file.write(each)
            self._pieces.clear()

    def failed(self, error: GpufaasError, status: int | None = None) -> None:
        """In place of whatever came so far: the platform's own answer."""
        self.discard()
        self.status = status or status_of(error)
        self.headers = [(b"x-openfaas-internal", b"gateway"), (b"content-type", b"text/plain; charset=utf-8")]
        self._pieces = [str(error).encode()]

    async def keep(self) -> Body:
        if self._file is None:
            return b"".join(self._pieces)
        return await asyncio.to_thread(self._file.keep)

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()
            self._file = None
