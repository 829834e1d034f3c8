"""What each version of control groups offers: a group, and the groups of one platform. `cgroups` says what they are."""

from typing import Protocol

from gpufaas_core.units import Bytes


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
    counts_sockets: bool
    """Whether a group with a limit on memory is held to some for the buffers of its sockets."""

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
