"""
One worker of one function on one device: its life, its calls, its end. How it runs is behind the port `Running`.

A worker is made waiting for memory, runs once that is reserved, and is over when its memory is free again. What its
`Running` tells it comes through the `on_…` methods, all on the event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.descriptors import is_lack
from gpufaas_core.errors import GpufaasError, LeaseRefused, LoadFailed, OutOfMemory, WorkerCrashed
from gpufaas_core.frames import FailedHead, ReadyHead
from gpufaas_core.messages import Event, Finished, Loaded, Measured, Refused, WorkerExited
from gpufaas_core.messages import LoadFailed as LoadFailedFact
from gpufaas_core.model import Bytes, CallId, DeviceId, Seconds, copy_id
from gpufaas_core.units import format_bytes
from gpufaas_gpu_manager.cpu_time import progress_of, state_of
from gpufaas_gpu_manager.devices import NodeDevice
from gpufaas_gpu_manager.enforcement import Hold
from gpufaas_gpu_manager.exchange import Exchange, Slot, SlotOwner
from gpufaas_gpu_manager.ledger import MemoryLedger
from gpufaas_gpu_manager.open_files import OpenFiles
from gpufaas_gpu_manager.output import Logs, Output
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.worker_state import WorkerEvent, WorkerState, advance

_LAST_WORDS_S: Final = 0.25
_LOOK_S: Final = 1.0
"""Between two looks at whether a load thrashes."""
_TOLD_WITHIN_S: Final = 0.25
"""Within this a scheduler has said what a worker may use that has just loaded; while none leads, nobody does."""
_SAID: Final[Bytes] = 2000
"""Of what an exception says."""
_KILLED: Final = tuple(f"it ended with signal {name}" for name in ("SIGKILL", "SIGTERM"))
"""By somebody else: what a program does wrong ends it with other signals."""
KILLED_FOR_MEMORY: Final = "it was killed: out of memory"
"""So begins how a worker ended that took more than its limit."""


class Running(Protocol):
    """
    How one worker runs: a process forked from the zygote, a program, a container.

    It tells its worker: `on_started` when there is a process, `on_slots` before `on_ready`, `on_failed` with what it
    knows of a failure, `on_reaped` once, when nothing of it is left; that follows `start` whatever happens, unless
    `start` raised.
    """

    waits_for: str
    """What a load that makes no progress has not done, for the error: ``to listen on port 8080``. Empty: nothing."""

    death_known_s: Seconds
    """
    How long its end may take to be known here. A connection that breaks mostly means that the worker is dead, and the
    caller is to hear of what.
    """

    async def start(self) -> None:
        """:raises GpufaasError, OSError: it cannot be started, and nothing was"""

    def end(self) -> None:
        """It was evicted, and is idle: end it, politely but soon."""

    def kill(self) -> None:
        """End it and all that it started, at once. May be asked for again, and before it has begun."""

    def said_all(self) -> bool:
        """Whether a worker that is gone has nothing left that was not read yet."""

    def limit_to(self, memory: Bytes) -> None: ...

    def in_use(self) -> Bytes:
        """What its limit holds it to and it has now, in bytes; 0 where nobody knows."""
        return 0

    def close(self) -> None:
        """Give up what this side holds; the worker is gone, or the node closes."""


class Place(Protocol):
    """The device of a worker."""

    source: NodeDevice
    id: DeviceId
    ledger: MemoryLedger

    def leave(self, worker: "Worker") -> None:
        """*worker* is reaped: its memory is free as soon as the device says so too."""


class WorkerHost(Protocol):
    """What a worker asks of the node that has it, and tells it."""

    settings: NodeSettings
    logs: Logs
    open_files: OpenFiles
    fetch: Callable[[WorkerSpec], Awaitable[None]] | None
    """Has what a function's workers need brought here; None: all that is deployed is here."""
    report: Callable[[Event], None]
    """Takes a fact for the scheduler."""

    @property
    def fork_server(self) -> int | None:
        """The process that forked workers share pages with."""
        ...

    def running(self, worker: "Worker") -> Running:
        """Return how *worker* is to run."""
        ...

    def over(self, exchange: Exchange) -> None:
        """*exchange* has no worker any more."""

    def drop(self, worker: "Worker") -> None:
        """*worker* has no process, and will not have one; or that is gone."""

    def gone(self, worker: "Worker") -> None:
        """*worker* is reaped, and leaves its device."""


