"""
`AsyncCalls`: accepts asynchronous calls, executes them, delivers their callbacks.

The queue is changed in turns, one at a time. A turn commits together what was accepted and what came out since the last
one (one fsync for many requests), then claims as many due calls as there is room for. It takes a reason (a call, an
outcome, a retry that is due), so nothing polls.

Calls are executed as all other calls are (`Calls.run`), and wait in the engine's queue as these do. How many of them
are there at once is bounded, per function and per queue, so that synchronous callers do not wait behind a backlog.
Callbacks have their own bound, so that a slow receiver holds up no execution.

A queue is a name for functions that share these bounds. The queue of a function is asked each time and not kept: an
update that names another one moves the function's backlog.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from gpufaas_async_calls.attempts import Attempts
from gpufaas_async_calls.call import (
    AcceptedCall,
    CallStatus,
    CancelledCall,
    ClaimedCall,
    Dead,
    Done,
    Outcome,
    Phase,
    Retry,
    State,
    Waiting,
)
from gpufaas_async_calls.callbacks import HttpCallbacks
from gpufaas_async_calls.lanes import Backlog, PhaseQueue, Wanted
from gpufaas_async_calls.ports import AsyncQueue
from gpufaas_async_calls.retry import RetryPolicy
from gpufaas_async_calls.settings import AsyncSettings
from gpufaas_core.errors import StorageFailed
from gpufaas_core.units import Seconds
from gpufaas_gateway.annotations import DEFAULT_QUEUE
from gpufaas_gateway.answering import Run
from gpufaas_gateway.usage import QueueStatus

log = logging.getLogger(__name__)

_STORAGE_RETRY_S: Final[Seconds] = 1.0
"""Outcomes that could not be written are tried again this often; nothing new is claimed until they are."""


class AsyncCalls:
    """
    Run `run` beside the server. Call `begin` once functions can be called, `stop` when the platform is asked to stop,
    and `finish` when no more calls can come: then `run` returns.
    """

    def __init__(
        self,
        queue: AsyncQueue,
        run: Run,
        callbacks: HttpCallbacks,
        policy_of: Callable[[str], RetryPolicy],
        settings: AsyncSettings | None = None,
        *,
        queue_of: Callable[[str], str] = lambda _: DEFAULT_QUEUE,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        :param run: `Calls.run`
        :param policy_of: by ``NAME.NAMESPACE``; asked after each execution, so that an update counts
        :param queue_of: the name of the queue that a function's calls go through, by ``NAME.NAMESPACE``
        :param clock: Unix seconds, because what is due outlives the process
        """
        self._queue = queue
        self.new_file = queue.new_file
        self._settings = settings = settings or AsyncSettings()
        self._clock = clock
        self._attempts = Attempts(
            run, callbacks, policy_of, settings.callback_retry, queue.new_file, rng or random.Random(), clock
        )
        self.backlog = Backlog(settings, queue_of)
        self._queue_of = queue_of
        phases: tuple[Phase, Phase] = ("queued", "callback")
        self._lanes: dict[Phase, PhaseQueue] = {phase: PhaseQueue(phase, self._settings, queue_of) for phase in phases}
        self._accepted: list[tuple[AcceptedCall, asyncio.Future[None]]] = []
        self._outcomes: list[tuple[str, Outcome]] = []
        self._requeued: list[Waiting] = []
        self._to_cancel: list[tuple[str, asyncio.Future[bool]]] = []
        self._cancelled: set[int] = set()
        """Calls that were cancelled while they were claimed, until the claim ends. They are not counted any more."""
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
                self.backlog.change(waiting.function, waiting.count)
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
        """Claim nothing more. What runs may end within the grace; then it is given up, and stays queued."""
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

    # --- accepting calls, and questions about them ---

    async def accept(self, call: AcceptedCall) -> None:
        """
        Return once *call* is durable: from then on it is executed, whatever becomes of this process.

        :raises StorageFailed: it is not, and will not be executed; its place is given back
        """
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepted.append((call, durable))
        self._wake.set()
        # A caller that hangs up now has sent it: `_turn` alone decides what becomes of the call.
        await asyncio.shield(durable)

    async def status(self, call: str) -> CallStatus | None:
        return await asyncio.to_thread(self._queue.get, call)

    async def dead(self, function: str | None, limit: int) -> list[CallStatus]:
        return await asyncio.to_thread(self._queue.list_dead, function, limit)

    async def retry(self, call: str) -> bool:
        """Let a dead letter wait again; return whether there was one."""
        waiting = await self._in_thread(self._queue.requeue, call, self._clock())
        if waiting is None:
            return False
        # Not put into the lane here: a turn may be about to overwrite it with what it read before.
        self._requeued.append(waiting)
        self._wake.set()
        return True

    async def cancel(self, call: str) -> State | None:
        """
        Cancel every call of this id that has not ended: one that runs is aborted, and no callback is made. Durable when
        it returns.

        Return ``cancelled``, or the state in which it had ended before; None: there is none of that id.

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
        """Forget a dead letter; return whether there was one."""
        return await asyncio.to_thread(self._queue.discard, call)

    def find(self, waiting: Sequence[Waiting]) -> None:
        """Count calls that were taken over from a gateway that has ended."""
        self._requeued += waiting
        self._wake.set()

    def lose(self, key: int, function: str, is_claimed: bool) -> None:
        """Stop working on a call that was cancelled, or taken over by another gateway."""
        self.backlog.change(function, -1)
        if is_claimed:
            self._cancelled.add(key)
            # It may have come to its end meanwhile: then its outcome waits for the next turn.
            if (task := self._working.get(key)) is not None:
                task.cancel()

    def queues(self) -> dict[str, QueueStatus]:
        """Return the queues that are configured, have calls, or are the default one."""
        pending = self.backlog.by_queue()
        names = {DEFAULT_QUEUE, *self._settings.queues, *pending, *(n for x in self._lanes.values() for n in x.busy_in)}
        running, delivering = self._lanes["queued"].busy_in, self._lanes["callback"].busy_in
        return {
            name: QueueStatus(each.at_once, each.limit, pending[name], running[name], delivering[name])
            for name, each in ((name, self._settings.of_queue(name)) for name in sorted(names))
        }

    # --- the turn ---

    async def _turn(self, tasks: asyncio.TaskGroup) -> bool:
        """Commit what there is, claim what there is room for. Return whether it could be written."""
        accepted, self._accepted = self._accepted, []
        outcomes, self._outcomes = self._outcomes, []
        requeued, self._requeued = self._requeued, []
        to_cancel, self._to_cancel = self._to_cancel, []
        late = self._cancelled & {outcome.key for _, outcome in outcomes}
        for waiting in requeued:
            self.backlog.change(waiting.function, waiting.count)
            self._lanes[waiting.phase].expect(waiting.function, waiting.due_at)
        for call, _ in accepted:
            self._lanes["queued"].expect(call.function, call.accepted_at)
        for function, outcome in outcomes:
            if outcome.key not in late and not isinstance(outcome, Done | Dead):
                lane = self._lanes["queued" if isinstance(outcome, Retry) else "callback"]
                lane.expect(function, outcome.at)
        # A call's time is that of the request, which may be a moment ahead of a clock that was set back.
        now = self._looked_at = max([self._clock(), *(call.accepted_at for call, _ in accepted)])
        wanted = [each for lane in self._lanes.values() for each in lane.wanted(now)] if self._claiming else []
        try:
            cancelled, claimed = await self._in_thread(
                _exchange, self._queue, accepted, outcomes, to_cancel, wanted, now
            )
        except StorageFailed as exc:
            for call, durable in accepted:
                self.backlog.change(call.function, -1)
                durable.set_exception(exc)
            for _, done in to_cancel:
                done.set_exception(exc)
            if outcomes:
                log.warning("async.not_written outcomes=%d: %s", len(outcomes), exc)
            self._outcomes[:0] = outcomes
            self.backlog.recount()
            return not outcomes and not wanted
        for _, durable in accepted:
            durable.set_result(None)
        late = self._cancelled & {outcome.key for _, outcome in outcomes}  # some may have been lost meanwhile
        for function, outcome in outcomes:
            if isinstance(outcome, Done | Dead) and outcome.key not in late:
                self.backlog.change(function, -1)
        self._cancelled -= late
        self._settle_cancelled(to_cancel, cancelled)
        for (phase, function, queue, _), (calls, next_due) in zip(wanted, claimed, strict=True):
            self._lanes[phase].claimed(function, queue, len(calls), next_due)
            work = self._attempts.execute if phase == "queued" else self._attempts.deliver
            for each in calls:
                self._working[each.key] = tasks.create_task(self._work(work, self._lanes[phase], queue, each))
        self.backlog.recount()
        return True

    def _settle_cancelled(
        self,
        asked: Sequence[tuple[str, asyncio.Future[bool]]],
        cancelled: Sequence[Sequence[CancelledCall]] | StorageFailed,
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

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _work(
        self, work: Callable[[ClaimedCall], Awaitable[Outcome]], lane: PhaseQueue, queue: str, claimed: ClaimedCall
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


def _exchange(
    queue: AsyncQueue,
    accepted: Sequence[tuple[AcceptedCall, object]],
    outcomes: Sequence[tuple[str, Outcome]],
    to_cancel: Sequence[tuple[str, object]],
    wanted: Sequence[Wanted],
    now: float,
) -> tuple[list[list[CancelledCall]] | StorageFailed, list[tuple[list[ClaimedCall], float | None]]]:
    """Do the part of a turn that the thread of the queue does."""
    if accepted or outcomes:
        queue.write([call for call, _ in accepted], [outcome for _, outcome in outcomes])
    cancelled: list[list[CancelledCall]] | StorageFailed = []
    if to_cancel:
        try:
            cancelled = queue.cancel([call for call, _ in to_cancel], now)
        except StorageFailed as exc:  # what was written before stays
            cancelled = exc
    return cancelled, [_claim(queue, each, now) for each in wanted]


def _claim(queue: AsyncQueue, wanted: Wanted, now: float) -> tuple[list[ClaimedCall], float | None]:
    try:
        return queue.claim(wanted.phase, wanted.function, now, wanted.limit)
    except StorageFailed as exc:
        # What was written before is durable, and what was claimed before is ours: only this is tried again.
        log.warning("async.not_claimed function=%s: %s", wanted.function, exc)
        return [], now + _STORAGE_RETRY_S
