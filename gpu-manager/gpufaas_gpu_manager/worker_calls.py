"""The calls of one worker: those that wait for a slot, those that run, and what happens when it or a slot fails."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final, Protocol, cast

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GrantRefused, OutOfMemory, WorkerCrashed
from gpufaas_core.messages import CopySilent, Event, Finished, Measured, NodeRefused
from gpufaas_core.model import Bytes, CallId, DeviceId, Seconds
from gpufaas_core.units import format_bytes
from gpufaas_functions.begun import GRACE_S
from gpufaas_gpu_manager.batches import Batches
from gpufaas_gpu_manager.call_watch import CallWatch, WatchedWorker
from gpufaas_gpu_manager.devices import NodeDevice
from gpufaas_gpu_manager.exchange import MODEL_BUFFER, STREAM_BUFFER, AheadSlot, Exchange, Slot
from gpufaas_gpu_manager.ledger import MemoryLedger
from gpufaas_gpu_manager.output import Output
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.worker_end import WorkerEnd

_LOOK_S: Final[Seconds] = 0.05
"""So often at most, it is looked whether what runs before a call that went ahead is late."""
_SAID: Final[Bytes] = 2000
"""Bytes of an exception's text in an error."""


class Running(Protocol):
    """
    How one worker runs: a process forked from the zygote, a program, a container.

    It calls its worker: `on_started` when there is a process; `on_slots`, then `on_ready`; `on_failed` with the reason
    of a failure; `on_reaped` once, when nothing of it is left. After `start`, unless that raised, `on_reaped` always
    comes.
    """

    waits_for: str
    """What the error says that a stuck load has not done: ``to listen on port 8080``. Empty: nothing."""

    death_known_s: Seconds
    """
    How long it may take until its end is known here. A broken connection mostly means that the worker died: the error
    for the caller waits so long for the reason.
    """

    async def start(self) -> None:
        """:raises GpufaasError, OSError: nothing was started"""

    def end(self) -> None:
        """End it in an orderly way: it was evicted, and runs no call."""

    def kill(self) -> None:
        """End it and all that it started, at once. May be called repeatedly, and before there is a process."""

    def said_all(self) -> bool:
        """Whether all output of a worker that is gone was read."""

    def hear_out(self) -> bool:
        """
        It is gone: read all that it has sent, at any pace of its callers. What waits in the kernel is a few MB.

        :return: whether some of it still waits
        """

    def limit_to(self, memory: Bytes) -> None: ...

    def in_use(self) -> Bytes:
        """Return the memory that counts against its limit now, in bytes; 0: unknown."""
        return 0

    def close(self) -> None:
        """Release what this side holds; the worker is gone, or the node closes."""


class DevicePort(Protocol):
    """The device of a worker."""

    source: NodeDevice
    id: DeviceId
    ledger: MemoryLedger

    def admit(self) -> None:
        """Let its workers that wait for memory go on, as far as there is some."""


class CallsHost(Protocol):
    """The node, as the calls of its workers use it."""

    settings: NodeSettings
    report: Callable[[Event], None]
    """Sends a fact to the scheduler."""

    measured: dict[tuple[str, str], Bytes]
    """The peak memory of workers by what their costs are kept under, and by the kind of their device."""

    over: Callable[[Exchange], None]
    """Called with an exchange that has no worker any more."""


class CallsWorker(WatchedWorker, Protocol):
    """A worker, as its calls use it."""

    spec: WorkerSpec
    copy: int
    memory: Bytes
    uncounted: Bytes
    outgrown: bool
    run: Running
    output: Output

    @property
    def device(self) -> DevicePort: ...

    @property
    def takes_calls(self) -> bool: ...

    replaced: bool

    def ask_driver(self, held: Bytes, *, ran_out: bool = False) -> Bytes: ...


