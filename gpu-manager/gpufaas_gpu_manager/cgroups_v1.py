"""Control groups of version 1: a tree of directories for each controller."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gpufaas_core.units import Bytes, MiB
from gpufaas_gpu_manager import cgroup_files as files

_PAGE: Final[Bytes] = os.sysconf("SC_PAGE_SIZE")
_SOCKETS: Final = "memory.kmem.tcp.limit_in_bytes"
"""The limit of the buffers of IP sockets, which are not charged as memory. Sockets count from when it is first set."""
_SOCKET_BYTES: Final[Bytes] = 16 * MiB
"""At the limit senders wait, and windows shrink to some 64 KiB for each socket."""

_SHARES: Final = 1024
"""The kernel gives this weight to a new group."""


class GroupV1:
    """One directory per controller."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = directories
        self._memory = directories["memory"]
        self.entries = tuple(str(each / "cgroup.procs") for each in directories.values())

    def limit_memory(self, size: Bytes | None) -> None:
        names = ["memory.limit_in_bytes"]
        if (self._memory / "memory.memsw.limit_in_bytes").exists():
            names.append("memory.memsw.limit_in_bytes")  # memory and swap together
        text = "-1" if size is None else str(size)
        # The limit with swap may not be below the other: which is set first depends on whether they grow.
        before = files.number(self._memory / names[0])
        if size is None or (before is not None and size > before):
            names.reverse()
        for name in names:
            files.write(self._memory / name, text)
        with contextlib.suppress(OSError):  # `counts_sockets`
            files.write(self._memory / _SOCKETS, "-1" if size is None else str(_SOCKET_BYTES))

    def limit_pids(self, count: int | None) -> None:
        if "pids" in self._directories:
            files.write(self._directories["pids"] / "pids.max", "max" if count is None else str(count))

    def limit_cpu(self, cores: float | None) -> None:
        if "cpu" in self._directories:
            cpu = self._directories["cpu"]
            quota, period = files.quota(cores)
            files.write(cpu / "cpu.cfs_quota_us", "-1")  # so that the period can be changed
            files.write(cpu / "cpu.cfs_period_us", str(period))
            files.write(cpu / "cpu.cfs_quota_us", "-1" if quota is None else str(quota))

    def held(self) -> Bytes:
        return files.held(self._memory / "memory.stat", "total_")

    def read_again(self) -> Bytes:
        return files.field(self._memory / "memory.stat", "total_workingset_refault_file") * _PAGE

    def oom_kills(self) -> int:
        return files.field(self._memory / "memory.oom_control", "oom_kill")

    def oom_event(self) -> int:
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            control = os.open(self._memory / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                files.write(self._memory / "cgroup.event_control", f"{event} {control}")
            finally:
                os.close(control)
        except OSError:
            os.close(event)
            return -1
        return event

    def pids(self) -> list[int]:
        return files.pids(self._directories.values())

    def kill(self) -> None:
        freezer = self._directories.get("freezer")
        if files.kill_all(self, files.SOME_ROUNDS):
            return
        # A frozen process does not fork; signals wait until it is thawed.
        if freezer is not None:
            with contextlib.suppress(OSError):
                files.write(freezer / "freezer.state", "FROZEN")
            files.kill_all(self, files.SOME_ROUNDS)
            with contextlib.suppress(OSError):
                files.write(freezer / "freezer.state", "THAWED")
        files.kill_all(self)

    def remove(self) -> bool:
        gone = [files.remove(each) for each in self._directories.values()]
        return all(gone)


def _one_of(controller: str) -> Callable[[Path], GroupV1]:
    """Return a function that makes a group of one controller's directory, to kill what is in it."""
    return lambda path: GroupV1({"memory": path, controller: path})


class CgroupsV1:
    """See module."""

    version = "v1"

    def __init__(self, parents: Mapping[str, Path], name: str) -> None:
        """:raises OSError: no groups can be made for memory; other controllers are optional"""
        self._homes: dict[str, Path] = {}
        for controller, parent in parents.items():
            try:
                files.make(parent / name)
            except OSError:
                if controller == "memory":
                    raise
            else:
                self._homes[controller] = parent / name
        if self.limits_cpu:
            files.write(self._homes["cpu"] / "cpu.shares", str(round(_SHARES * files.WEIGHT)))
        self.counts_sockets = (self._homes["memory"] / _SOCKETS).exists()
        for controller, parent in parents.items():
            for stale in files.stale(parent):
                files.clear(stale, _one_of(controller))

    @property
    def limits_cpu(self) -> bool:
        return "cpu" in self._homes

    def make(self, name: str, within: str = "", cores: float = 0.0) -> GroupV1:
        directories = {controller: home / name for controller, home in self._homes.items()}
        if within and self.limits_cpu:  # only the limit on CPU time is shared
            above = self._homes["cpu"] / within
            if not above.exists():
                files.make(above)
                try:
                    GroupV1({"memory": above, "cpu": above}).limit_cpu(cores)
                except OSError as exc:
                    files.remove(above)
                    why = f"{cores:g} cores are more than the platform's own control group may use"
                    raise OSError(exc.errno, why) from exc
            directories["cpu"] = above / name
        for each in directories.values():
            files.make(each)
        return GroupV1(directories)

    def close(self) -> None:
        for controller, home in self._homes.items():
            files.clear(home, _one_of(controller))
