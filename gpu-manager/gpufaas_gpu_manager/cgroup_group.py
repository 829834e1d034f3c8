"""A control group, by what both versions have in common. `cgroups` says what groups are."""

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Final

from gpufaas_core.units import Bytes
from gpufaas_gpu_manager import cgroup_files as files

_PAGE: Final[Bytes] = os.sysconf("SC_PAGE_SIZE")
_ROUNDS: Final = 50
"""Looks at a group that was killed: for processes that were forked meanwhile, or are not gone yet."""
_ROUND_S: Final = 0.002


class Group(ABC):
    """Some processes, and all that they start."""

    totals: ClassVar[str]
    """What comes before the names in ``memory.stat`` that count what is below the group, too."""
    events: ClassVar[str]
    """The file that counts kills."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        """:param directories: of its controllers; in version 2 they are the same"""
        self._directories = directories
        self._memory = directories["memory"]
        self._each = list(dict.fromkeys(directories.values()))
        self.entries = tuple(str(each / "cgroup.procs") for each in self._each)
        """Files into each of which a process writes ``0`` to join."""

    @abstractmethod
    def limit_memory(self, size: Bytes) -> None:
        """
        Let the group hold *size* bytes at most. The kernel reclaims memory beyond it if it can.

        :raises OSError: version 1 refuses a limit below what cannot be reclaimed
        """

    def limit_pids(self, count: int) -> None:
        """Let the group have *count* processes and threads at most: further forks fail."""
        if "pids" in self._directories:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # that controller was not given to us
                files.write(self._directories["pids"] / "pids.max", str(count))

    @abstractmethod
    def limit_cpu(self, cores: float | None) -> None:
        """
        Let the group use *cores* seconds of CPU time per second; None: no limit.

        :raises OSError: a group above may use less
        """

    def held(self) -> Bytes:
        """Return the private and shared memory that is charged now, without page cache."""
        return files.held(self._memory / "memory.stat", self.totals)

    def read_again(self) -> Bytes:
        """Return how many bytes of files were read again because the group had no room to keep them."""
        return files.field(self._memory / "memory.stat", f"{self.totals}workingset_refault_file") * _PAGE

    def oom_kills(self) -> int:
        """Return how often the kernel killed a process of the group for its memory."""
        return files.field(self._memory / self.events, "oom_kill")

    def oom_event(self) -> int:
        """Return a file descriptor that becomes readable when the group is out of memory; -1: the kernel kills all."""
        return -1

    def pids(self) -> list[int]:
        return files.pids(self._each)

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to all of it, and to what is forked meanwhile. They may take a moment to be gone."""

    def remove(self) -> bool:
        """Remove the group; False: processes are left in it."""
        gone = [files.remove(each) for each in self._each]
        return all(gone)

    def kill_all(self, rounds: int = _ROUNDS) -> bool:
        """
        Kill until no others are there: a process that was sent SIGKILL does not fork. The killed ones are not waited
        for: a large one takes a tenth of a second until it is gone.

        :return: False if there were others each time
        """
        killed: set[int] = set()
        for _ in range(rounds):
            found = set(self.pids()) - killed
            if not found:
                return True
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            killed |= found
        return False


def clear(home: Path, group: Callable[[Path], Group]) -> None:
    """Kill the processes in the groups below *home*, and remove the groups and *home*."""
    if not home.name.endswith("-platform"):  # that one has the platform's ancestors, too
        for directory, _, _ in os.walk(home, topdown=False):
            if directory != str(home):
                found = group(Path(directory))
                found.kill()
                for _ in range(_ROUNDS):
                    if found.remove():
                        break
                    time.sleep(_ROUND_S)
    files.remove(home)
