"""
Watches loads: ends one that makes no progress, or reads its files again and again.

Time is counted in looks, not by the clock: a node that was held up itself has looked only once meanwhile.
"""

from typing import Final

from gpufaas_gpu_manager.calls_ports import CallsWorker
from gpufaas_gpu_manager.proc import progress_of

LOOKS: Final = 4
"""At progress, within the time that a load may make none."""
_LOOK_S: Final = 1.0
"""Time between two checks for thrashing."""


def watch_load(worker: CallsWorker) -> None:
    """Check *worker* repeatedly, by its timers "progress" and "thrashing", until they are cancelled."""
    seen: tuple[int, ...] = ()
    idle = 0

    def check_progress() -> None:
        """A load may take any time as long as it uses CPU time, reads, or changes its memory."""
        nonlocal seen, idle
        stall_s, before = worker.spec.stall_s, seen
        seen = progress_of(worker.pid) if worker.pid else ()
        idle = idle + 1 if worker.pid and seen == before else 0
        if idle >= LOOKS:
            waits = f", and has yet {worker.run.waits_for}" if worker.run.waits_for else ""
            worker.kill(f"its load made no progress for {stall_s:g} s (no CPU time, no bytes read, no memory){waits}")
            return
        worker.timers.later("progress", stall_s / LOOKS, check_progress)

    def check_thrashing() -> None:
        """End a load that reads its files again and again, as out of memory: it would take minutes or hours."""
        may_have_more = (
            not worker.checks and not worker.spec.memory_limit and worker.memory < worker.device.ledger.capacity
        )
        if worker.limits is not None and worker.limits.thrashes() and may_have_more:
            worker.on_over_memory("out of memory: the files that its load reads do not fit beside what it holds")
        else:
            worker.timers.later("thrashing", _LOOK_S, check_thrashing)

    worker.timers.later("progress", worker.spec.stall_s / LOOKS, check_progress)
    worker.timers.later("thrashing", _LOOK_S, check_thrashing)
