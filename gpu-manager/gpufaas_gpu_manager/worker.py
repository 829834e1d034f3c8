"""
One worker of one function on one device: its life, its calls, its end. How it runs is behind the port `Running`.

A worker first waits for memory, runs when that is reserved, and is over when its memory is free again. Its `Running`
calls the `on_…` methods, all on the event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from msgspec.structs import replace

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.descriptors import is_lack
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.messages import Loaded
from gpufaas_core.model import Bytes, copy_id
from gpufaas_core.wire.heads import FailedHead, Imported, ParkedHead, ReadyHead, WokenHead
from gpufaas_gpu_manager.calls_ports import CallsHost, DevicePort
from gpufaas_gpu_manager.enforcement import WorkerLimits
from gpufaas_gpu_manager.isolation.binds import advice
from gpufaas_gpu_manager.isolation.walls import Own
from gpufaas_gpu_manager.last_calls import conclude
from gpufaas_gpu_manager.last_words import LastWords
from gpufaas_gpu_manager.load_watch import watch_load
from gpufaas_gpu_manager.open_files import OpenFiles
from gpufaas_gpu_manager.output import LogSink, Output
from gpufaas_gpu_manager.proc import parent_of, state_of
from gpufaas_gpu_manager.running import Running
from gpufaas_gpu_manager.timers import Timers
from gpufaas_gpu_manager.worker_calls import WorkerCalls
from gpufaas_gpu_manager.worker_end import Cause, WorkerEnd, end_of
from gpufaas_gpu_manager.worker_load import Phases, WorkerLoad
from gpufaas_gpu_manager.worker_state import BECOME_READY, BEGIN, END, PARKED_STATES, REAP, WorkerState

_TOLD_WITHIN_S: Final = 0.25
"""Within this a scheduler says what a worker that has just loaded may use; while no scheduler leads, none does."""


class WorkerDevicePort(DevicePort, Protocol):
    def switch_to(self, worker: "Worker") -> None:
        """*worker*, a standby, is ready: it takes the place of the worker of its copy."""

    def leave(self, worker: "Worker", reason: str = "") -> None:
        """*worker* is reaped, unasked for *reason*: its memory is free when the device says so, too."""

    def on_parked(self, worker: "Worker", held: Bytes) -> None:
        """*worker* is parked, and holds this much of the device yet."""

    def not_parked(self, worker: "Worker", reason: str) -> None:
        """*worker*, which is parked or was to be, ends."""

    def wakes(self, worker: "Worker") -> bool:
        """Whether a start waits for *worker*, which is parked or was to be."""


class ParkingPort(Protocol):
    """How a worker leaves its device without ending (parking.py)."""

    wakes: bool
    """The worker was parked, and starts again."""

    def why_not(self) -> str: ...

    def park(self) -> None: ...

    def on_parked(self, head: ParkedHead, /) -> None: ...

    def wake(self) -> None: ...

    def on_woken(self, head: WokenHead, /) -> None: ...

    def close(self) -> None: ...


class WorkerHost(CallsHost, Protocol):
    """What a worker asks and tells its node."""

    logs: LogSink
    open_files: OpenFiles
    fetch: Callable[[WorkerSpec], Awaitable[str]] | None
    """
    Brings what a function's workers need to this node, and returns where it came from: ``peer``, ``store``, or an empty
    string if it was here. None: everything that is deployed is here.
    """

    def running(self, worker: "Worker") -> Running:
        """Return how *worker* runs."""

    def parking(self, worker: "Worker") -> ParkingPort:
        """Return how *worker* is parked and wakes."""

    def loaded(self, worker: "Worker") -> None:
        """*worker* is ready."""

    def imported(self, worker: "Worker", imported: Imported) -> None:
        """*worker* has imported that itself, which took long."""

    def load_instead(self, worker: "Worker", reason: str) -> bool:
        """Start another worker in the place of *worker*, which does not wake. False: its device is gone."""

    def drop(self, worker: "Worker") -> None:
        """*worker* has no process, and will have none any more."""


class Worker:
    """See module. `begin` starts it."""

    def __init__(
        self,
        host: WorkerHost,
        device: WorkerDevicePort,
        spec: WorkerSpec,
        memory: Bytes,
        number: int,
        copy: int = 0,
        share: int = 0,
        *,
        checks: bool = False,
    ) -> None:
        """:param share: per cent of its device's compute that the copy was loaded with; 0: what its function says"""
        self.host = host
        self.device = device
        self.spec = spec
        self.copy = copy
        """The engine's number of the copy, among those of the function on the device; `number` is the node's."""
        self.key = copy_id(spec.function, copy)
        self.share = share or spec.need.held
        """Per cent of its device's compute that it holds; 0: each call takes what it needs."""
        self.standby = False
        """It loads beside the worker of its copy, whose place it takes when it is ready."""
        self.replaced = False
        """Another worker has taken its place: it ends when its calls have."""
        self.memory = memory
        self.wanted = memory
        """What its reservation will be when there is room for that."""
        self.told = not spec.elastic or device.source.emulation is not None
        """The scheduler has said what it may use. Where that is another process, a first call could come before."""
        self.outgrown = False
        """A call ran out of memory: the next one begins when the worker has what it was promised."""
        self.number = number
        self.checks = checks
        """It only says whether the function's code imports, or its server starts: it takes no calls."""
        self.state = WorkerState.WAITING
        self.pid: int | None = None
        self.loop = asyncio.get_running_loop()
        self.checked: asyncio.Future[WorkerEnd | None] = self.loop.create_future()
        """Has its end; None: of one that checks, that it is ready."""
        self.ready_head: ReadyHead | None = None
        self._early: ReadyHead | None = None
        """What it said before its process was known, whose memory could not be limited so."""
        self.run: Running = host.running(self)
        self.limits: WorkerLimits | None = None
        """The limits of its memory and processes, if it is a process of this machine."""
        self.own = Own()
        """What it has within the walls of its node, if it is such a process; known when it is about to start."""
        self.load = WorkerLoad()
        self.used_at = self.load.asked_at
        """When its last grant was opened; the start of its load if there was none."""
        self._cause = Cause()
        self.reaped = False
        """From then on `pid` may be another process's."""
        self.output = Output(host.logs, f"{spec.name}.{spec.namespace}", f"{device.id.rpartition('/')[2]}-{number}")
        self.timers = Timers()
        self.calls = WorkerCalls(self, host)
        self._starting: asyncio.Task[None] | None = None
        self.last_words = LastWords(self.timers, self.on_exited)
        self.parking = host.parking(self)

    # --- starting ---

    def begin(self) -> None:
        """Its memory is reserved: start it, or wake it."""
        parked = self.state is WorkerState.PARKED
        self.state = BEGIN[self.state]
        self.load.begun_at = time.monotonic()
        if parked:
            self.parking.wake()
            return
        self._starting = self.loop.create_task(self._begin())

    async def _begin(self) -> None:
        try:
            emulation = self.device.source.emulation
            if emulation is not None and not self.checks and (reason := emulation.reason_against(self.spec)):
                raise InvalidSpec(reason)
            if self.host.fetch is not None and not self.spec.image:
                await self.load.fetch(self.spec, self.host.fetch, lambda: self._cause.killed_for)
            self.host.open_files.take(self.number, _connections(self))
            await self.run.start()
        except (GpufaasError, OSError) as exc:
            self._cause.no_files = is_lack(exc)
            self.fail_unstarted(self.host.open_files.say_lack() if self._cause.no_files else str(exc))
            return
        if self.state is WorkerState.STARTING and self.ready_head is None:
            watch_load(self)

    def on_started(self, pid: int) -> None:
        self.pid = pid
        if self.limits is not None:
            shares_nothing = self.spec.kind == "server" or self.spec.own_process
            self.limits.started(pid, None if shares_nothing else parent_of(pid) or None)
        if self.state is WorkerState.ENDING or self._cause.killed_for:
            self.run.kill()
        if self._early is not None:
            self.on_ready(self._early)

    def on_ready(self, head: ReadyHead) -> None:
        if self.pid is None and not self.checks and not self.spec.image:
            self._early = head  # it loaded before its fork server said that it is there
            return
        self.timers.cancel("progress")
        self.timers.cancel("thrashing")
        self.ready_head = head
        if head.imported is not None:
            self.host.imported(self, head.imported)
        self.calls.watch.pings = head.loop
        if self.checks:
            if not self.checked.done():
                self.checked.set_result(None)
            if self.spec.kind == "server":
                self.run.end()  # the others end by themselves
            return
        self.state = BECOME_READY[self.state]
        if self.state is not WorkerState.READY:
            return
        phases = self.load.loaded(head)
        by_driver = self.calls.memory.ask_driver(head.held)
        self.on_loaded(phases, max(head.occupation + self.calls.memory.uncounted, by_driver))

    def on_loaded(self, phases: Phases, occupation: Bytes) -> None:
        """It can serve, after a load or a wake."""
        load = self.load
        for exchange in self.calls.waiting:
            exchange.phases, exchange.tier = phases, load.tier
        load_s = time.monotonic() - load.asked_at - load.warm_s
        self.host.report(
            Loaded(self.spec.function, self.device.id, load_s, occupation, self.copy, load.tier, load.read_s)
        )
        if self.standby:
            self.device.switch_to(self)
        if not self.told:
            self.timers.later("told", _TOLD_WITHIN_S, self.on_told)
        else:
            self.calls.bind_waiting()
        self.host.loaded(self)

    def on_told(self) -> None:
        """The scheduler has said what it may use, or did not within `_TOLD_WITHIN_S`."""
        if not self.told and self.state is WorkerState.READY:
            self.told = True
            self.timers.cancel("told")
            self.calls.bind_waiting()

    def on_failed(self, head: FailedHead) -> None:
        if self.limits is not None:
            head = replace(head, summary=head.summary + advice(head.summary, self.limits.confine.walls))
        self._cause.failure = head

    def on_over_memory(self, reason: str) -> None:
        """It took more than its reservation, and no allocation of its own failed: end it, if it has not ended."""
        if self._cause.failure is None and not self._cause.killed_for and self.state is not WorkerState.ENDING:
            self._cause.failure = FailedHead(reason, "", True)
            self.output.say(f"gpufaas: killed: {reason}")
        self.run.kill()

    def fail_unstarted(self, reason: str) -> None:
        """It can never start: answer its calls."""
        self._cause.failure = FailedHead(reason, "")
        self.host.drop(self)
        self.on_exited(reason)

    # --- calls ---

    @property
    def ends(self) -> bool:
        """Whether it was told to end; it may not be gone yet."""
        return bool(self._cause.killed_for) or self.state is WorkerState.ENDING

    @property
    def serves(self) -> bool:
        return self.state is WorkerState.READY and not self._cause.killed_for

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped. That of a container may be one of another machine."""
        return self.pid is not None and not self.spec.image and state_of(self.pid) in ("T", "t")

    @property
    def takes_calls(self) -> bool:
        return (
            self.state is WorkerState.READY
            and self.told
            and not (self.outgrown and self.wanted > self.memory)
            and not self.calls.watch.silent
        )

    def limit_to(self, memory: Bytes) -> None:
        self.memory = memory
        if self.limits is not None:
            self.limits.hold_to(memory)
        self.run.limit_to(memory)

    # --- ending ---

    def end(self) -> None:
        """Evict it: it is idle, or its calls do not matter any more."""
        waited = self.state is WorkerState.WAITING
        self.state = END[self.state]
        if waited:
            self.host.drop(self)
            self.on_exited("it was not needed any more")  # it had no process, so it is GONE
        elif self.load.fetches:
            self.load.cancel()  # there is no process yet: `_begin` concludes
        else:
            self.calls.memory.when_known(self.run.end)

    def kill(self, reason: str) -> None:
        """End it for *reason*, which its callers and the function's log get."""
        self._cause.killed_for = reason
        self.output.say(f"gpufaas: killed: {reason}")
        self.load.cancel()
        self.run.kill()

    def on_reaped(self, how: str) -> None:
        """Its process or container is gone: *how*. Its last words are read first."""
        if self.reaped:
            return
        self.host.drop(self)
        self.reaped = True
        if self.limits is not None and (reason := self.limits.close()):
            self.on_over_memory(reason)
        self.last_words.begin(self.run, how)

    def on_exited(self, how: str) -> None:
        before = self.state
        if before is not WorkerState.GONE:
            self.state = REAP[before]
        self.close()
        end = end_of(
            self.spec, self.device.id, self.copy, before, how, self._cause,
            self.memory, self.device.ledger.capacity,
        )  # fmt: skip
        if not self.checked.done():
            self.checked.set_result(end)
        if self.checks:
            return
        if before in PARKED_STATES or self.parking.wakes:
            if self.device.wakes(self):
                self.host.load_instead(self, end.reason)
            elif before in PARKED_STATES:
                self.device.not_parked(self, end.reason)
                self.device.leave(self)
                return
        self.device.leave(self, "" if end.asked_for else end.reason)
        lives = self.replaced or self.standby  # the copy of one whose place is another's: only its calls are over
        conclude(self.calls, end, lives=lives, was_ready=before is WorkerState.READY)

    def close(self) -> None:
        self.parking.close()
        self.timers.close()
        self.load.cancel()
        self.run.close()
        if self.limits is not None:
            self.limits.close()
        self.output.close()
        self.host.open_files.give_back(self.number)


def _connections(worker: Worker) -> int:
    """Return how many its node has to *worker*: one, or one for each slot if it speaks HTTP or has a clock for each."""
    by_slot = worker.spec.kind == "server" or worker.spec.image or worker.device.source.emulation is not None
    return worker.spec.need.slots if by_slot and not worker.checks else 1
