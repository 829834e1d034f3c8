"""Control groups of version 2: one tree of directories."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

from gpufaas_core.units import Bytes
from gpufaas_gpu_manager import cgroup_files as files
from gpufaas_gpu_manager.cgroup_group import Group, clear
from gpufaas_gpu_manager.proc import parent_of

_WEIGHT: Final = 100
"""The kernel gives this weight to a new group."""
_BOOTED_WITH: Final = Path("/proc/cmdline")


class GroupV2(Group):
    """One directory."""

    totals = ""
    events = "memory.events"

    def __init__(self, directory: Path) -> None:
        super().__init__(dict.fromkeys(("memory", "pids", "cpu"), directory))

    def limit_memory(self, size: Bytes) -> None:
        for name, text in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            with contextlib.suppress(OSError):  # a kernel without swap, or before 4.19
                files.write(self._memory / name, text)
        files.write(self._memory / "memory.max", str(size))

    def limit_cpu(self, cores: float | None) -> None:
        quota, period = files.quota(cores)
        with contextlib.suppress(FileNotFoundError, PermissionError):  # as `limit_pids`
            files.write(self._memory / "cpu.max", f"{'max' if quota is None else quota} {period}")

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # before Linux 5.14
            if (self._memory / "cgroup.kill").exists():
                files.write(self._memory / "cgroup.kill", "1")
                return
        self.kill_all()


class CgroupsV2:
    """See module."""

    version = "v2"

    def __init__(self, parent: Path, name: str) -> None:
        """:raises OSError: *parent* is not delegated to us, or has other processes"""
        _delegate(parent, name)
        for stale in files.stale(parent):
            clear(stale, GroupV2)
        self._home = parent / name
        self.counts_sockets = not any("nosocket" in each for each in files.words(_BOOTED_WITH))
        files.make(self._home)
        with contextlib.suppress(FileNotFoundError, PermissionError):  # as `limit_cpu`
            files.write(self._home / "cpu.weight", str(round(_WEIGHT * files.WEIGHT)))
        _enable(self._home)

    @property
    def limits_cpu(self) -> bool:
        return "cpu" in files.words(self._home / "cgroup.controllers")

    def make(self, name: str, within: str = "", cores: float = 0.0) -> GroupV2:
        """Make a group, as `CgroupsV1.make` does."""
        home = self._home
        if within:
            home = self._home / within
            if not home.exists():
                files.make(home)
                _enable(home)
                GroupV2(home).limit_cpu(cores)
        files.make(home / name)
        return GroupV2(home / name)

    def close(self) -> None:
        clear(self._home, GroupV2)


def _enable(directory: Path) -> None:
    """Enable the available controllers for groups below; memory must be one."""
    there = files.words(directory / "cgroup.controllers")
    for controller in ("memory", "pids", "cpu"):
        if controller in there or controller == "memory":
            try:
                files.write(directory / "cgroup.subtree_control", f"+{controller}")
            except OSError:
                if controller == "memory":
                    raise


def _delegate(parent: Path, name: str) -> None:
    """
    Enable the controllers of *parent* for groups below it.

    In version 2 a group with processes gives no controllers to groups below. Where all its processes are this one and
    its ancestors, they move to a group beside those of the workers.
    """
    try:
        _enable(parent)
        return
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
    inside = files.pids([parent])
    pid = os.getpid()
    related = {pid}
    while pid > 1:
        related.add(pid := parent_of(pid))
    others = [pid for pid in inside if pid not in related]
    if others:
        raise OSError(
            errno.EBUSY,
            f"it has other processes (such as {others[0]}): start the platform in a group of its own, with "
            "systemd-run --user --scope -p Delegate=yes",
        )
    beside = parent / f"{name}-platform"
    files.make(beside)
    for pid in inside:
        files.write(beside / "cgroup.procs", str(pid))
    _enable(parent)
