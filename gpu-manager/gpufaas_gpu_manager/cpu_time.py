"""CPU time of worker processes, for scaling by cpu and for metrics."""

import os
from typing import Final

from gpufaas_core.units import Seconds

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> Seconds:
    """
    Return the CPU time of a process and of its children that it has waited for; 0.0 once it is gone. Some 10 us.

    Children that still run are not in it: /proc gives no sum over a process group.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # Behind the name in brackets, which may hold anything: fields 14 to 17 of proc(5), utime to cstime.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
