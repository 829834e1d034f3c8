"""The files of control groups: to read and write them, and to make groups."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gpufaas_core.units import Bytes
from gpufaas_gpu_manager.proc import started_at

_CPU_PERIOD_US: Final = 20_000
"""Within which a group gets its CPU time. The kernel's default is 100 ms, which is longer than many calls take."""
_CPU_QUOTA_US: Final = 1_000
"""The kernel takes no quota below that, and no period above `_CPU_PERIOD_MOST_US`."""
_CPU_PERIOD_MOST_US: Final = 1_000_000
WEIGHT: Final = 1 / 8
"""Of the CPU time that is fought over, what all workers together count against one of the platform's processes, or of
its group. At equal weights 100 threads that hand a lock around keep the gateway waiting for seconds (Linux 6.18)."""
_NAME: Final = re.compile(r"gpufaas-(\d+)-(\d+)-(\d+)-\d+(-platform)?")


def stale(parent: Path) -> list[Path]:
    """Return the groups below *parent* of platforms of this PID namespace that are dead."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    found = []
    for each in parent.iterdir():
        parts = _NAME.fullmatch(each.name)
        if parts and int(parts[1]) == namespace and started_at(int(parts[2])) != int(parts[3]):
            found.append(each)
    return found


def quota(cores: float | None) -> tuple[int | None, int]:
    """Return the microseconds of CPU time in each period, and the period, for so many cores; None: no limit."""
    if cores is None:
        return None, _CPU_PERIOD_US
    period = min(_CPU_PERIOD_MOST_US, max(_CPU_PERIOD_US, round(_CPU_QUOTA_US / cores)))
    return max(_CPU_QUOTA_US, round(cores * period)), period


def pids(directories: Iterable[Path]) -> list[int]:
    found: set[int] = set()
    for each in directories:
        with contextlib.suppress(OSError), open(each / "cgroup.procs", "rb", buffering=0) as file:
            found.update(map(int, file.readall().split()))
    return sorted(found - {0})  # 0: in a PID namespace that we do not see


def make(directory: Path) -> None:
    directory.mkdir(exist_ok=True)


def remove(directory: Path) -> bool:
    """Return whether the group is gone; False: processes are left in it."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def words(path: Path) -> list[str]:
    """Return the words of a file; none: it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def number(path: Path) -> int | None:
    """Return the first word of a file as a number; None: it is none, such as ``max``."""
    found = words(path)
    return int(found[0]) if found and found[0].isdigit() else None


def held(path: Path, prefix: str = "") -> Bytes:
    """
    Return the private and shared memory that a `memory.stat` says.

    Shared memory is on the lists of anonymous pages, as it can go to swap only; locked memory has its own list.
    """
    found = words(path)
    numbers = dict(zip(found[::2], found[1::2], strict=False))
    names = ("inactive_anon", "active_anon", "unevictable")
    return sum(int(numbers.get(prefix + each, 0)) for each in names)


def field(path: Path, name: str) -> int:
    """Return the number after *name*; 0: it is not there."""
    found = words(path)
    return int(found[found.index(name) + 1]) if name in found else 0
