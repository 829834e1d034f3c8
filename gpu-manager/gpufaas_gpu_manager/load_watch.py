"""Watches loads: ends one that makes no progress, or reads its files again and again."""

import asyncio
from typing import Final, Protocol

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import Bytes
from gpufaas_gpu_manager.enforcement import WorkerLimits
from gpufaas_gpu_manager.proc import progress_of
from gpufaas_gpu_manager.timers import Timers
from gpufaas_gpu_manager.worker_calls import DevicePort, Running

_LOOK_S: Final = 1.0
"""Time between two checks for thrashing."""


class LoadingWorker(Protocol):
    """A worker that loads."""

    spec: WorkerSpec
    memory: Bytes
    scratch: bool
    pid: int | None
    run: Running
    limits: WorkerLimits | None
    timers: Timers

    @property
    def device(self) -> DevicePort: ...

    def kill(self, reason: str) -> None: ...

    def on_over_memory(self, reason: str) -> None: ...


def watch_load(worker: LoadingWorker) -> None:
    """Check *worker* repeatedly, by its timers "progress" and "thrashing", until they are cancelled."""
    loop = asyncio.get_running_loop()
    seen: tuple[int, ...] = ()
    seen_at = loop.time()

    def check_progress() -> None:
        """A load may take any time as long as it uses CPU time, reads, or changes its memory."""
        nonlocal seen, seen_at
        now, stall_s = loop.time(), worker.spec.stall_s
        progress = progress_of(worker.pid) if worker.pid else ()
        if progress != seen or not worker.pid:
            seen, seen_at = progress, now
        elif now - seen_at >= stall_s:
            waits = f", and has yet {worker.run.waits_for}" if worker.run.waits_for else ""
            worker.kill(f"its load made no progress for {stall_s:g} s (no CPU time, no bytes read, no memory){waits}")
            return
        worker.timers.later("progress", stall_s / 4, check_progress)

    def check_thrashing() -> None:
        """End a load that reads its files again and again, as out of memory: it would take minutes or hours."""
        may_have_more = (
            not worker.scratch and not worker.spec.memory_limit and worker.memory < worker.device.ledger.capacity
        )
        if worker.limits is not None and worker.limits.thrashes() and may_have_more:
            worker.on_over_memory("out of memory: the files that its load reads do not fit beside what it holds")
        else:
            worker.timers.later("thrashing", _LOOK_S, check_thrashing)

    worker.timers.later("progress", worker.spec.stall_s / 4, check_progress)
    worker.timers.later("thrashing", _LOOK_S, check_thrashing)
