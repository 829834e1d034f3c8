"""
A worker takes the place of another one of its copy: it was loaded with a share of the compute that the other one cannot
change to while it lives.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpufaas_core.messages import ShareKept
from gpufaas_core.model import CopyId
from gpufaas_gpu_manager.ledger import MemoryLedger
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_state import WorkerState


@dataclass(eq=False)
class Successions:
    """See module: those on one device."""

    workers: dict[CopyId, Worker]
    """The current worker of each copy there."""
    waiting: deque[Worker]
    """Its workers that wait for memory."""
    ledger: MemoryLedger
    admit: Callable[[], None]
    """Lets workers that wait go on, as far as there is memory."""
    replaced: list[Worker] = field(default_factory=list)
    """The workers whose place was taken, and whose last calls still run."""
    standbys: dict[CopyId, Worker] = field(default_factory=dict)
    """The workers that load in order to take the place of the worker of their copy."""

    def replace(self, old: Worker, new: Worker) -> None:
        """
        *new* takes the place of *old*, the worker of the same copy: when it is ready, if there is memory for both; else
        at once, so that its calls wait until *old* has ended and it is loaded.
        """
        self.end_standby(old.key)
        if old.state is WorkerState.READY and self.ledger.reserve(new.number, new.memory):
            new.standby = True
            self.standbys[new.key] = new
            new.begin()
        else:
            self._take_place(new)
            self.waiting.append(new)
            self.admit()

    def switch_to(self, worker: Worker) -> None:
        """*worker*, a standby, is ready: it takes the place of the worker of its copy."""
        if self.standbys.pop(worker.key, None) is worker:
            worker.standby = False
            self._take_place(worker)

    def end_replaced(self, worker: Worker) -> None:
        """End *worker*, whose place another one has, if its last call is over."""
        if not worker.calls.exchanges and not worker.ends:
            if worker in self.waiting:
                self.waiting.remove(worker)
            worker.end()

    def end_standby(self, key: CopyId) -> None:
        standby = self.standbys.pop(key, None)
        if standby is not None:
            standby.end()

    def leave(self, worker: Worker, reason: str) -> None:
        """*worker* is reaped, unasked for *reason*. The copy of one that was a standby keeps its share."""
        if self.standbys.get(worker.key) is worker:
            del self.standbys[worker.key]
            if reason and (stays := self.workers.get(worker.key)) is not None:
                kept = ShareKept(worker.spec.function, worker.device.id, worker.copy, stays.share, reason)
                worker.host.report(kept)
        if worker in self.replaced:
            self.replaced.remove(worker)

    def all(self) -> list[Worker]:
        return [*self.standbys.values(), *self.replaced]

    def has_place_of(self, old: Worker) -> None:
        """Another worker has the place of *old* from now on."""
        if old.calls.watch.silent:
            old.calls.watch.say(False)  # its copy is in another process
        old.replaced = True
        self.replaced.append(old)

    def _take_place(self, new: Worker) -> None:
        old = self.workers[new.key]
        self.workers[new.key] = new
        new.used_at = old.used_at
        self.has_place_of(old)
        old.calls.hand_over(new.calls)
        new.calls.bind_waiting()
        self.end_replaced(old)