class WorkerCalls:
    """See module."""

    def __init__(self, worker: CallsWorker, host: CallsHost) -> None:
        self.exchanges: dict[CallId, Exchange] = {}
        """The calls that have a grant on the worker and are not over."""
        self.unbound: deque[Exchange] = deque()
        """The calls among them that wait until the worker is ready, or a slot is free."""
        self.stopped: dict[Exchange, str] = {}
        """The calls that the policy has stopped, and why; they run again elsewhere once their worker has let go."""
        self.batches = Batches(worker.timers, self._begin_together)
        self.watch = CallWatch(worker, self, host.settings.abort_grace_s)
        self._worker = worker
        self._host = host
        self._free: list[Slot] = []
        self._open: dict[Slot, int] = {}
        """How many calls of its batch have not ended, for each slot that runs one."""
        self._only: AheadSlot | None = None
        """Its slot, if there is one only: a call or batch may go ahead to it."""
        self._first: AheadSlot | None = None
        """One of its slots, if they are `AheadSlot`s: what its worker has not begun can be taken back."""
        self._ahead: list[Exchange] = []
        """The call or batch that went ahead: the worker begins it when the one before has ended."""
        self._ahead_until = 0.0
        """When it is given back, if the one before has not ended."""
        self._look_at = inf
        """When a timer looks at that."""
        self._why = ""
        """Why calls are taken back."""
        self._measured = worker.spec.kind == "server" or bool(worker.spec.image)
        """Its memory was measured, or never is by itself."""
        self._served = False
        """A call has ended."""
        self._others_until = 0.0
        """When a call ended last while others were there."""
        self._ran_out = 0
        """The number of the grant whose call ran out of memory last."""
        self._buffer = MODEL_BUFFER if worker.spec.need.compute else STREAM_BUFFER

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    @property
    def compute(self) -> int:
        """What its worker has of the device's compute now, in per cent: for good, and by the grants that run."""
        need = self._worker.spec.need
        if not need.reserved:
            return need.held
        running = (each.grant for each in self.exchanges.values() if each.slot is not None and not each.finished)
        grants = {each.call if each.number < 0 else each.number for each in running}  # no scheduler: all are -1
        return need.reserved * (len(grants) if need.sharing == "spatial" else bool(grants))

    def on_slots(self, slots: Sequence[Slot], *, ahead: bool = False) -> None:
        """Use *slots* for calls, once the worker is ready. :param ahead: they are `AheadSlot`s"""
        self._free = list(slots[::-1])  # slot 0, the main thread, is taken first
        self._first = cast(AheadSlot, slots[0]) if ahead else None
        self._only = self._first if len(slots) == 1 else None

    def bind(self, exchange: Exchange) -> None:
        """Give the call to a free slot; the engine makes no more grants than there are slots."""
        if not self._free:
            self.unbound.append(exchange)
            if exchange.grant.ahead_s:
                self._wait_ahead(exchange)
            return
        slot, now = self._free.pop(), time.monotonic()
        if not self.watch.looks:
            self.watch.begin()
        exchanges = self.batches.take(exchange)
        if exchanges is None:
            exchange.bind(slot, now, self._buffer)
            return
        self._open[slot] = len(exchanges)
        self._begin_batch(slot, exchanges)
        for each in exchanges:
            each.bind(slot, now, self._buffer)

    def _begin_batch(self, slot: Slot, exchanges: list[Exchange]) -> None:
        cast(AheadSlot, slot).begin_batch(len(exchanges))
        for each in exchanges:
            with contextlib.suppress(ValueError):
                self.unbound.remove(each)

    def _send_ahead(self) -> None:
        """Send what waits for the slot to the worker, which begins it as soon as the slot is free."""
        slot, now = self._only, time.monotonic()
        if slot is None or slot.marked or self._free or self._ahead or not self.unbound:
            return
        first = self.unbound[0]
        batch = self.batches.take(first)
        if batch is not None:
            self._ahead = batch
            self._begin_batch(slot, batch)
        elif first.grant.ahead_s and not self.watch.pings and slot.can_wait(first):
            self._ahead = [self.unbound.popleft()]
        for each in self._ahead:
            each.send_ahead(slot, now, self._buffer)

    def _wait_ahead(self, exchange: Exchange) -> None:
        """*exchange* begins after what runs, and is given back if that does not end in time."""
        ahead_s = exchange.grant.ahead_s
        self._ahead_until = until = time.monotonic() + ahead_s
        self._send_ahead()
        if until < self._look_at:  # nearly always there is a timer from calls before
            self._look_later(until)

    def _look_later(self, until: Seconds) -> None:
        """Look when *until* is over, together with other workers: each look wakes the process."""
        now = time.monotonic()
        self._look_at = at = (until // _LOOK_S + 1.0) * _LOOK_S
        self._worker.timers.later("ahead", at - now, self._look_ahead)

    def _look_ahead(self) -> None:
        left_s = self._ahead_until - time.monotonic()
        first = self._ahead[0] if self._ahead else next((each for each in self.unbound if each.grant.ahead_s), None)
        self._look_at = inf
        if first is not None and left_s > 0.0:
            self._look_later(self._ahead_until)
        elif first is not None:
            self.give_back(first, "the call before it takes longer than expected")

    def give_back(self, exchange: Exchange, reason: str) -> None:
        """Have a call that went ahead placed again, and its batch, unless its worker has begun it."""
        if exchange in self._ahead:
            self._mark(exchange.slot, reason)
        elif exchange in self.unbound:
            back = self.batches.take(exchange) or [exchange]
            for each in back:
                self.unbound.remove(each)
            self._end_unbegun(back, reason)

    def _mark(self, slot: Slot | None, reason: str, *, all_of_it: bool = False) -> None:
        """Have placed again what waits at *slot*, unless the worker has begun it. :param all_of_it: see `mark` there"""
        if cast(AheadSlot, slot).mark(all_of_it=all_of_it):
            self._why = reason
            self._worker.timers.later("taken", GRACE_S, self._end_taken)

    def _end_taken(self) -> None:
        """What slots were told to drop, and the worker has certainly not begun, is placed again."""
        for slot in dict.fromkeys(cast(AheadSlot, each.slot) for each in self.bound()):
            back = slot.take_back()
            if any(each in self._ahead for each in back):
                self._ahead = []
            if back and not slot.busy:
                self._open.pop(slot, None)
                self._free.append(slot)
            self._end_unbegun(back, self._why)

    @property
    def unbegun(self) -> bool:
        """Whether its worker has not begun all that it was given to run now."""
        return self._first is not None and any(cast(AheadSlot, each.slot).unbegun for each in self.bound())

    def ping(self) -> bool:
        """Ask its worker for a sign of life. False: it gives none when it is asked."""
        if self._first is not None:
            self._first.ping()
        return self._first is not None

    def take_all_back(self) -> None:
        """Its worker is silent: have placed again what that has not begun."""
        reason = "its worker gives no sign of life"
        for each in list(self.unbound):
            self.give_back(each, reason)  # with its batch
        if self._first is not None:
            for each in self.bound():
                self._mark(each.slot, reason, all_of_it=True)

    def say_silent(self, silent: bool) -> None:
        """Tell the scheduler that its worker gives no sign of life, or does again."""
        worker = self._worker
        if not worker.replaced:
            self._host.report(CopySilent(worker.spec.function, worker.device.id, worker.copy, silent))
        if worker.takes_calls:
            self.bind_waiting()

    def on_dropped(self, slot: Slot, taken: list[Exchange]) -> None:
        """The worker has dropped *taken*, which was being taken back, and came next."""
        self._open.pop(slot, None)
        self._follow(slot)
        self._end_unbegun(taken, self._why)
        if self._worker.takes_calls:
            self.bind_waiting()

    def _end_unbegun(self, exchanges: list[Exchange], reason: str) -> None:
        """*exchanges* were not begun, and their slot has them no more."""
        for exchange in exchanges:
            if exchange.finished:
                continue  # its worker says that it was dropped, and has answered it
            exchange.slot = None
            call, why = exchange.grant.call, self.stopped.pop(exchange, None)
            self.exchanges.pop(call, None)
            self._host.over(exchange)
            if exchange.abandoned and why is None:
                self._host.report(Finished(call, exchange.grant.device, 0.0, ok=False))
            else:
                self.refuse(exchange, why or reason, blameless=True)

    def cancel(self, exchange: Exchange) -> None:
        """Nobody waits for *exchange*, which a slot has, or the policy has stopped it."""
        if exchange not in self._ahead:
            cast(Slot, exchange.slot).cancel(exchange)
            self.watch.begin()
        elif all(each.abandoned for each in self._ahead):
            self._mark(exchange.slot, "its caller is gone")

    def _follow(self, slot: Slot) -> None:
        """What *slot* had is over: what went ahead begins, or the slot is free."""
        following, self._ahead = self._ahead, []
        if not following:
            self._free.append(slot)
            return
        now = time.monotonic()
        if len(following) > 1:
            self._open[slot] = len(following)
        for each in following:
            each.follow(now)
        if not self.watch.looks:
            self.watch.begin()

    def _begin_together(self, exchanges: list[Exchange]) -> None:
        """The calls of a batch are there: give them to a slot, or let them wait for one."""
        if self._worker.spec.need.batch_max > 1:
            self.batches.wait(exchanges)
        self.unbound.extend(exchanges)
        if self._worker.takes_calls:
            self.bind_waiting()
            if exchanges[0].grant.ahead_s and self.unbound:
                self._wait_ahead(exchanges[0])
            else:
                self._send_ahead()
        else:
            self._worker.device.admit()

    def bind_waiting(self) -> None:
        while self.unbound and self._free:
            self.bind(self.unbound.popleft())

    def hand_over(self, to: "WorkerCalls") -> None:
        """The calls that no slot has are *to*'s from now on."""
        for exchange in self.unbound:
            del self.exchanges[exchange.grant.call]
            to.exchanges[exchange.grant.call] = exchange
        to.unbound.extend(self.unbound)
        self.unbound.clear()
        self.batches.hand_over(to.batches)

    def hand_all_over(self, to: "WorkerCalls") -> None:
        """All calls are *to*'s from now on: none of them has a slot, and some have not come yet."""
        self.hand_over(to)
        to.exchanges.update(self.exchanges)
        self.exchanges.clear()
        self.batches.hand_all_over(to.batches)

    def on_done(self, slot: Slot, exchange: Exchange, run_s: float, peak: int, out_of_memory: bool, ok: bool) -> None:
        worker, host = self._worker, self._host
        self.watch.answered = True
        open_calls = self._open.pop(slot, 1) - 1
        if open_calls:
            self._open[slot] = open_calls
        else:
            self._follow(slot)
        grant = exchange.grant
        call = grant.calls[0]
        self.exchanges.pop(call, None)
        host.over(exchange)
        worker.outgrown = out_of_memory
        self._served = True
        if peak or (out_of_memory and grant.number != self._ran_out):  # of a batch, that is said once
            if out_of_memory and grant.number > 0:
                self._ran_out = grant.number
            if peak:
                worker.ask_driver(peak, ran_out=True)
            self.on_measured(peak, out_of_memory)
        elif not self._measured and worker.device.source.enforced and (known := self.known):
            self.on_measured(known)  # it measures itself only beyond that
        if self.exchanges:
            self._others_until = time.monotonic()
        if self.stopped and (why := self.stopped.pop(exchange, None)) is not None:
            self.refuse(exchange, why, blameless=True)
        elif not (exchange.kept and ok and not exchange.once and not exchange.abandoned):
            host.report(Finished(call, worker.device.id, run_s, ok and not exchange.abandoned, exchange.further))
            exchange.kept = 0
        if self.unbound and self._free and self._worker.takes_calls:
            self.bind(self.unbound.popleft())

    def on_measured(self, peak: Bytes, out_of_memory: bool = False) -> None:
        worker, host = self._worker, self._host
        self._measured = True
        if peak:
            peak += worker.uncounted
            host.measured[self._kind()] = max(peak, self.known)
        host.report(Measured(worker.spec.function, worker.device.id, peak, worker.copy, out_of_memory))

    @property
    def is_measured(self) -> bool:
        """Whether the need of its function is known here, or no measurement of it is under way."""
        return self._measured or not self._served or self.known > 0

    @property
    def known(self) -> Bytes:
        """The peak memory that workers of its function have had here; 0: none was measured."""
        return self._host.measured.get(self._kind(), 0)

    def _kind(self) -> tuple[str, str]:
        return self._worker.spec.profiled, self._worker.device.source.device.kind

    def bound(self) -> Iterator[Exchange]:
        """Return the calls that slots have, but for what went ahead."""
        return (each for each in self.exchanges.values() if each.slot is not None and each not in self._ahead)

    def on_call_lost(self, slot: Slot, exchange: Exchange, reason: str) -> None:
        """
        The connection of a call broke before its answer, or could not be made.

        If the worker lives on, a call that it has not touched is placed again, and another one fails with *reason*.
        """

        timer = f"call {exchange.grant.call}"

        def fail() -> None:
            self._worker.timers.cancel(timer)
            if self.exchanges.get(exchange.grant.call) is not exchange:
                return
            if exchange.untouched and not exchange.abandoned:
                self._free.append(slot)
                del self.exchanges[exchange.grant.call]
                self._host.over(exchange)
                self.refuse(exchange, reason)
            else:
                lines = self._last_lines(exchange, len(list(self.bound())))
                self.on_done(slot, exchange, 0.0, 0, False, False)
                name = f"{self._worker.spec.name}.{self._worker.spec.namespace}"
                exchange.fail(WorkerCrashed(f"{name} gave no answer: {reason}{lines}"))

        self._worker.timers.later(timer, self._worker.run.death_known_s, fail)

    def _last_lines(self, exchange: Exchange, running: int) -> str:
        """
        Return the last lines of the worker that the caller of *exchange* may see. Those of other calls are not for
        them, and a line that no call is known to have written may be of any that ran then.

        :param running: the number of calls that ran when the worker died
        """
        since = max(exchange.bound_at, self._others_until) if exchange.slot is not None and running == 1 else inf
        return self._worker.output.tail(exchange.name, since)

    def refuse(self, exchange: Exchange, reason: str, *, blameless: bool = False) -> None:
        """Have the call, of which the worker took nothing, placed again. :param blameless: see `NodeRefused`"""
        grant = exchange.grant
        self._host.report(NodeRefused.of(grant, reason, blameless=blameless))
        exchange.fail(GrantRefused(f"{grant.device} could not give call {grant.call} to its worker: {reason}"))

    def ran_out(self, said: bytes) -> OutOfMemory:
        """Return the error of a call that hit the memory limit; *said* is the text of its exception."""
        worker, spec = self._worker, self._worker.spec
        ledger = worker.device.ledger
        several = spec.need.batch_max > 1
        less = "Its batches are smaller for a while: call again, send less" if several else "Send less at once"
        return OutOfMemory(
            f"{spec.name}.{spec.namespace} ran out of memory ({said[:_SAID].decode(errors='replace')}): it may use "
            f"{format_bytes(worker.memory)} on {worker.device.id}, which has {format_bytes(ledger.capacity)}, of that "
            f"{format_bytes(ledger.free)} free. {less}, or deploy it with a larger gpufaas.memory (it was deployed "
            f"with {format_bytes(spec.memory)})"
        )

    def conclude(self, end: WorkerEnd, *, again: bool, was_ready: bool, ended: bool) -> list[Exchange]:
        """
        The worker is gone: fail its calls. Return the calls to `refuse`, which can be placed again.

        :param again: neither the calls nor their function are at fault: all can be placed again
        :param was_ready: calls that the worker has not touched can be placed again
        :param ended: the worker was told to end, so the engine expects no calls on it: report them as finished
        """
        running = len(list(self.bound()))
        exchanges, self.exchanges = self.exchanges, {}
        self._ahead = []
        self.unbound.clear()
        self.batches.clear()
        refused: list[Exchange] = []
        for exchange in exchanges.values():
            untouched = exchange.untouched
            self._host.over(exchange)
            stopped = self.stopped.pop(exchange, None) is not None
            if stopped or (not exchange.abandoned and ((untouched and was_ready) or again)):
                refused.append(exchange)
            else:
                said = self._worker.output.tail() if end.loading else self._last_lines(exchange, running)
                exchange.fail(end.error(said))
        if ended:
            for call in exchanges:
                self._host.report(Finished(call, self._worker.device.id, 0.0, ok=False))
        return refused
