"""The memory of this machine, or of the container that the platform runs in."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpufaas_core.units import Bytes
from gpufaas_gpu_manager.cgroup_mounts import own_groups

_SELF: Final = Path("/proc/self")
_LIMITS: Final = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""The file with the limit of a group, in version 2 and in version 1."""
_USED: Final = {"": "memory.current", "memory": "memory.usage_in_bytes"}
_CACHE: Final = {
    "": ("inactive_file", "active_file"),
    "memory": ("total_inactive_file", "total_active_file"),  # with the groups below
}
"""The page cache in ``memory.stat``, which the kernel reclaims."""


def total_memory(process: Path = _SELF) -> Bytes:
    """Return the bytes of this machine, or the lowest limit of the control groups that *process* is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for _, _, limit in _limited(process))])


def available_memory(process: Path = _SELF) -> Bytes:
    """Return the bytes that can be used without swapping (MemAvailable), within the limits of the control groups."""
    with open("/proc/meminfo", "rb") as meminfo:
        left = [next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith(b"MemAvailable:"))]
    for version, group, limit in _limited(process):
        with contextlib.suppress(OSError, ValueError):
            left.append(limit - int((group / _USED[version]).read_text()) + _page_cache(version, group))
    return max(0, min(left))


def _limited(process: Path) -> Iterator[tuple[str, Path, Bytes]]:
    """Yield the version, the directory and the limit of the groups that *process* is in, the inner ones first."""
    try:
        groups = own_groups(process)
    except OSError:
        return  # a kernel without control groups
    for version, own in groups.items():
        for group in (own, *own.parents) if version in _LIMITS else ():
            try:
                limit = (group / _LIMITS[version]).read_text().strip()
            except FileNotFoundError:
                if (group / "cgroup.procs").exists():
                    continue  # the root of version 2, or a group whose parent does not give it the controller
                break  # beyond the mount
            except OSError:
                break
            if limit.isdecimal():  # else it is "max"
                yield version, group, int(limit)


def _page_cache(version: str, group: Path) -> Bytes:
    found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(found.get(name, 0)) for name in _CACHE[version])
