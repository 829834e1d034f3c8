"""What worker processes use at this moment, for people who ask: CPU over a short while, and memory."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from gpufaas_core.units import Bytes, Seconds
from gpufaas_gpu_manager.cpu_time import cpu_seconds

WINDOW_S: Final[Seconds] = 0.25
"""Long enough that a function which is called ten times a second shows, short enough to wait for."""


def usage_of(pids: Sequence[int]) -> tuple[float, Bytes]:
    """
    Return millicores over the next `WINDOW_S`, and bytes, of these processes and all that they started. Blocks.

    Memory is what would become free if they ended: pages that they share, such as the zygote's torch, are nobody's.
    """
    family = [each for pid in pids for each in _family(pid)]
    before = {pid: _ran_s(pid) for pid in family}
    began = time.monotonic()
    time.sleep(WINDOW_S)
    ran_s = sum(max(0.0, _ran_s(pid) - before[pid]) for pid in family)
    return 1000.0 * ran_s / (time.monotonic() - began), sum(map(_private, family))


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended
        return
    for child in children:
        yield from _family(child)


def _ran_s(pid: int) -> Seconds:
    """Time on a CPU, of all threads. The scheduler counts nanoseconds; where it does not say them, there are ticks."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        return cpu_seconds(pid)


def _private(pid: int) -> Bytes:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
