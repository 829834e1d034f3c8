"""
Control groups: processes whose memory, CPU and number the kernel limits together.

One port, `Group`, and two back-ends: version 1 (a tree of directories for each controller) and version 2 (one tree).
`find` returns the one that can be used here. Groups are made below this process's own group, so that the limits of the
platform itself hold for them, too: ``OWN/gpufaas-PLATFORM/NAME``, or one level deeper where groups share a limit on CPU
time. PLATFORM names the process that made them, so that the next platform recognises those that a killed one left.

Memory is everything that the kernel charges to the group: private, shared (MAP_SHARED, memfd, files in a tmpfs), page
tables and kernel stacks. Page cache is charged, too, but the kernel takes it back before the group is out of memory.
Pages that a process shared with its parent before it joined stay charged to the parent's group.
"""

import contextlib
import errno
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from gpufaas_core.units import Bytes
from gpufaas_gpu_manager.cgroup_mounts import own_groups
from gpufaas_gpu_manager.proc import parent_of, started_at

_CPU_PERIOD_US: Final = 20_000
"""Within which a group gets its CPU time. The kernel's default is 100 ms, which is longer than many calls take."""
_CPU_QUOTA_US: Final = 1_000
"""The kernel takes no quota below that, and no period above `_CPU_PERIOD_MOST_US`."""
_CPU_PERIOD_MOST_US: Final = 1_000_000
_PAGE: Final[Bytes] = os.sysconf("SC_PAGE_SIZE")
_NAME: Final = re.compile(r"gpufaas-(\d+)-(\d+)-(\d+)-\d+(-platform)?")
_ROUNDS: Final = 50
"""Looks at a group that was killed: for processes that were forked meanwhile, or are not gone yet."""
_ROUND_S: Final = 0.002
_serial: Final = itertools.count()


class Group(Protocol):
    """Some processes, and all that they start."""

    entries: tuple[str, ...]
    """Files into each of which a process writes ``0`` to join."""

    def limit_memory(self, size: Bytes | None) -> None:
        """
        Let the group hold *size* bytes at most; None: no limit. The kernel reclaims memory beyond it if it can; version
        1 refuses a limit below what cannot be reclaimed.

        :raises OSError: memory beyond *size* cannot be reclaimed
        """

    def limit_pids(self, count: int | None) -> None:
        """Let the group have *count* processes and threads at most: further forks fail."""

    def limit_cpu(self, cores: float | None) -> None:
        """
        Let the group use *cores* seconds of CPU time per second; None: no limit.

        :raises OSError: a group above may use less
        """

    def held(self) -> Bytes:
        """Return the private and shared memory that is charged now, without page cache."""

    def read_again(self) -> Bytes:
        """Return how many bytes of files were read again because the group had no room to keep them."""

    def oom_kills(self) -> int:
        """Return how often the kernel killed a process of the group for its memory."""

    def oom_event(self) -> int:
        """Return a file descriptor that becomes readable when the group is out of memory; -1: the kernel kills all."""

    def pids(self) -> list[int]: ...

    def kill(self) -> None:
        """Send SIGKILL to all of it, and to what is forked meanwhile. They may take a moment to be gone."""

    def remove(self) -> bool:
        """Remove the group; False: processes are left in it."""


class Cgroups(Protocol):
    """The groups of one platform."""

    version: str

    @property
    def limits_cpu(self) -> bool:
        """Whether `Group.limit_cpu` has an effect."""

    def make(self, name: str, within: str = "", cores: float = 0.0) -> Group:
        """
        :param within: the name of a group of groups, which may use *cores* together; empty: none
        :raises OSError: the kernel makes no more, or does not give so many cores
        """

    def close(self) -> None:
        """Kill and remove what is left."""


