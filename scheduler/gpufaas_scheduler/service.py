"""
The asyncio shell around the engine: the clock, the waiting gateways, the nodes, the journal.

Everything happens on one event loop, so the engine needs no lock. In embedded mode a gateway that asks for a placement
gets the answer from the same function call whenever a lease can be granted at once.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Protocol

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import (
    DeadlineExceeded,
    GpufaasError,
    InvalidSpec,
    LeaseRefused,
    LoadFailed,
    NestedCall,
    NoRoom,
    OutOfMemory,
    Overloaded,
    UnknownFunction,
)
from gpufaas_core.messages import (
    Abort,
    Arrived,
    Cancelled,
    Command,
    DeviceDrained,
    DeviceJoined,
    Event,
    Evict,
    FunctionDeployed,
    FunctionRemoved,
    Learnt,
    Lease,
    Load,
    Outer,
    Refused,
    Reject,
    Resize,
    Scaled,
    Start,
    Woken,
)
from gpufaas_core.model import (
    Bytes,
    CallId,
    Device,
    DeviceId,
    EngineStatus,
    Explanation,
    Function,
    FunctionId,
    Seconds,
)
from gpufaas_core.snapshot import DeviceDoc, DeviceSnapshot, EngineDoc, FunctionDoc
from gpufaas_scheduler.check import Holding
from gpufaas_scheduler.engine import Engine


class NodePort(Protocol):
    """A node as the scheduler commands it."""

    def open(self, lease: Lease) -> object: ...

    def load(self, command: Load) -> None: ...

    def evict(self, function: FunctionId, device: DeviceId, copy: int = 0) -> None: ...

    def resize(self, function: FunctionId, device: DeviceId, memory: Bytes, copy: int = 0) -> None: ...

    def abort(self, call: CallId, device: DeviceId) -> None: ...


class _Gone:
    """A node that left between a decision and its command: its devices have left too, and nothing is to be done."""

    def _nothing(self, *_: object) -> None:
        pass

    open = load = evict = resize = abort = _nothing


_GONE: Final = _Gone()


class JournalPort(Protocol):
    def append(self, event: Event, now: Seconds) -> None: ...

    def flush(self) -> None: ...


_FLUSH_WITHIN_S: Final = 0.05
"""A kill -9 loses at most this much of the journal; a write per event would cost every call."""
_REJECTIONS: Final[Mapping[str, type[GpufaasError]]] = {
    "deadline": DeadlineExceeded,
    "unknown_function": UnknownFunction,
    "removed": UnknownFunction,
    "no_device": InvalidSpec,
    "no_room": NoRoom,
    "refused": LeaseRefused,
    "out_of_memory": OutOfMemory,
    "nested": NestedCall,
}


class SchedulerService:
    """See module. `on_fatal` gets an exception of the engine, after which the process must end."""

    def __init__(
        self,
        engine: Engine,
        *,
        journal: JournalPort | None = None,
        on_fatal: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._waiting: dict[CallId, asyncio.Future[Lease]] = {}
        self._refused: dict[CallId, asyncio.Future[Lease]] = {}
        self._nodes: dict[DeviceId, NodePort] = {}
        """Whose a device is."""
        self._gateways: dict[str, Callable[[CallId, Lease | GpufaasError], None]] = {}
        """Of other processes, by the name that ends the ids of their calls."""
        self.on_event: Callable[[], None] = lambda: None
        """Told after each event: something may be there to be written behind."""
        self.changes = 0
        """Counts events, so that whoever shows the state knows whether there is something new."""
        self._flush: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._placing: CallId | None = None
        self._placed: Lease | GpufaasError | None = None

    # --- gateways ---

    def place(
        self,
        call: CallId,
        function: FunctionId,
        timeout_s: Seconds,
        size: float = 0.0,
        outer: Outer | None = None,
        endless: bool = False,
    ) -> Lease | asyncio.Future[Lease]:
        """
        Ask for the right to run *call*: a lease at once when there is one, else a future of it. *size*: of the request,
        see `Arrived`.

        :param outer: a function made it
        :param endless: once it runs, it may go on beyond its time

        :raises GpufaasError: it was rejected at once; the future raises the same when that happens later
        """
        self._placing, self._placed = call, None
        now = self._now()
        self.handle(Arrived(call, function, now + timeout_s, 0.0, size, outer, endless), now)
        self._placing, placed = None, self._placed
        if placed is None:
            future: asyncio.Future[Lease] = self._loop.create_future()
            self._waiting[call] = future
            return future
        if isinstance(placed, GpufaasError):
            raise placed
        return placed

    def place_for(
        self, call: CallId, function: FunctionId, timeout_s: Seconds, age_s: Seconds = 0.0, size: float = 0.0,
        outer: Outer | None = None, endless: bool = False,
    ) -> None:  # fmt: skip
        """Place a call of an attached gateway, which is answered at once or later; *age_s*: it waited elsewhere."""
        now = self._now()
        self.handle(Arrived(call, function, now + timeout_s, age_s, size, outer, endless), now)

    def attach(self, gateway: str, answer: Callable[[CallId, Lease | GpufaasError], None]) -> None:
        """Answers to calls whose ids end in ``@GATEWAY`` go to *answer* from now on."""
        self._gateways[gateway] = answer

    def detach(self, gateway: str) -> None:
        self._gateways.pop(gateway, None)

    def calls_of(self, gateway: str) -> list[CallId]:
        """Return those of its calls that wait or run. O(calls): for when a gateway comes or goes."""
        return [call for call in self._engine.calls() if call.endswith(f"@{gateway}")]

    def knows(self, call: CallId) -> bool:
        """Whether *call* waits or runs."""
        return self._engine.knows(call)

    def runs(self, call: CallId) -> bool:
        """Whether *call* has a lease."""
        return self._engine.runs(call)

    def all_calls(self) -> list[CallId]:
        """Return all that wait or run."""
        return self._engine.calls()

    def holdings(self, devices: Iterable[DeviceId], among: Collection[CallId] | None = None) -> dict[DeviceId, Holding]:
        """Return what these devices should have, of calls those *among* these. See `Engine.holdings`."""
        return self._engine.holdings(devices, among)

    def changed_docs(self) -> list[str]:
        """Return the keys of what should be written behind; see `Engine.take_changed`."""
        return self._engine.take_changed()

    def doc(self, key: str) -> DeviceDoc | FunctionDoc | EngineDoc | None:
        return self._engine.doc(key, self._now())

    def again(self, call: CallId) -> asyncio.Future[Lease]:
        """Return the next lease of *call*, whose last one the node refused; it kept its place in the queue."""
        future = self._refused.pop(call, None)
        if future is None:
            future = self._waiting.get(call) or self._loop.create_future()
            self._waiting[call] = future
        return future

    def over(self, call: CallId) -> None:
        """Its caller was answered. Embedded, nothing is kept of a call that has its lease."""

    def cancel(self, call: CallId) -> None:
        """The caller of *call* is gone, or has no time left: its place, or its worker, is given up."""
        self._waiting.pop(call, None)
        self._refused.pop(call, None)
        self.handle(Cancelled(call))

    # --- nodes ---

    def join(self, node: NodePort, devices: list[Device]) -> None:
        for device in devices:
            self._nodes[device.id] = node
            self.handle(DeviceJoined(device))

    def join_with(self, node: NodePort, devices: list[DeviceSnapshot]) -> None:
        """A node comes with what it holds."""
        for each in devices:
            self._nodes[each.device.id] = node
            self.handle(DeviceJoined(each.device, each))

    def part(self, node: NodePort) -> None:
        """A node is gone, and its devices have left."""
        self._nodes = {device: each for device, each in self._nodes.items() if each is not node}

    def drain(self, device: DeviceId, drain: bool) -> None:
        """Let *device* take no new calls, or take it back."""
        self.handle(DeviceDrained(device, drain))

    def report(self, fact: Event) -> None:
        """A node says what happened."""
        if isinstance(fact, Refused) and fact.call != self._placing and not self._gateway_of(fact.call):
            # Its gateway asks for the next lease when it learns of the refusal, which may be after that is granted.
            self._waiting[fact.call] = self._refused[fact.call] = self._loop.create_future()
        self.handle(fact)

    # --- the catalogue ---

    def deploy(self, function: Function, worker: WorkerSpec | None = None) -> None:  # noqa: ARG002 - the nodes know it
        self.handle(FunctionDeployed(function))

    def remove(self, function: FunctionId, drain: bool) -> None:
        self.handle(FunctionRemoved(function, drain))

    def scale(self, function: FunctionId, copies: int) -> None:
        """Let *function* have so many copies, within its bounds; see `Scaled`. One that is not there is ignored."""
        self.handle(Scaled(function, copies))

    def status(self) -> EngineStatus:
        return self._engine.status(self._now())

    async def explain(self, call: CallId) -> Explanation | None:
        """Say why *call* was started where it was, or why it waits; None: it is not known any more."""
        return self.explained(call)

    def explained(self, call: CallId) -> Explanation | None:
        return self._engine.explain(call, self._now())

    def take_learnt(self) -> list[Learnt]:
        """Return the profiles that changed since they were last taken, for whoever keeps them."""
        return self._engine.take_learnt()

    # --- within ---

    def handle(self, event: Event, now: Seconds | None = None) -> None:
        """Feed *event* to the engine and carry out what it commands."""
        if now is None:
            now = self._now()
        self.changes += 1
        if self._journal is not None:
            self._journal.append(event, now)
            if self._flush is None:
                self._flush = self._loop.call_later(_FLUSH_WITHIN_S, self._flush_journal)
        try:
            commands = self._engine.handle(event, now)
        except Exception as exc:
            # A wrong decision made quietly is worse than a stop: the journal replays this one at a desk.
            self._on_fatal(exc)
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(LeaseRefused("the scheduler failed and the platform stops: call again"))
            raise
        self.on_event()
        for command in commands:
            self._carry_out(command)
        self._set_timer(now)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Start):
            lease = command.lease
            self._answer(lease.call, lease)
            if lease.cold:
                # On a hit the call itself opens the lease; on a miss the node need not wait for it.
                self._node(lease.device).open(lease)
        elif isinstance(command, Reject):
            self._answer(command.call, _rejection(command))
        elif isinstance(command, Abort):
            self._node(command.device).abort(command.call, command.device)
        elif isinstance(command, Resize):
            self._node(command.device).resize(command.function, command.device, command.memory, command.copy)
        elif isinstance(command, Evict):
            self._node(command.device).evict(command.function, command.device, command.copy)
        elif isinstance(command, Load):
            self._node(command.device).load(command)

    def _node(self, device: DeviceId) -> NodePort:
        return self._nodes.get(device, _GONE)

    def _gateway_of(self, call: CallId) -> Callable[[CallId, Lease | GpufaasError], None] | None:
        return self._gateways.get(call.rpartition("@")[2]) if self._gateways else None

    def _answer(self, call: CallId, answer: Lease | GpufaasError) -> None:
        if call == self._placing:
            self._placed = answer
            return
        gateway = self._gateway_of(call)
        if gateway is not None:
            gateway(call, answer)
            return
        future = self._waiting.pop(call, None)
        if future is None or future.done():
            return
        if isinstance(answer, GpufaasError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _set_timer(self, now: Seconds) -> None:
        wake_at = self._engine.wake_at
        if wake_at is None or (self._timer is not None and self._timer_at <= wake_at):
            # An earlier timer than needed is left: it wakes once for nothing, which is cheaper than one per call.
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = wake_at
        self._timer = self._loop.call_later(max(0.0, wake_at - now), self._wake)

    def _flush_journal(self) -> None:
        self._flush = None
        if self._journal is not None:
            self._journal.flush()

    def _wake(self) -> None:
        self._timer = None
        self.handle(Woken())


def _rejection(command: Reject) -> GpufaasError:
    if command.code == "overloaded":
        return Overloaded(command.message, command.retry_after_s)
    if command.code == "load_failed":
        return LoadFailed(command.message, command.retry_after_s)
    return _REJECTIONS.get(command.code, GpufaasError)(command.message)
