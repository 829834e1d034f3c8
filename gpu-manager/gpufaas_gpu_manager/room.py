"""A device of a node: the workers in its memory, and those that wait for memory."""

import asyncio
import time
from collections import deque
from typing import Final

from gpufaas_core.messages import Parked, Unparked
from gpufaas_core.model import Bytes, CopyId
from gpufaas_core.units import format_bytes
from gpufaas_core.wire.bodies import STREAM, UPGRADE
from gpufaas_gpu_manager.devices import NodeDevice
from gpufaas_gpu_manager.exchange import CallOwner, Exchange
from gpufaas_gpu_manager.ledger import MemoryLedger
from gpufaas_gpu_manager.node_call import LEAVE, QUEUE
from gpufaas_gpu_manager.parked import ParkedWorkers
from gpufaas_gpu_manager.successions import Successions
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_state import WorkerState

_SETTLE_S: Final = 2.0
"""How long a GPU driver may take to free the memory of a dead process; then the node counts it as free."""


class WorkerDevice:
    """See module. `DevicePort` of its workers."""

    def __init__(self, source: NodeDevice, parks: ParkedWorkers) -> None:
        self._parks = parks
        self.lost = False
        self.source = source
        self.id = source.device.id
        self.ledger = MemoryLedger(source.device.memory)
        self.workers: dict[CopyId, Worker] = {}
        """The current worker of each copy; a worker that ends is in the ledger only."""
        self.parked: dict[CopyId, Worker] = {}
        """Workers that are parked, or being parked, in that order, without those that a start waits for."""
        self.waiting: deque[Worker] = deque()
        self.successions = Successions(self.workers, self.waiting, self.ledger, self.admit)
        self.unled: deque[Exchange] = deque()
        """Calls that no scheduler ordered, and that wait for compute, in the order in which they came."""
        self._settling = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def defer(self, exchange: Exchange) -> bool:
        if self._has_compute_for(exchange.owner):
            return False
        assert exchange.head is not None
        if exchange.head.body_mode not in (STREAM, UPGRADE):  # pieces of these may come at once
            exchange.step(QUEUE)
        self.unled.append(exchange)
        return True

    def call_over(self) -> None:
        """A call is over: its worker may end if it was replaced, and calls may begin that no scheduler ordered."""
        for worker in [*self.successions.replaced]:
            self.successions.end_replaced(worker)
        while self.unled:
            following = self.unled[0]
            owner = following.owner
            waits = not following.finished and owner.worker.serves
            if waits and not self._has_compute_for(owner):
                break
            self.unled.popleft()
            if waits:
                following.step(LEAVE)
                owner.bind(following)

    def _has_compute_for(self, calls: CallOwner) -> bool:
        """Whether a call that no scheduler ordered may begin: a slot of its worker, and the compute, are free."""
        need = calls.worker.spec.need
        if not need.reserved:
            return True
        if not calls.free:
            return False
        if need.sharing != "spatial" and compute_of(calls):
            return True  # the compute that one of its calls holds is for all of them
        used = sum(compute_of(each.calls) for each in self.workers.values())
        return used + need.reserved <= self.source.device.compute

    def add(self, worker: Worker) -> None:
        """Start *worker* when there is room for it."""
        self.workers[worker.key] = worker
        self.waiting.append(worker)
        self.admit()

    def end(self, key: CopyId, *, park: bool = False) -> None:
        """Evict a copy. :param park: its worker is parked, if that is possible"""
        self.successions.end_standby(key)
        worker = self.workers.pop(key, None)
        if worker is None:
            parked = None if park else self.parked.pop(key, None)
            if parked is not None:
                parked.end()
                # The scheduler may have evicted it before it heard that it is parked: then it counts it as parked now.
                _tell_unparked(parked, "it was evicted")
            return
        reason = self._parks.take(worker) if park else ""
        if park and not reason:
            self.parked[key] = worker
            worker.parking.park()
            return
        worker.end()
        if park:
            _tell_unparked(worker, reason)

    # --- parked workers ---

    def wake(self, key: CopyId, memory: Bytes) -> Worker | None:
        """A start wants the copy *key*: its parked worker wakes when there is room. None: it is not parked here."""
        worker = self.parked.pop(key, None)
        if worker is not None:
            worker.memory = worker.wanted = memory
            worker.load.asked_at = worker.used_at = time.monotonic()
            worker.told, worker.outgrown = not worker.spec.elastic, False
        return worker

    def wakes(self, worker: Worker) -> bool:
        return self.workers.get(worker.key) is worker

    def on_parked(self, worker: Worker, held: Bytes) -> None:
        self._parks.settled(worker)
        if held:
            self.ledger.resize(worker.number, min(held, self.ledger.reserved.get(worker.number, 0)))
        else:
            self.ledger.release(worker.number)
        held = self.ledger.reserved.get(worker.number, 0)
        worker.host.report(Parked(worker.spec.function, self.id, worker.copy, held))
        self.admit()

    def not_parked(self, worker: Worker, reason: str) -> None:
        if self.wakes(worker):
            if worker.host.load_instead(worker, reason):
                worker.kill(reason)
            return
        if self.parked.get(worker.key) is worker:
            del self.parked[worker.key]
            _tell_unparked(worker, reason)
        if not worker.ends and not worker.reaped:
            worker.end()

    def load_instead(self, old: Worker, new: Worker) -> None:
        """*new* is loaded in the place of *old*, which was to wake, once that is gone."""
        self.workers[new.key] = new
        new.used_at, new.load.asked_at = old.used_at, old.load.asked_at
        self.successions.has_place_of(old)
        old.calls.hand_all_over(new.calls)
        if old in self.waiting:
            self.waiting.remove(old)
        self.waiting.appendleft(new)

    def admit(self) -> None:
        """Start waiting workers in order, as far as the memory goes: a later, smaller one does not overtake."""
        for resident in self.workers.values():
            if resident.wanted > resident.memory and self.ledger.resize(resident.number, resident.wanted):
                resident.limit_to(resident.wanted)
            ready = resident.state is WorkerState.READY and resident.told
            if ready and resident.calls.waiting.line and not self._is_to_grow(resident):
                resident.outgrown = False
                resident.calls.bind_waiting()
        while self.waiting and not self._settling:
            worker = self.waiting[0]
            if worker.state is WorkerState.PARKING:
                return  # it wakes once it is parked
            if worker.state in (WorkerState.WAITING, WorkerState.PARKED):
                if not self.ledger.reserve(worker.number, worker.memory):
                    if worker.memory > self.ledger.capacity or not self.ledger.reserved:
                        self.waiting.popleft()
                        worker.fail_unstarted(
                            f"it needs {format_bytes(worker.memory)} but {self.id} has "
                            f"{format_bytes(self.ledger.capacity)}"
                        )
                        continue
                    self._end_hoarders()
                    return
                self._parks.let_go(worker)
                worker.begin()
            self.waiting.popleft()

    def resize(self, worker: Worker, memory: Bytes) -> bool:
        """Change the reservation of *worker*, as `Node.resize`. Return whether it was asked to give memory back."""
        # Memory that it was promised and did not get yet is given back, too: the scheduler waits for an answer.
        less = memory < max(worker.memory, worker.wanted)
        worker.wanted = memory
        if worker.state is WorkerState.WAITING:
            worker.memory = memory
        elif memory < worker.memory and worker.number in self.ledger.reserved:
            _shrink(worker, memory)
            self.ledger.resize(worker.number, worker.memory)
            if worker.calls.exchanges:
                worker.wanted = worker.memory
        self.admit()
        worker.on_told()
        return less

    def switch_to(self, worker: Worker) -> None:
        self.successions.switch_to(worker)

    def leave(self, worker: Worker, reason: str = "") -> None:
        self._parks.let_go(worker)
        if self.parked.get(worker.key) is worker:
            del self.parked[worker.key]
        self.successions.leave(worker, reason)
        if self.workers.get(worker.key) is worker:
            del self.workers[worker.key]
            if self.source.emulation is not None:
                self.source.emulation.forget(worker.spec.function, worker.copy)
        if worker.pid is not None and not self.source.enforced and not worker.checks:
            self._settling += 1
            task = asyncio.get_running_loop().create_task(self._settle(worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self.ledger.release(worker.number)
            self.admit()

    def lose(self, reason: str) -> None:
        """The device cannot be used any more: end all workers."""
        self.lost = True
        waiting = [each for each in self.waiting if each.state is WorkerState.WAITING]
        self.waiting.clear()
        for worker in [*self.workers.values(), *self.successions.all(), *self.parked.values()]:
            why = f"its device {self.id} is gone: {reason}"
            if worker in waiting:
                worker.fail_unstarted(why)
            else:
                worker.kill(why)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _is_to_grow(self, worker: Worker) -> bool:
        """Whether it will get the memory that it waits for, since workers that have it are about to end."""
        if worker.takes_calls:
            return False
        self._end_hoarders()
        staying = {each.number for each in self.workers.values() if not each.ends}
        return bool(self.ledger.reserved.keys() - staying)

    def _end_hoarders(self) -> None:
        """End idle workers that were asked for memory and still use it: others wait for it."""
        for worker in self.workers.values():
            if worker.wanted < worker.memory and not worker.calls.exchanges and worker.state is WorkerState.READY:
                worker.wanted = worker.memory
                worker.kill(
                    f"it uses {format_bytes(worker.memory)} without a call, more than is reserved for it, and others "
                    "need that"
                )

    async def _settle(self, worker: Worker) -> None:
        """Release the memory when the driver has freed it, a little after the process is gone; `_SETTLE_S` at most."""
        assert worker.pid is not None
        until = time.monotonic() + _SETTLE_S
        # NVML has no event for this; it is not on the path of a warm call, and bounded.
        while time.monotonic() < until and self.source.used_bytes([worker.pid]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._settling -= 1
        self.ledger.release(worker.number)
        self.admit()


def compute_of(calls: CallOwner) -> int:
    """Return what a worker has of its device's compute now, in per cent: for good, and by the grants that run."""
    need = calls.worker.spec.need
    if not need.reserved:
        return need.held
    running = (each.grant for each in calls.exchanges.values() if each.slot is not None and not each.finished)
    grants = {each.call if each.number < 0 else each.number for each in running}  # no scheduler: all are -1
    return need.reserved * (len(grants) if need.sharing == "spatial" else bool(grants))


def _tell_unparked(worker: Worker, reason: str) -> None:
    worker.host.report(Unparked(worker.spec.function, worker.device.id, worker.copy, reason))


def _shrink(worker: Worker, memory: Bytes) -> None:
    """Limit *worker* to *memory*, or to what it uses: used memory cannot be taken from it."""
    before = worker.memory
    worker.limit_to(min(before, max(memory, worker.run.in_use())))
    if (used := worker.run.in_use()) > worker.memory:  # it grew before the limit held
        worker.limit_to(min(before, used))