class Worker(SlotOwner):
    """See module. Made waiting; `begin` has it run."""

    def __init__(
        self,
        host: WorkerHost,
        device: Place,
        spec: WorkerSpec,
        memory: Bytes,
        number: int,
        copy: int = 0,
        *,
        scratch: bool = False,
    ) -> None:
        self.host = host
        self.device = device
        self.spec = spec
        self.copy = copy
        """Its number among the function's copies on the device, as the engine counts them; `number` is the node's."""
        self.key = copy_id(spec.function, copy)
        self.memory = memory
        self.wanted = memory
        """What its reservation is to become as soon as there is room for that."""
        self.told = not spec.elastic or not device.source.enforced
        """What it may use is known. Where the scheduler is another process, a first call could begin before that."""
        self.outgrown = False
        """A call ran out of what it has: the next one begins once it has what it is to get."""
        self.number = number
        self.scratch = scratch
        self.state = WorkerState.WAITING
        self.pid: int | None = None
        self.exchanges: dict[CallId, Exchange] = {}
        """All calls that hold a lease on it and are not over."""
        self.unbound: deque[Exchange] = deque()
        """Those of them whose frames wait for it to become ready."""
        self.checked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.broken_check = False
        """Of a scratch worker: it ended, or was not started, through no doing of its function."""
        self.ready_head: ReadyHead | None = None
        self.run: Running = host.running(self)
        self.hold: Hold | None = None
        """What holds it to its memory, if it is a process."""
        self._free: list[Slot] = []
        self.asked_at = self._begun_at = time.monotonic()
        self.used_at = self.asked_at
        """When the last lease of it was opened; the start of its load if there was none."""
        self._failure: FailedHead | None = None
        self._killed_for = ""
        self._blameless = False
        """It was not started, for want of open files."""
        self.reaped = False
        """`pid` may be another process's by now."""
        self._reaped_with: str | None = None
        self.output = Output(host.logs, f"{spec.name}.{spec.namespace}", f"{device.id.rpartition('/')[2]}-{number}")
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._progress: tuple[int, ...] = ()
        self._progress_at = 0.0
        self._starting: asyncio.Task[None] | None = None
        self._fetching: asyncio.Future[None] | None = None
        self._fetch_s: Seconds | None = None

    @property
    def exclusive(self) -> bool:
        return self.spec.kind == "model" or self.spec.exclusive

    # --- starting ---

    def begin(self) -> None:
        """Its memory is reserved: have it run."""
        self.state = advance(self.state, WorkerEvent.RESERVATION_MADE)
        self._begun_at = time.monotonic()
        self._starting = asyncio.get_running_loop().create_task(self._begin())

    async def _begin(self) -> None:
        try:
            if self.host.fetch is not None and not self.spec.image:
                await self._fetch(self.host.fetch)
            self.host.open_files.take(self.number, 1 if self.scratch else self.spec.slots)
            await self.run.start()
        except (GpufaasError, OSError) as exc:
            self._blameless = is_lack(exc)
            reason = self.host.open_files.say_lack() if self._blameless else str(exc)
            self._failure = FailedHead(reason, "")
            self.host.drop(self)
            self.on_exited(reason)
            return
        self._progress_at = asyncio.get_running_loop().time()
        if self.state is WorkerState.STARTING and self.ready_head is None:
            self._later("progress", self.spec.stall_s / 4, self._check_progress)
            self._later("thrashing", _LOOK_S, self._check_thrashing)

    async def _fetch(self, fetch: Callable[[WorkerSpec], Awaitable[None]]) -> None:
        """
        Have on this node what it needs. Not watched as a load is: whoever fetches gives up what makes no progress.

        :raises LoadFailed: it was ended meanwhile
        """
        began = time.monotonic()
        self._fetching = asyncio.ensure_future(fetch(self.spec))
        try:
            await asyncio.wait([self._fetching])
            if self._fetching.cancelled():
                raise LoadFailed(self._killed_for or "it was not needed any more")
            self._fetching.result()
        finally:
            self._fetching.cancel()  # of no effect but when this task itself is cancelled
            self._fetching, self._fetch_s = None, time.monotonic() - began

    def on_slots(self, slots: Sequence[Slot]) -> None:
        """Through these it takes calls, once it is ready."""
        self._free = list(slots[::-1])  # slot 0, the main thread, is taken first

    def on_started(self, pid: int) -> None:
        self.pid = pid
        if self.hold is not None:
            self.hold.started(pid, None if self.spec.kind == "server" else self.host.fork_server)
        if self.state is WorkerState.ENDING or self._killed_for:
            self.run.kill()

    def on_ready(self, head: ReadyHead) -> None:
        self._cancel("progress")
        self._cancel("thrashing")
        self.ready_head = head
        if self.scratch:
            self._settle_check(None)
            if self.spec.kind == "server":
                self.run.end()  # the others end by themselves
            return
        self.state = advance(self.state, WorkerEvent.BECAME_READY)
        if self.state is not WorkerState.READY:
            return
        now = time.monotonic()
        load_s = now - self.asked_at
        within = sum(seconds for _, seconds in head.phases)
        fetched = () if self._fetch_s is None else (("fetch", self._fetch_s),)
        fork_s = now - self._begun_at - within - (self._fetch_s or 0.0)
        phases = (("room", self._begun_at - self.asked_at), *fetched, ("fork", fork_s), *head.phases)
        for exchange in self.unbound:
            exchange.phases = phases
        occupation = max(head.occupation, self._driver_bytes())
        self.host.report(Loaded(self.spec.function, self.device.id, load_s, occupation, self.copy))
        if not self.told:
            self._later("told", _TOLD_WITHIN_S, self.on_told)
        else:
            self.bind_waiting()

    def on_told(self) -> None:
        """The scheduler has said what it may use from now on, or says nothing."""
        if not self.told and self.state is WorkerState.READY:
            self.told = True
            self._cancel("told")
            self.bind_waiting()

    def on_failed(self, head: FailedHead) -> None:
        self._failure = head

    def on_over_memory(self, reason: str) -> None:
        """It took more than it has, in a way that fails no allocation of its own: it ends, or has ended, for that."""
        if self._failure is None and not self._killed_for and self.state is not WorkerState.ENDING:
            self._failure = FailedHead(reason, "", True)
            self.output.say(f"gpufaas: killed: {reason}")
        self.run.kill()

    def on_broken(self, reason: str) -> None:
        self.kill(reason)

    def fail_unstarted(self, reason: str) -> None:
        """It can never start: answer its calls."""
        self._failure = FailedHead(reason, "")
        self.host.drop(self)
        self.on_exited(reason)

    def _check_progress(self) -> None:
        """Loading may take as long as it takes, as long as something happens: CPU time, bytes read, memory."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        seen = progress_of(self.pid) if self.pid else ()
        if seen != self._progress or not self.pid:
            self._progress, self._progress_at = seen, now
        elif now - self._progress_at >= self.spec.stall_s:
            waits = f", and has yet {self.run.waits_for}" if self.run.waits_for else ""
            self.kill(
                f"its load made no progress for {self.spec.stall_s:g} s (no CPU time, no bytes read, no memory){waits}"
            )
            return
        self._later("progress", self.spec.stall_s / 4, self._check_progress)

    def _check_thrashing(self) -> None:
        """A load that reads its files again and again would take minutes or hours: it is told as out of memory."""
        may_have_more = not self.scratch and not self.spec.memory_limit and self.memory < self.device.ledger.capacity
        if self.hold is not None and self.hold.thrashes() and may_have_more:
            self.on_over_memory("out of memory: the files that its load reads do not fit beside what it holds")
        else:
            self._later("thrashing", _LOOK_S, self._check_thrashing)

    # --- calls ---

    def bind(self, exchange: Exchange) -> None:
        """Give the call to a free slot; the engine grants no more leases than there are slots."""
        if not self._free:
            self.unbound.append(exchange)
            return
        exchange.bind(self._free.pop(), time.monotonic(), self.exclusive)

    def bind_waiting(self) -> None:
        while self.unbound and self._free:
            self.bind(self.unbound.popleft())

    def on_done(self, slot: Slot, exchange: Exchange, run_s: float, peak: int, out_of_memory: bool, ok: bool) -> None:
        self._free.append(slot)
        call = exchange.lease.call
        self.exchanges.pop(call, None)
        self.host.over(exchange)
        self.outgrown = out_of_memory
        if peak or out_of_memory:
            self.host.report(Measured(self.spec.function, self.device.id, peak, self.copy, out_of_memory))
        self.host.report(Finished(call, self.device.id, run_s, ok and not exchange.abandoned))
        if self.unbound and self.takes_calls:
            self.bind(self.unbound.popleft())

    def watch_abandoned(self) -> None:
        """An abandoned call may end by itself; if all that runs here is abandoned too long, the worker is killed."""
        self._later("abandoned", self.host.settings.abort_grace_s, self._end_abandoned)

    def _end_abandoned(self) -> None:
        bound = [each for each in self.exchanges.values() if each.slot is not None]
        if bound and all(each.abandoned for each in bound):
            self.kill(f"a call that nobody waits for ran on for {self.host.settings.abort_grace_s:g} s")
        elif any(each.abandoned for each in bound):
            self.watch_abandoned()

    def on_call_lost(self, slot: Slot, exchange: Exchange, reason: str) -> None:
        """
        The connection of a call broke before its answer, or was never made.

        If the worker lives on, its caller is told why; a call of which nothing was taken is placed again.
        """

        timer = f"call {exchange.lease.call}"

        def fail() -> None:
            self._cancel(timer)
            if self.exchanges.get(exchange.lease.call) is not exchange:
                return
            if exchange.untouched and not exchange.abandoned:
                self._free.append(slot)
                del self.exchanges[exchange.lease.call]
                self.host.over(exchange)
                self._refuse(exchange, reason)
            else:
                self.on_done(slot, exchange, 0.0, 0, False, False)
                name = f"{self.spec.name}.{self.spec.namespace}"
                exchange.fail(WorkerCrashed(f"{name} gave no answer: {reason}{self.output.tail(True)}"))

        self._later(timer, self.run.death_known_s, fail)

    def _refuse(self, exchange: Exchange, reason: str) -> None:
        """Nothing of the call was taken: the scheduler, and then the gateway, place it again."""
        lease = exchange.lease
        self.host.report(Refused(lease.call, lease.device, reason))
        exchange.fail(LeaseRefused(f"{lease.device} could not give call {lease.call} to its worker: {reason}"))

    def ran_out(self, said: bytes) -> OutOfMemory:
        """A call hit the limit, as its exception *said*: what it had, what there is, what to do."""
        name, ledger = f"{self.spec.name}.{self.spec.namespace}", self.device.ledger
        reason = said[:_SAID].decode(errors="replace")
        return OutOfMemory(
            f"{name} ran out of memory ({reason}): it may use {format_bytes(self.memory)} on "
            f"{self.device.id}, which has {format_bytes(ledger.capacity)}, of that {format_bytes(ledger.free)} free. "
            "Send less at once, or deploy it with a larger gpufaas.memory (it was deployed with "
            f"{format_bytes(self.spec.memory)})"
        )

    @property
    def ends(self) -> bool:
        """It was told to end, and is not gone yet."""
        return bool(self._killed_for) or self.state is WorkerState.ENDING

    @property
    def takes_calls(self) -> bool:
        return self.state is WorkerState.READY and self.told and not (self.outgrown and self.wanted > self.memory)

    def limit_to(self, memory: Bytes) -> None:
        self.memory = memory
        if self.hold is not None:
            self.hold.limit(memory)
        self.run.limit_to(memory)

    def shrink_to(self, memory: Bytes) -> None:
        """Limit it to *memory*, or to what it has in use: that cannot be taken from it."""
        before = self.memory
        self.limit_to(min(before, max(memory, self.run.in_use())))
        if (used := self.run.in_use()) > self.memory:  # it grew until the limit was there
            self.limit_to(min(before, used))

    # --- ending ---

    def end(self) -> None:
        """Evict it: it is idle, or what it runs does not matter any more."""
        waited = self.state is WorkerState.WAITING
        self.state = advance(self.state, WorkerEvent.END_REQUESTED)
        if waited:
            self.host.drop(self)
            self.on_exited("it was not needed any more")  # it never had a process: GONE already
        elif self._fetching is not None:
            self._fetching.cancel()  # there is no process yet: `_begin` concludes
        else:
            self.run.end()

    def kill(self, reason: str) -> None:
        """End it for *reason*, which its callers and the function's log are told."""
        self._killed_for = reason
        self.output.say(f"gpufaas: killed: {reason}")
        if self._fetching is not None:
            self._fetching.cancel()
        self.run.kill()

    def on_reaped(self, how: str) -> None:
        """
        Its process, or container, is gone: *how*. What it said last may still be in its sockets: read that before
        concluding.
        """
        if self.reaped:
            return
        self.host.drop(self)
        self.reaped = True
        self._reaped_with = how
        if self.hold is not None and (reason := self.hold.close()):
            self.on_over_memory(reason)
        # A grandchild may hold a copy of a socket open: it is not waited for longer than this.
        self._later("last words", _LAST_WORDS_S, self._conclude)
        self.on_slot_lost()

    def on_slot_lost(self) -> None:
        if self._reaped_with is not None and self.run.said_all():
            self._conclude()

    def on_slot_closed(self) -> None:
        """The other end of a slot is closed: mostly since it dies; if it lives on, no call through it is answered."""

        def kill() -> None:
            if not self.reaped and (self.pid is None or state_of(self.pid) not in ("", "Z", "X")):
                self.on_broken("it closed a connection over which its calls come")

        self._later("closed", self.run.death_known_s, kill)

    def _conclude(self) -> None:
        if self._reaped_with is not None:
            how, self._reaped_with = self._reaped_with, None
            self.on_exited(how)

    def on_exited(self, how: str) -> None:
        before = self.state
        if before is not WorkerState.GONE:
            self.state = WorkerState.GONE if before is WorkerState.WAITING else advance(before, WorkerEvent.REAPED)
        self.close()
        killed = self._failure is None and not self._killed_for and how in _KILLED
        self.broken_check = killed or self._blameless
        self._settle_check(self._failure.summary if self._failure else how)
        if self.scratch:
            return
        exchanges, self.exchanges = self.exchanges, {}
        self.unbound.clear()
        reason = self._killed_for or (self._failure.summary if self._failure else how)
        if self._failure is not None and self._failure.out_of_memory:
            reason += (
                f" at its limit of {format_bytes(self.memory)} (the device has "
                f"{format_bytes(self.device.ledger.capacity)}; the annotation gpufaas.memory says what it needs)"
            )
        loading = before in (WorkerState.STARTING, WorkerState.WAITING)
        ran_out = self._failure is not None and self._failure.out_of_memory
        # One that is held to limits.memory gets no more, whatever is reserved for it.
        again_with_more = loading and ran_out and not self.spec.memory_limit
        place_again = again_with_more or self._blameless
        error: GpufaasError
        name = f"{self.spec.name}.{self.spec.namespace}"
        if loading:
            error = (OutOfMemory if ran_out else LoadFailed)(
                f"{name} did not load on {self.device.id}: {reason}{self.output.tail(not self._failure)}"
            )
        else:
            error = (OutOfMemory if ran_out or how.startswith(KILLED_FOR_MEMORY) else WorkerCrashed)(
                f"the worker of {name} died: {reason}{self.output.tail(True)}"
            )
        self.host.gone(self)
        again: list[Exchange] = []
        for exchange in exchanges.values():
            untouched = exchange.untouched
            self.host.over(exchange)
            if exchange.abandoned:
                exchange.fail(error)
            elif (untouched and before is WorkerState.READY) or place_again:
                again.append(exchange)  # of one whose load ran out, the scheduler knows if there is more
            else:
                exchange.fail(error)
        if before in (WorkerState.ENDING, WorkerState.GONE):
            # The engine asked for it, and knows. Calls were still on it only if their function was taken away.
            for call in exchanges:
                self.host.report(Finished(call, self.device.id, 0.0, ok=False))
        elif loading:
            self.host.report(
                LoadFailedFact(self.spec.function, self.device.id, reason, again_with_more, self.copy, self._blameless)
            )
        else:
            if ran_out:
                self.host.report(Measured(self.spec.function, self.device.id, 0, self.copy, out_of_memory=True))
            self.host.report(WorkerExited(self.spec.function, self.device.id, reason, self.copy))
        for exchange in again:
            self._refuse(exchange, reason)

    def close(self) -> None:
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()
        if self._fetching is not None:
            self._fetching.cancel()
        self.run.close()
        if self.hold is not None:
            self.hold.close()
        self.output.close()
        self.host.open_files.give_back(self.number)

    def _settle_check(self, failure: str | None) -> None:
        if self.scratch and not self.checked.done():
            self.checked.set_result(failure)

    def _driver_bytes(self) -> Bytes:
        return (self.device.source.used_bytes([self.pid]) or 0) if self.pid is not None else 0

    def _later(self, name: str, delay: float, action: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = asyncio.get_running_loop().call_later(delay, action)

    def _cancel(self, name: str) -> None:
        handle = self._timers.pop(name, None)
        if handle is not None:
            handle.cancel()
