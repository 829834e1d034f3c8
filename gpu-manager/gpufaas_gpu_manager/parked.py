"""
The parked workers of a node. What they hold of its memory beside the weights that the host tier has is charged to the
budget of the host tier. When weights need that, parked workers end first, the one that was parked first before others.
"""

import asyncio
import shutil
from typing import Final

from gpufaas_core.model import Bytes, FunctionId
from gpufaas_core.units import MiB, format_bytes
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.proc import parent_of, sizes_of
from gpufaas_gpu_manager.worker import Worker

CHECKPOINT: Final = "cuda-checkpoint"
_COPIED: Final[Bytes] = 16 * MiB
"""Pages of its fork server that a worker has written to, roughly."""


class ParkedWorkers:
    """
    See module. Used on the event loop.

    :param enabled: workers are parked at all
    """

    def __init__(self, cache: HostCache, enabled: bool) -> None:
        self.enabled = enabled and cache.status().budget > 0
        self.checkpoint = (shutil.which(CHECKPOINT) or "") if self.enabled else ""
        self.woken = self.failed = 0
        """Wakes, and those after which the copy was loaded anew."""
        self._room = cache.parked
        self._workers: dict[int, Worker] = {}
        """By number, the one parked first before others."""
        self._unfit: set[FunctionId] = set()
        """Functions of which a wake failed: they are not parked any more."""
        self._tasks: set[asyncio.Task[None]] = set()
        cache.parked.end = self._end

    def take(self, worker: Worker) -> str:
        """Make room for *worker*, which the engine parks. Return why it cannot be parked; empty: it can."""
        if not self.enabled:
            return "this node does not park"
        if worker.spec.function in self._unfit:
            return "it did not wake as it was when it was parked before"
        if reason := worker.parking.why_not():
            return reason
        size = _estimate(worker)
        if not self._room.keeper.park(worker.number, size):
            self._end(self._room.keeper.crowding(size))  # the next one may be
            return f"the node has no {format_bytes(size)} for it in --host-cache"
        self._workers[worker.number] = worker
        return ""

    def settled(self, worker: Worker) -> None:
        """*worker* is stopped: see what it really holds."""
        task = asyncio.get_running_loop().create_task(self._measure(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def let_go(self, worker: Worker) -> None:
        """*worker* wakes, or is gone."""
        if self._workers.pop(worker.number, None) is not None:
            self._room.unpark(worker.number)

    def has_failed(self, worker: Worker) -> None:
        self.failed += 1
        self._unfit.add(worker.spec.function)

    def forget(self, function: FunctionId) -> None:
        self._unfit.discard(function)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _measure(self, worker: Worker) -> None:
        limits, pid = worker.limits, worker.pid
        if limits is None or pid is None:
            return
        held = await asyncio.to_thread(limits.used, pid)
        if worker.number not in self._workers or worker.reaped:
            return
        if held:
            self._room.keeper.repark(worker.number, held)
        # The next one that is evicted should not have to wait until there is room.
        self._end(self._room.keeper.crowding(held, worker.number))

    def _end(self, numbers: list[int]) -> None:
        for number in numbers:
            worker = self._workers.get(number)
            if worker is not None and not worker.device.wakes(worker):
                worker.device.not_parked(worker, "its node needs the memory")


def _estimate(worker: Worker) -> Bytes:
    """
    Return what *worker* holds beside weights, roughly: its private memory beyond that of the process that it was forked
    from. To look closely takes milliseconds, which the next start would wait for (`ParkedWorkers.settled`).
    """
    if worker.pid is None:
        return worker.memory
    parent = parent_of(worker.pid)
    inherited = sizes_of(parent, "status", b"RssAnon")[0] if parent else 0
    own = sizes_of(worker.pid, "status", b"RssAnon")[0]
    private = max(0, own - inherited) + _COPIED
    if not worker.device.source.enforced:
        return private + worker.memory  # what is on the GPU comes to host memory
    return min(worker.memory, private)
