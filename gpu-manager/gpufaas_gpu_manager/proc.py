"""Processes as proc(5) shows them: family, state, CPU time and memory. A process that is gone has none of these."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpufaas_core.units import Bytes, Seconds

Progress = tuple[int, ...]
"""What changes while a process works: CPU ticks, bytes read, resident pages (in steps of 1 MiB). Empty: it is gone."""
WINDOW_S: Final[Seconds] = 0.25
"""Long enough that a function which is called ten times a second shows, short enough to wait for."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_EXITING: Final = 0x4
"""Linux' PF_EXITING, of the flags in stat."""


def children_of(pid: int) -> list[int]:
    """Return the children of all its threads, with those that have ended and were not reaped."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants_of(pid: int) -> list[int]:
    """Return *pid* and all that it started, as far as their parents live; parents come first."""
    found = [pid]
    for each in found:  # grows meanwhile
        found += [child for child in children_of(each) if child not in found]
    return found


def stat_of(pid: int) -> list[bytes]:
    """Return the fields of proc(5)'s stat after the name in brackets, which may hold anything; empty: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """Return the letter of a process's state in proc(5); empty: it is gone."""
    fields = stat_of(pid)
    return fields[0].decode() if fields else ""


def is_exiting(pid: int) -> bool:
    """Return whether a process has begun to end. Its sockets are closed one by one: one may listen for a while yet."""
    fields = stat_of(pid)
    return not fields or bool(int(fields[6]) & _EXITING)


def parent_of(pid: int) -> int:
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0


def started_at(pid: int) -> int:
    """Return the start of *pid* in ticks since boot, which tells it from a later process of its number; -1: gone."""
    fields = stat_of(pid)
    return int(fields[19]) if fields else -1


def progress_of(pid: int) -> Progress:
    """Return what a process has done so far, to be compared with what it has done a while later."""
    fields, read = stat_of(pid), 0
    if not fields:
        return ()
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/io", "rb") as file:  # it may not be dumpable
        read = int(file.readline().split()[1])
    # utime and stime are fields 14 and 15 of stat, rss is field 24; `fields` begins at field 3.
    return int(fields[11]) + int(fields[12]), read, int(fields[21]) // 256


def cpu_seconds(pid: int) -> Seconds:
    """
    Return the CPU time of a process and of its children that it has waited for; 0.0 once it is gone. Some 10 us.

    Children that still run are not in it: /proc gives no sum over a process group.
    """
    return sum(map(int, stat_of(pid)[11:15])) / _TICKS_PER_S  # utime to cstime


def sizes_of(pid: int, file: str, *names: bytes) -> list[Bytes]:
    """Return the sizes in bytes that ``/proc/PID/FILE`` has for *names*, 0 for one that it has not."""
    found = dict.fromkeys(names, 0)
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/{file}", "rb") as lines:
        for line in lines:
            name, _, value = line.partition(b":")
            if name in found:
                found[name] = int(value.split()[0]) * 1024
    return list(found.values())


def usage_of(pids: Sequence[int]) -> tuple[float, Bytes]:
    """
    Return millicores over the next `WINDOW_S`, and bytes, of these processes and all that they started. Blocks.

    Memory is what would become free if they ended: shared pages, such as the fork server's torch, do not count.
    """
    family = [each for pid in pids for each in descendants_of(pid)]
    began = time.monotonic()  # before all that is counted: who stood still meanwhile has not used more than there is
    before = {pid: _ran_s(pid) for pid in family}
    time.sleep(WINDOW_S)
    ran_s = sum(max(0.0, _ran_s(pid) - before[pid]) for pid in family)
    return 1000.0 * ran_s / (time.monotonic() - began), sum(map(private_of, family))


def private_of(pid: int) -> Bytes:
    """Return the memory that would become free if this process alone ended. Takes milliseconds."""
    return sum(sizes_of(pid, "smaps_rollup", b"Private_Clean", b"Private_Dirty", b"Private_Hugetlb"))


def _ran_s(pid: int) -> Seconds:
    """Return the CPU time of all threads, in nanoseconds if the kernel counts those, else in ticks."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        return cpu_seconds(pid)
