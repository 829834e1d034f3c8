"""The files of control groups: to read and write them, to make groups, and to kill what is in them."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from gpufaas_core.units import Bytes
from gpufaas_gpu_manager.cgroup_ports import Group
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
_ROUNDS: Final = 50
"""Looks at a group that was killed: for processes that were forked meanwhile, or are not gone yet."""
_ROUND_S: Final = 0.002
SOME_ROUNDS: Final = 3
"""So many suffice for all but a worker that forks as fast as it can."""


def stale(parent: Path) -> list[Path]:
    """Return the groups below *parent* of platforms of this PID namespace that are dead."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    found = []
    for each in parent.iterdir():
        parts = _NAME.fullmatch(each.name)
        if parts and int(parts[1]) == namespace and started_at(int(parts[2])) != int(parts[3]):
            found.append(each)
    return found


def clear(home: Path, group: Callable[[Path], Group]) -> None:
    """Kill the processes in the groups below *home*, and remove the groups and *home*."""
    if not home.name.endswith("-platform"):  # that one has the platform's ancestors, too
        for directory, _, _ in os.walk(home, topdown=False):
            if directory != str(home):
                group(Path(directory)).kill()
                for _ in range(_ROUNDS):
                    if remove(Path(directory)):
                        break
                    time.sleep(_ROUND_S)
    remove(home)


def quota(cores: float | None) -> tuple[int | None, int]:
    """Return the microseconds of CPU time in each period, and the period, for so many cores; None: no limit."""
    if cores is None:
        return None, _CPU_PERIOD_US
    period = min(_CPU_PERIOD_MOST_US, max(_CPU_PERIOD_US, round(_CPU_QUOTA_US / cores)))
    return max(_CPU_QUOTA_US, round(cores * period)), period


def kill_all(group: Group, rounds: int = _ROUNDS) -> bool:
    """
    Kill until no others are there: a process that was sent SIGKILL does not fork. The killed ones are not waited for: a
    large one takes a tenth of a second until it is gone.

    :return: False if there were others each time
    """
    killed: set[int] = set()
    for _ in range(rounds):
        found = set(group.pids()) - killed
        if not found:
            return True
        _kill(found)
        killed |= found
    return False


def _kill(found: Iterable[int]) -> None:
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


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