# --- version 1 ---


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
        before = _number(self._memory / names[0])
        if size is None or (before is not None and size > before):
            names.reverse()
        for name in names:
            _write(self._memory / name, text)

    def limit_pids(self, count: int | None) -> None:
        if "pids" in self._directories:
            _write(self._directories["pids"] / "pids.max", "max" if count is None else str(count))

    def limit_cpu(self, cores: float | None) -> None:
        if "cpu" in self._directories:
            cpu = self._directories["cpu"]
            quota, period = _quota(cores)
            _write(cpu / "cpu.cfs_quota_us", "-1")  # so that the period can be changed
            _write(cpu / "cpu.cfs_period_us", str(period))
            _write(cpu / "cpu.cfs_quota_us", "-1" if quota is None else str(quota))

    def held(self) -> Bytes:
        return _held(self._memory / "memory.stat", "total_")

    def read_again(self) -> Bytes:
        return _field(self._memory / "memory.stat", "total_workingset_refault_file") * _PAGE

    def oom_kills(self) -> int:
        return _field(self._memory / "memory.oom_control", "oom_kill")

    def oom_event(self) -> int:
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            control = os.open(self._memory / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _write(self._memory / "cgroup.event_control", f"{event} {control}")
            finally:
                os.close(control)
        except OSError:
            os.close(event)
            return -1
        return event

    def pids(self) -> list[int]:
        return _pids(self._directories.values())

    def kill(self) -> None:
        freezer = self._directories.get("freezer")
        if freezer is None:
            _kill_all(self)
            return
        # A frozen process does not fork; signals wait until it is thawed.
        with contextlib.suppress(OSError):
            _write(freezer / "freezer.state", "FROZEN")
        _kill_once(self)
        with contextlib.suppress(OSError):
            _write(freezer / "freezer.state", "THAWED")
        _kill_all(self)

    def remove(self) -> bool:
        gone = [_remove(each) for each in self._directories.values()]
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
                _make(parent / name)
            except OSError:
                if controller == "memory":
                    raise
            else:
                self._homes[controller] = parent / name
        for controller, parent in parents.items():
            for stale in _stale(parent):
                _clear(stale, _one_of(controller))

    @property
    def limits_cpu(self) -> bool:
        return "cpu" in self._homes

    def make(self, name: str, within: str = "", cores: float = 0.0) -> GroupV1:
        directories = {controller: home / name for controller, home in self._homes.items()}
        if within and self.limits_cpu:  # only the limit on CPU time is shared
            above = self._homes["cpu"] / within
            if not above.exists():
                _make(above)
                try:
                    GroupV1({"memory": above, "cpu": above}).limit_cpu(cores)
                except OSError as exc:
                    _remove(above)
                    why = f"{cores:g} cores are more than the platform's own control group may use"
                    raise OSError(exc.errno, why) from exc
            directories["cpu"] = above / name
        for each in directories.values():
            _make(each)
        return GroupV1(directories)

    def close(self) -> None:
        for controller, home in self._homes.items():
            _clear(home, _one_of(controller))


# --- version 2 ---


class GroupV2:
    """One directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.entries: tuple[str, ...] = (str(directory / "cgroup.procs"),)

    def limit_memory(self, size: Bytes | None) -> None:
        for name, text in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            with contextlib.suppress(OSError):  # a kernel without swap, or before 4.19
                _write(self._directory / name, text)
        _write(self._directory / "memory.max", "max" if size is None else str(size))

    def limit_pids(self, count: int | None) -> None:
        with contextlib.suppress(FileNotFoundError, PermissionError):  # that controller was not given to us
            _write(self._directory / "pids.max", "max" if count is None else str(count))

    def limit_cpu(self, cores: float | None) -> None:
        quota, period = _quota(cores)
        with contextlib.suppress(FileNotFoundError, PermissionError):
            _write(self._directory / "cpu.max", f"{'max' if quota is None else quota} {period}")

    def held(self) -> Bytes:
        return _held(self._directory / "memory.stat")

    def read_again(self) -> Bytes:
        return _field(self._directory / "memory.stat", "workingset_refault_file") * _PAGE

    def oom_kills(self) -> int:
        return _field(self._directory / "memory.events", "oom_kill")

    def oom_event(self) -> int:
        return -1  # memory.oom.group

    def pids(self) -> list[int]:
        return _pids([self._directory])

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # before Linux 5.14
            if (self._directory / "cgroup.kill").exists():
                _write(self._directory / "cgroup.kill", "1")
                return
        _kill_all(self)

    def remove(self) -> bool:
        return _remove(self._directory)


class CgroupsV2:
    """See module."""

    version = "v2"

    def __init__(self, parent: Path, name: str) -> None:
        """:raises OSError: *parent* is not delegated to us, or has other processes"""
        _delegate(parent, name)
        for stale in _stale(parent):
            _clear(stale, GroupV2)
        self._home = parent / name
        _make(self._home)
        _enable(self._home)

    @property
    def limits_cpu(self) -> bool:
        return "cpu" in _words(self._home / "cgroup.controllers")

    def make(self, name: str, within: str = "", cores: float = 0.0) -> GroupV2:
        home = self._home
        if within:
            home = self._home / within
            if not home.exists():
                _make(home)
                _enable(home)
                GroupV2(home).limit_cpu(cores)
        _make(home / name)
        return GroupV2(home / name)

    def close(self) -> None:
        _clear(self._home, GroupV2)


def _enable(directory: Path) -> None:
    """Enable the available controllers for groups below; memory must be one."""
    there = (directory / "cgroup.controllers").read_text().split() if _is_kernels(directory) else ["memory"]
    for controller in ("memory", "pids", "cpu"):
        if controller in there or controller == "memory":
            try:
                _write(directory / "cgroup.subtree_control", f"+{controller}")
            except OSError:
                if controller == "memory":
                    raise


def _is_kernels(directory: Path) -> bool:
    return (directory / "cgroup.controllers").exists()


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
    inside = _pids([parent])
    related = {os.getpid(), *_ancestors(os.getpid())}
    others = [pid for pid in inside if pid not in related]
    if others:
        raise OSError(
            errno.EBUSY,
            f"it has other processes (such as {others[0]}): start the platform in a group of its own, with "
            "systemd-run --user --scope -p Delegate=yes",
        )
    beside = parent / f"{name}-platform"
    _make(beside)
    for pid in inside:
        _write(beside / "cgroup.procs", str(pid))
    _enable(parent)


def _ancestors(pid: int) -> Iterable[int]:
    while pid > 1:
        pid = parent_of(pid)
        yield pid


# --- which ---


def find(version: str = "", process: Path = Path("/proc/self")) -> Cgroups:
    """
    Return the groups that can be used here: version 2 if it has the memory controller, else version 1.

    :param version: only this one (``v1`` or ``v2``); empty: either
    :param process: the directory with ``mountinfo`` and ``cgroup`` of this process
    :raises OSError: no groups can be used; says why
    """
    namespace, pid = os.stat("/proc/self/ns/pid").st_ino, os.getpid()
    name = f"gpufaas-{namespace}-{pid}-{started_at(pid)}-{next(_serial)}"
    reasons = []
    parents = own_groups(process)
    if version in ("", "v2"):
        parent = parents.pop("", None)
        if parent is None:
            reasons.append("v2 is not mounted")
        elif "memory" not in _words(parent / "cgroup.controllers"):
            reasons.append(f"v2 has no memory controller for {parent}")
        else:
            try:
                return CgroupsV2(parent, name)
            except OSError as exc:
                reasons.append(f"{parent}: {exc.strerror}")
    if version in ("", "v1"):
        parents.pop("", None)
        if "memory" not in parents:
            reasons.append("v1 has no memory controller mounted")
        else:
            try:
                return CgroupsV1(parents, name)
            except OSError as exc:
                reasons.append(f"{parents['memory']}: {exc.strerror}")
    raise OSError("; ".join(reasons))


# --- within ---


def _stale(parent: Path) -> list[Path]:
    """Return the groups below *parent* of platforms of this PID namespace that are dead."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    found = []
    for each in parent.iterdir():
        parts = _NAME.fullmatch(each.name)
        if parts and int(parts[1]) == namespace and started_at(int(parts[2])) != int(parts[3]):
            found.append(each)
    return found


def _clear(home: Path, group: Callable[[Path], Group]) -> None:
    """Kill the processes in the groups below *home*, and remove the groups and *home*."""
    if not home.name.endswith("-platform"):  # that one has the platform's ancestors, too
        for directory, _, _ in os.walk(home, topdown=False):
            if directory != str(home):
                group(Path(directory)).kill()
                for _ in range(_ROUNDS):
                    if _remove(Path(directory)):
                        break
                    time.sleep(_ROUND_S)
    _remove(home)


def _quota(cores: float | None) -> tuple[int | None, int]:
    """Return the microseconds of CPU time in each period, and the period, for so many cores; None: no limit."""
    if cores is None:
        return None, _CPU_PERIOD_US
    period = min(_CPU_PERIOD_MOST_US, max(_CPU_PERIOD_US, round(_CPU_QUOTA_US / cores)))
    return max(_CPU_QUOTA_US, round(cores * period)), period


def _kill_once(group: Group) -> bool:
    pids = group.pids()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def _kill_all(group: Group) -> None:
    """A process that was sent SIGKILL does not fork, so this ends."""
    for _ in range(_ROUNDS):
        if not _kill_once(group):
            return


def _pids(directories: Iterable[Path]) -> list[int]:
    found: set[int] = set()
    for each in directories:
        with contextlib.suppress(OSError):
            found.update(map(int, (each / "cgroup.procs").read_text().split()))
    return sorted(found - {0})  # 0: in a PID namespace that we do not see


def _make(directory: Path) -> None:
    directory.mkdir(exist_ok=True)


def _remove(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _held(path: Path, prefix: str = "") -> Bytes:
    """Shared memory is on the lists of anonymous pages, as it can go to swap only; locked memory has its own list."""
    words = _words(path)
    numbers = dict(zip(words[::2], words[1::2], strict=False))
    names = ("inactive_anon", "active_anon", "unevictable")
    return sum(int(numbers.get(prefix + each, 0)) for each in names)


def _field(path: Path, name: str) -> int:
    words = _words(path)
    return int(words[words.index(name) + 1]) if name in words else 0
