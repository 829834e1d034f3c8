"""The calls of one worker: which wait for a slot, which run, and what becomes of them when it, or their slot, ends."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError, LeaseRefused, OutOfMemory, WorkerCrashed
from gpufaas_core.messages import Event, Finished, Measured, NodeRefused
from gpufaas_core.model import Bytes, CallId, DeviceId, Seconds
from gpufaas_core.units import format_bytes
from gpufaas_gpu_manager.devices import NodeDevice
from gpufaas_gpu_manager.exchange import Exchange, Slot
from gpufaas_gpu_manager.ledger import MemoryLedger
from gpufaas_gpu_manager.output import Output
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.timers import Timers

_SAID: Final[Bytes] = 2000
"""Of what an exception says."""


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


class CallsHost(Protocol):
    """What the calls of a worker ask of its node, and tell it."""

    settings: NodeSettings
    report: Callable[[Event], None]
    """Takes a fact for the scheduler."""

    over: Callable[[Exchange], None]
    """Takes an exchange that has no worker any more."""


class CallsWorker(Protocol):
    """What calls need of their worker."""

    spec: WorkerSpec
    copy: int
    memory: Bytes
    outgrown: bool
    exclusive: bool
    run: Running
    output: Output
    timers: Timers

    @property
    def device(self) -> Place: ...

    @property
    def takes_calls(self) -> bool: ...

    def kill(self, reason: str) -> None: ...


class WorkerCalls:
    """See module."""

    def __init__(self, worker: CallsWorker, host: CallsHost) -> None:
        self.exchanges: dict[CallId, Exchange] = {}
        """All that hold a lease on the worker and are not over."""
        self.unbound: deque[Exchange] = deque()
        """Those of them whose frames wait for it to become ready, or for a slot."""
        self._worker = worker
        self._host = host
        self._free: list[Slot] = []

    def on_slots(self, slots: Sequence[Slot]) -> None:
        """Through these they go, once the worker is ready."""
        self._free = list(slots[::-1])  # slot 0, the main thread, is taken first

    def bind(self, exchange: Exchange) -> None:
        """Give the call to a free slot; the engine grants no more leases than there are slots."""
        if not self._free:
            self.unbound.append(exchange)
            return
        exchange.bind(self._free.pop(), time.monotonic(), self._worker.exclusive)

    def bind_waiting(self) -> None:
        while self.unbound and self._free:
            self.bind(self.unbound.popleft())

    def on_done(self, slot: Slot, exchange: Exchange, run_s: float, peak: int, out_of_memory: bool, ok: bool) -> None:
        worker, host = self._worker, self._host
        self._free.append(slot)
        call = exchange.lease.call
        self.exchanges.pop(call, None)
        host.over(exchange)
        worker.outgrown = out_of_memory
        if peak or out_of_memory:
            host.report(Measured(worker.spec.function, worker.device.id, peak, worker.copy, out_of_memory))
        host.report(Finished(call, worker.device.id, run_s, ok and not exchange.abandoned))
        if self.unbound and self._worker.takes_calls:
            self.bind(self.unbound.popleft())

    def watch_abandoned(self) -> None:
        """An abandoned call may end by itself; if all that runs here is abandoned too long, the worker is killed."""
        self._worker.timers.later("abandoned", self._host.settings.abort_grace_s, self._end_abandoned)

    def _end_abandoned(self) -> None:
        bound = [each for each in self.exchanges.values() if each.slot is not None]
        if bound and all(each.abandoned for each in bound):
            self._worker.kill(f"a call that nobody waits for ran on for {self._host.settings.abort_grace_s:g} s")
        elif any(each.abandoned for each in bound):
            self.watch_abandoned()

    def on_call_lost(self, slot: Slot, exchange: Exchange, reason: str) -> None:
        """
        The connection of a call broke before its answer, or was never made.

        If the worker lives on, its caller is told why; a call of which nothing was taken is placed again.
        """

        timer = f"call {exchange.lease.call}"

        def fail() -> None:
            self._worker.timers.cancel(timer)
            if self.exchanges.get(exchange.lease.call) is not exchange:
                return
            if exchange.untouched and not exchange.abandoned:
                self._free.append(slot)
                del self.exchanges[exchange.lease.call]
                self._host.over(exchange)
                self.refuse(exchange, reason)
            else:
                self.on_done(slot, exchange, 0.0, 0, False, False)
                name = f"{self._worker.spec.name}.{self._worker.spec.namespace}"
                exchange.fail(WorkerCrashed(f"{name} gave no answer: {reason}{self._worker.output.tail()}"))

        self._worker.timers.later(timer, self._worker.run.death_known_s, fail)

    def refuse(self, exchange: Exchange, reason: str) -> None:
        """Nothing of the call was taken: the scheduler, and then the gateway, place it again."""
        lease = exchange.lease
        self._host.report(NodeRefused(lease.call, lease.device, reason))
        exchange.fail(LeaseRefused(f"{lease.device} could not give call {lease.call} to its worker: {reason}"))

    def ran_out(self, said: bytes) -> OutOfMemory:
        """A call hit the limit, as its exception *said*: what it had, what there is, what to do."""
        worker, spec = self._worker, self._worker.spec
        ledger = worker.device.ledger
        return OutOfMemory(
            f"{spec.name}.{spec.namespace} ran out of memory ({said[:_SAID].decode(errors='replace')}): it may use "
            f"{format_bytes(worker.memory)} on {worker.device.id}, which has {format_bytes(ledger.capacity)}, of that "
            f"{format_bytes(ledger.free)} free. Send less at once, or deploy it with a larger gpufaas.memory (it was "
            f"deployed with {format_bytes(spec.memory)})"
        )

    def conclude(self, error: GpufaasError, *, again: bool, was_ready: bool, ended: bool) -> list[Exchange]:
        """
        The worker is gone: *error* answers its calls. Return those that are to be placed again, and refuse them then.

        :param again: it is no fault of theirs, nor of their function: all of them
        :param was_ready: what it has not touched can be placed again
        :param ended: it was told to end: the engine knows, unless calls were on it as their function was taken away
        """
        exchanges, self.exchanges = self.exchanges, {}
        self.unbound.clear()
        refused: list[Exchange] = []
        for exchange in exchanges.values():
            untouched = exchange.untouched
            self._host.over(exchange)
            if not exchange.abandoned and ((untouched and was_ready) or again):
                refused.append(exchange)
            else:
                exchange.fail(error)
        if ended:
            for call in exchanges:
                self._host.report(Finished(call, self._worker.device.id, 0.0, ok=False))
        return refused
