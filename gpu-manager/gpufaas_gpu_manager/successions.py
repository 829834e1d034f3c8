"""
A worker takes the place of another one of its copy: it was loaded with a share of the compute that the other one cannot
change to while it lives.
"""

from collections import deque
from collections.abc import Callable

from gpufaas_core.model import CopyId
from gpufaas_gpu_manager.ledger import MemoryLedger
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_state import WorkerState


class Successions:
    """
    See module: those on one device.

    :param workers: the current worker of each copy there
    :param waiting: its workers that wait for memory
    :param admit: lets these go on, as far as there is some
    """

    def __init__(
        self, workers: dict[CopyId, Worker], waiting: deque[Worker], ledger: MemoryLedger, admit: Callable[[], None]
    ) -> None:
        self.replaced: list[Worker] = []
        """The workers whose place was taken, and whose last calls still run."""
        self._standbys: dict[CopyId, Worker] = {}
        """The workers that load in order to take the place of the worker of their copy."""
        self._workers = workers
        self._waiting = waiting
        self._ledger = ledger
        self._admit = admit

    def replace(self, old: Worker, new: Worker) -> None:
        """
        *new* takes the place of *old*, the worker of the same copy: when it is ready, if there is memory for both; else
        at once, so that its calls wait until *old* has ended and it is loaded.
        """
        self.end_standby(old.key)
        if old.state is WorkerState.READY and self._ledger.reserve(new.number, new.memory):
            new.standby = True
            self._standbys[new.key] = new
            new.begin()
        else:
            self._take_place(new)
            self._waiting.append(new)
            self._admit()

    def switch_to(self, worker: Worker) -> None:
        """*worker*, a standby, is ready: it takes the place of the worker of its copy."""
        if self._standbys.pop(worker.key, None) is worker:
            worker.standby = False
            self._take_place(worker)

    def kept_share(self, standby: Worker) -> int | None:
        """Return the share with which a copy goes on whose standby has failed; None: the worker is no such standby."""
        if self._standbys.get(standby.key) is not standby:
            return None
        worker = self._workers.get(standby.key)
        return None if worker is None else worker.share

    def end_replaced(self, worker: Worker) -> None:
        """End *worker*, whose place another one has, if its last call is over."""
        if not worker.calls.exchanges and not worker.ends:
            if worker in self._waiting:
                self._waiting.remove(worker)
            worker.end()

    def end_standby(self, key: CopyId) -> None:
        standby = self._standbys.pop(key, None)
        if standby is not None:
            standby.end()

    def leave(self, worker: Worker) -> None:
        """*worker* is reaped."""
        if self._standbys.get(worker.key) is worker:
            del self._standbys[worker.key]
        if worker in self.replaced:
            self.replaced.remove(worker)

    def all(self) -> list[Worker]:
        return [*self._standbys.values(), *self.replaced]

    def has_place_of(self, old: Worker) -> None:
        """Another worker has the place of *old* from now on."""
        if old.calls.watch.silent:
            old.calls.watch.say(False)  # its copy is in another process
        old.replaced = True
        self.replaced.append(old)

    def _take_place(self, new: Worker) -> None:
        old = self._workers[new.key]
        self._workers[new.key] = new
        new.used_at = old.used_at
        self.has_place_of(old)
        old.calls.hand_over(new.calls)
        new.calls.bind_waiting()
        self.end_replaced(old)
