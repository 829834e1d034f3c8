"""CPU time of worker processes, for scaling by cpu and for metrics; and whether a process does anything."""

import os
from typing import Final

from gpufaas_core.units import Seconds

Progress = tuple[int, ...]
"""What changes while a process works: CPU ticks, bytes read, resident pages (in steps of 1 MiB). Empty: it is gone."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> Seconds:
    """
    Return the CPU time of a process and of its children that it has waited for; 0.0 once it is gone. Some 10 us.

    Children that still run are not in it: /proc gives no sum over a process group.
    """
    return sum(map(int, stat_of(pid)[11:15])) / _TICKS_PER_S  # utime to cstime


def state_of(pid: int) -> str:
    """Return the letter of a process's state in proc(5); empty: it is gone."""
    fields = stat_of(pid)
    return fields[0].decode() if fields else ""


def stat_of(pid: int) -> list[bytes]:
    """Return the fields of proc(5)'s stat behind the name in brackets, which may hold anything; empty: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return []


def progress_of(pid: int) -> Progress:
    """Return what a process has done so far, to be compared with what it has done a while later."""
    try:
        fields = stat_of(pid)
        with open(f"/proc/{pid}/io", "rb") as file:
            read = int(file.readline().split()[1])
    except (OSError, IndexError, ValueError):
        return ()
    # utime and stime are fields 14 and 15 of stat, rss is field 24; `fields` begins at field 3.
    return int(fields[11]) + int(fields[12]), read, int(fields[21]) // 256
