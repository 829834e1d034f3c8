"""Control groups of version 1: a tree of directories for each controller."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gpufaas_core.units import Bytes, MiB
from gpufaas_gpu_manager import cgroup_files as files
from gpufaas_gpu_manager.cgroup_group import Group, clear

_SOCKETS: Final = "memory.kmem.tcp.limit_in_bytes"
"""The limit of the buffers of IP sockets, which are not charged as memory. Sockets count from when it is first set."""
_SOCKET_BYTES: Final[Bytes] = 16 * MiB
"""At the limit senders wait, and windows shrink to some 64 KiB for each socket."""

_SHARES: Final = 1024
"""The kernel gives this weight to a new group."""
_SOME_ROUNDS: Final = 3
"""This number suffices for all but a worker that forks as fast as it can."""


class GroupV1(Group):
    """One directory per controller."""

    totals = "total_"
    events = "memory.oom_control"

    def limit_memory(self, size: Bytes) -> None:
        names = ["memory.limit_in_bytes"]
        if (self._memory / "memory.memsw.limit_in_bytes").exists():
            names.append("memory.memsw.limit_in_bytes")  # memory and swap together
        # The limit with swap may not be below the other: which is set first depends on whether they grow.
        before = files.number(self._memory / names[0])
        if before is not None and size > before:
            names.reverse()
        for name in names:
            files.write(self._memory / name, str(size))
        with contextlib.suppress(OSError):  # `counts_sockets`
            files.write(self._memory / _SOCKETS, str(_SOCKET_BYTES))

    def limit_cpu(self, cores: float | None) -> None:
        if "cpu" in self._directories:
            cpu = self._directories["cpu"]
            quota, period = files.quota(cores)
            files.write(cpu / "cpu.cfs_quota_us", "-1")  # so that the period can be changed
            files.write(cpu / "cpu.cfs_period_us", str(period))
            files.write(cpu / "cpu.cfs_quota_us", "-1" if quota is None else str(quota))

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

    def kill(self) -> None:
        freezer = self._directories.get("freezer")
        if self.kill_all(_SOME_ROUNDS):
            return
        # A frozen process does not fork; signals wait until it is thawed.
        if freezer is not None:
            with contextlib.suppress(OSError):
                files.write(freezer / "freezer.state", "FROZEN")
            self.kill_all(_SOME_ROUNDS)
            with contextlib.suppress(OSError):
                files.write(freezer / "freezer.state", "THAWED")
        self.kill_all()


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
        """Whether a group with a limit on memory is held to some for the buffers of its sockets."""
        for controller, parent in parents.items():
            for stale in files.stale(parent):
                clear(stale, _one_of(controller))

    @property
    def limits_cpu(self) -> bool:
        """Whether `Group.limit_cpu` has an effect."""
        return "cpu" in self._homes

    def make(self, name: str, within: str = "", cores: float = 0.0) -> GroupV1:
        """
        :param within: the name of a group of groups, which may use *cores* together; empty: none
        :raises OSError: the kernel makes no more, or does not give so many cores
        """
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
        """Kill and remove what is left."""
        for controller, home in self._homes.items():
            clear(home, _one_of(controller))
