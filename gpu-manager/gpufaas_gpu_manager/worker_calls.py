"""
The calls of one worker, from the opening of their grants to their ends.

Those that no slot has are in `waiting_room`, those that a slot has behind what its worker runs in `calls_ahead`.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Final, cast

from gpufaas_core.errors import GrantRefused
from gpufaas_core.messages import Finished, NodeRefused
from gpufaas_core.model import Bytes, CallId, Seconds
from gpufaas_core.steps import Step
from gpufaas_gpu_manager.call_watch import CallWatch
from gpufaas_gpu_manager.calls_ahead import CallsAhead
from gpufaas_gpu_manager.calls_ports import CallsHost, CallsWorker
from gpufaas_gpu_manager.exchange import Exchange, Slot
from gpufaas_gpu_manager.measured_memory import MeasuredMemory
from gpufaas_gpu_manager.node_call import BIND, END
from gpufaas_gpu_manager.taking_back import TakingBack
from gpufaas_gpu_manager.waiting_room import Group, WaitingRoom
from gpufaas_gpu_manager.worker_slot import WorkerSlot
from gpufaas_gpu_manager.worker_wire import WorkerWire

_MODEL_BUFFER: Final[Bytes] = 8 * 1024 * 1024
"""Bytes of an answer that a node holds for a slow reader before the model has to wait."""
_STREAM_BUFFER: Final[Bytes] = 256 * 1024
"""As many bytes of CPU functions, which hold no device and so may wait."""


class WorkerCalls:
    """See module. It is the `CallOwner` of its exchanges and slots."""

    def __init__(self, worker: CallsWorker, host: CallsHost) -> None:
        self.worker = worker
        self.caller_first = not worker.spec.need.compute
        """Its calls hold no device that others wait for: the caller gets an answer before the engine learns of it."""
        self.exchanges: dict[CallId, Exchange] = {}
        """The calls that have a grant on the worker and are not over."""
        self.free: list[Slot] = []
        """The slots that have no call. The last one gets the next."""
        self.waiting = WaitingRoom(worker.timers, self._come_together)
        self.back = TakingBack(worker.timers, self.waiting, self._place_again)
        self.watch = CallWatch(worker, host, self, self.back)
        self.ahead = CallsAhead(worker.timers, self.waiting, self.back, self.watch, self._begin)
        self.memory = MeasuredMemory(worker, host)
        self.others_until: Seconds = 0.0
        """When a call ended last while others were there."""
        self.host = host
        self._buffer = _MODEL_BUFFER if worker.spec.need.compute else _STREAM_BUFFER

    def on_slots(self, slots: Sequence[Slot], wire: WorkerWire | None = None) -> None:
        """Use *slots* for calls, once the worker is ready. :param wire: that `WorkerSlot`s share"""
        self.free = list(slots[::-1])  # slot 0, the main thread, is taken first
        own = [each for each in slots if isinstance(each, WorkerSlot)]
        self.back.slots, self.back.wire = own, wire
        self.ahead.slot = own[0] if len(own) == 1 else None

    # --- what the node tells ---

    def come(self, exchange: Exchange) -> None:
        """A call has come: it begins now, or waits."""
        worker, grant = self.worker, exchange.grant
        if grant.number < 0 and worker.device.defer(exchange):
            return
        if len(grant.calls) > 1:
            self.waiting.come(exchange)
        elif worker.takes_calls:
            self.bind(exchange)
        else:
            self.waiting.line.append([exchange])
            if worker.serves:
                worker.device.admit()

    def bind(self, exchange: Exchange) -> None:
        """Give the call to a free slot; the engine makes no more grants than there are slots."""
        if self.free:
            if not self.watch.looks:
                self.watch.begin()
            exchange.bind(self.free.pop(), time.monotonic(), self._buffer)
            return
        self.waiting.line.append([exchange])
        if exchange.grant.ahead_s:
            self.ahead.wait(exchange)

    def bind_waiting(self) -> None:
        """Give what waits to the slots that are free."""
        while self.waiting.line and self.free:
            if not self.watch.looks:
                self.watch.begin()
            self._begin(self.free.pop(), self.waiting.line.popleft(), time.monotonic(), BIND)

    def _begin(self, slot: Slot, group: Group, now: Seconds, step: Step[int]) -> None:
        if len(group) > 1:
            cast(WorkerSlot, slot).begin_batch(len(group))
        for each in group:
            each.bind(slot, now, self._buffer, step)

    def _come_together(self, group: Group) -> None:
        """The calls of a batch are there: give them to a slot, or let them wait for one."""
        self.waiting.line.extend([group] if self.worker.spec.need.batch_max > 1 else [[each] for each in group])
        if not self.worker.takes_calls:
            self.worker.device.admit()
            return
        self.bind_waiting()
        if group[0].grant.ahead_s and self.waiting.line:
            self.ahead.wait(group[0])
        else:
            self.ahead.send()

    def cancel(self, exchange: Exchange) -> None:
        """Nobody waits for *exchange*, which a slot has, or the policy has stopped it."""
        if exchange.ahead:
            self.ahead.left()
        elif exchange.slot is not None:
            exchange.slot.cancel(exchange)
            self.watch.begin()

    def take_back(self, exchange: Exchange, reason: str) -> None:
        """Take a call back, with its batch, unless its worker has begun it."""
        self.back.take_back(exchange, reason)

    def leave(self, exchange: Exchange) -> None:
        """End an exchange that no slot has. The worker may go on loading, for the next call."""
        self.waiting.leave(exchange)
        self.close(exchange)

    def hand_over(self, to: "WorkerCalls") -> None:
        """The calls that no slot has are *to*'s from now on."""
        for each in self.waiting:
            to.exchanges[each.grant.call] = self.exchanges.pop(each.grant.call)
            each.owner = to
        self.waiting.hand_over(to.waiting)

    def hand_all_over(self, to: "WorkerCalls") -> None:
        """All calls are *to*'s from now on: none of them has a slot, and some have not come yet."""
        self.hand_over(to)
        to.exchanges.update(self.exchanges)
        for each in self.exchanges.values():
            each.owner = to
        self.exchanges.clear()
        self.waiting.hand_all_over(to.waiting)

    # --- what its slots tell ---

    def on_done(
        self, slot: Slot, exchange: Exchange, run_s: Seconds, peak: Bytes, out_of_memory: bool, ok: bool,
        free: bool = True,
    ) -> None:  # fmt: skip
        """A call has ended. :param free: *slot* has no other one"""
        worker, memory, grant = self.worker, self.memory, exchange.grant
        self.watch.answered = True
        if free:
            self.free.append(slot)
        self.close(exchange)
        worker.outgrown = out_of_memory
        memory.served = True
        if peak or out_of_memory or not memory.done:
            memory.learn(grant, peak, out_of_memory)
        if self.exchanges:
            self.others_until = time.monotonic()
        if exchange.stopped:
            self.refuse(exchange, exchange.stopped, blameless=True)
        elif not (exchange.kept and ok and not exchange.once and not exchange.abandoned):
            ok = ok and not exchange.abandoned
            self.host.report(Finished(grant.calls[0], worker.device.id, run_s, ok, exchange.further))
            exchange.kept = 0
        if self.waiting.line and self.free and worker.takes_calls:
            self._begin(self.free.pop(), self.waiting.line.popleft(), time.monotonic(), BIND)

    def on_follows(self, exchanges: list[Exchange]) -> None:
        """What went ahead begins now."""
        now = time.monotonic()
        for each in exchanges:
            each.follow(now)
        if not self.watch.looks:
            self.watch.begin()

    # --- the ends of calls ---

    def close(self, exchange: Exchange) -> None:
        """*exchange* has no worker any more."""
        self.exchanges.pop(exchange.grant.calls[0], None)
        exchange.state = END[exchange.state]
        self.host.over(exchange)
        worker = self.worker
        if worker.replaced or worker.device.unled:
            worker.device.call_over()

    def refuse(self, exchange: Exchange, reason: str, *, blameless: bool = False) -> None:
        """Have the call, of which the worker took nothing, placed again. :param blameless: see `NodeRefused`"""
        grant = exchange.grant
        self.host.report(NodeRefused.of(grant, reason, blameless=blameless))
        exchange.fail(GrantRefused(f"{grant.device} could not give call {grant.call} to its worker: {reason}"))

    def _place_again(self, exchanges: Group, reason: str, slot: WorkerSlot | None) -> None:
        """*exchanges* were not begun, and are placed again. :param slot: it has them no more"""
        if slot is not None and not slot.turns.busy:
            self.free.append(slot)
        for exchange in exchanges:
            if exchange.finished:
                continue  # its worker says that it was dropped, and has answered it
            exchange.slot = None
            self.close(exchange)
            if exchange.abandoned and not exchange.stopped:
                self.host.report(Finished(exchange.grant.call, exchange.grant.device, 0.0, ok=False))
            else:
                self.refuse(exchange, exchange.stopped or reason, blameless=True)
        if slot is not None and self.worker.takes_calls:
            self.bind_waiting()

    def bound(self) -> Iterator[Exchange]:
        """Return the calls that slots have, but for what went ahead."""
        return (each for each in self.exchanges.values() if each.slot is not None and not each.ahead)
