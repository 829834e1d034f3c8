"""
Limits of workers beside the RLIMIT_DATA of each process, so that none holds more memory than its reservation.

CPU time on devices with a number of cores is limited by the same groups; without them, workers are bound to whole cores
(cores.py).

RLIMIT_DATA counts the private memory of one process, and makes an allocation fail, which a handler survives. Shared
memory and children are limited by a control group per worker where the platform may make some, else by a watcher
(memory_watch.py). Both end the worker, with all that it started.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from typing import Final, Literal

from gpufaas_core.constraints import AFFINITY, CGROUP_V1, CGROUP_V2, CPU_QUOTA, RLIMIT, WATCHER
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import ALL_COMPUTE
from gpufaas_core.units import Bytes, MiB, format_bytes
from gpufaas_functions.staged import Identity
from gpufaas_gpu_manager.cgroup_group import Group
from gpufaas_gpu_manager.cgroups import Cgroups, find
from gpufaas_gpu_manager.confine import CAP_SYS_ADMIN, CAP_SYS_RESOURCE, Confine, may
from gpufaas_gpu_manager.cores import CpuShare, Pinned, Pinning
from gpufaas_gpu_manager.isolation.walls import PIDS
from gpufaas_gpu_manager.memory_watch import MemoryWatch, used_by

Mode = Literal["auto", "cgroup", "watcher", "rlimit"]

_KERNEL: Final[Bytes] = 8 * MiB
"""What the kernel charges to a worker's group beside its memory: page tables, stacks, open files. 0.5 MiB measured for
an idle worker with torch; page tables are a 512th of memory in pages of 4 KiB."""

_THRASHES: Final = 3
"""Looks in a row with `_AGAIN` of the reservation read again each: more than one pass over a large file."""
_AGAIN: Final = 0.125


class Enforcement:
    """
    See module. `name` is the value of the devices' label; `why` says why there are no control groups, or what these do
    not count.
    """

    def __init__(self, mode: Mode = "rlimit", pids: int = PIDS) -> None:
        """:raises InvalidSpec: *mode* is ``cgroup``, and there are no control groups"""
        self._pids = pids
        self._groups: Cgroups | None = None
        self.watch: MemoryWatch | None = None
        """Watches the memory of workers where there are no control groups."""
        self._left: list[Group] = []
        self._spare: dict[object, Collection[int]] = {}
        self.why = ""
        self.name = RLIMIT
        may_raise = may(CAP_SYS_RESOURCE)
        self.hard_is_soft = may_raise
        """Whether this process may raise a worker's hard limit; then hard and soft limits are the same."""
        if mode in ("auto", "cgroup"):
            try:
                self._groups = find()
                self.name = CGROUP_V1 if self._groups.version == "v1" else CGROUP_V2
                if not self._groups.counts_sockets:
                    self.why = "this kernel does not charge the buffers of TCP sockets to control groups"
            except OSError as exc:
                self.why = f"no control groups: {exc}"
                if mode == "cgroup":
                    raise InvalidSpec(f"--memory-enforcement cgroup: {exc}") from None
        if self._groups is None and mode in ("auto", "watcher"):
            self.name = WATCHER
            self.watch = MemoryWatch()
        by_quota = self._groups is not None and self._groups.limits_cpu
        self.shares_by = CPU_QUOTA if by_quota else AFFINITY
        """What holds workers on devices with cores to their shares; the value of these devices' label."""
        self._pinning = Pinning()

    @property
    def has_groups(self) -> bool:
        """Whether there are control groups."""
        return self._groups is not None

    def group(self, name: str, device: str = "", cores: float = 0.0) -> Group | None:
        """
        Return a new control group with room for one worker's processes; None: this machine gives none.

        :param device: whose workers use *cores* together; empty: their CPU time is not limited
        :raises OSError: the kernel makes no more groups
        """
        self._left = [each for each in self._left if not each.remove()]
        if self._groups is None:
            return None
        group = self._groups.make(name, device, cores)
        group.limit_pids(self._pids)
        return group

    def pin(self, cpu: CpuShare) -> Pinned | None:
        """Bind a worker to CPUs; None: its control group holds it to its share."""
        return self._pinning.take(cpu) if self.shares_by == AFFINITY else None

    def stand_by(self, pool: object, pids: Collection[int]) -> None:
        """These children of fork servers, all of *pool*, are no workers, and did not escape from one."""
        if self.watch is not None:
            self._spare[pool] = pids
            self.watch.spare = frozenset(pid for each in self._spare.values() for pid in each)
            if not pids:
                del self._spare[pool]

    def remove(self, group: Group | None) -> None:
        """Remove *group*, and kill what is in it."""
        if group is not None and not group.remove():
            group.kill()
            self._left.append(group)

    def close(self) -> None:
        """Kill what is left of workers."""
        if self.watch is not None:
            self.watch.close()
        if self._groups is not None:
            self._groups.close()


def group_limit(memory: Bytes) -> Bytes:
    """Return the limit of a worker's control group for *memory* bytes of reservation."""
    return memory + _KERNEL + memory // 256


class WorkerLimits:
    """The limits of one worker; `close` them when it is reaped."""

    def __init__(
        self, enforcement: Enforcement, number: int, memory: Bytes, capacity: Bytes, on_over: Callable[[str], None],
        cpu: CpuShare | None, group: Group | None,
    ) -> None:  # fmt: skip
        """
        :param number: of the worker
        :param memory: in bytes; 0: it is not limited
        :param capacity: of its device, which it never exceeds
        :param on_over: called on the event loop with the reason when it must be ended for holding more
        :param cpu: what it may use of its device's cores; None: its CPU time is not limited
        :param group: that its process has joined already; None: it joins one of its own
        :raises OSError: the kernel makes no more groups
        """
        if group is None:
            group = enforcement.group(f"worker-{number}", *((cpu.device, cpu.cores) if cpu is not None else ()))
        self._enforcement = enforcement
        self._watch = enforcement.watch
        self._number = number
        self._memory = memory
        self._group = group
        self._on_over = on_over
        self.not_counted: frozenset[Identity] = frozenset()
        """Memory files that the platform has given it: weights that are charged to the node."""
        self._lent: Bytes = 0
        self._event = -1
        self._read_again = self._thrashed = 0
        self._cpu = cpu
        self._pinned = enforcement.pin(cpu) if cpu is not None else None
        cpus = self._pinned.cpus if self._pinned is not None else ()
        hard = 0 if enforcement.hard_is_soft else capacity
        self.confine = Confine(group.entries if group else (), may(CAP_SYS_ADMIN), cpus, hard)
        if cpu is not None and cpu.share:
            self.hold_to_share(cpu.share)
        if group is not None and memory:
            group.limit_memory(group_limit(memory))
            self._event = group.oom_event()
        if self._event >= 0:
            asyncio.get_running_loop().add_reader(self._event, self._out_of_memory)

    def started(self, pid: int, shared: int | None = None) -> None:
        """Its process is *pid*, forked from *shared*: memory shared with that counts once it is written to."""
        if self._watch is not None and self._memory:
            loop = asyncio.get_running_loop()

            def over(used: Bytes, reserved: Bytes) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(self._on_over, _reason(used, reserved))

            self._watch.add(self._number, pid, self._memory, shared, over, self.not_counted)

    def used(self, pid: int) -> Bytes:
        """Return the bytes that process *pid* and all that it started hold, with files in its ``/dev/shm``."""
        if self._group is not None:
            return self._group.held()
        return max(0, used_by(pid, not_counted=self.not_counted) - self._lent)

    def lend(self, memory: Bytes) -> None:
        """*memory* bytes of the platform's are mapped into the worker, where they are seen but not charged."""
        self._lent = memory
        if self._watch is not None and self._memory:
            self._watch.limit(self._number, self._memory + memory)

    def thrashes(self) -> bool:
        """
        Whether it read the same files again and again in the last `_THRASHES` calls of this: its code and weights do
        not fit beside its memory. Files are charged to a control group like memory, but no allocation fails.
        """
        if self._group is None or not self._memory:
            return False
        before, self._read_again = self._read_again, self._group.read_again()
        more = self._read_again - before > _AGAIN * self._memory
        self._thrashed = self._thrashed + 1 if more else 0
        return self._thrashed >= _THRASHES

    def hold_to(self, memory: Bytes) -> None:
        if not self._memory:
            return
        self._memory = memory
        if self._watch is not None:
            self._watch.limit(self._number, memory + self._lent)
        if self._group is not None:
            # Version 1 refuses less than what it holds now: the old limit stays until the next change.
            with contextlib.suppress(OSError):
                self._group.limit_memory(group_limit(memory))

    def hold_to_share(self, share: int) -> None:
        """Let it use *share* per cent of its device's cores from now on; 0: all. Not if it is bound to CPUs."""
        if self._cpu is not None and self._group is not None and self._pinned is None:
            self._group.limit_cpu(self._cpu.cores * share / ALL_COMPUTE if share else None)

    def kill(self) -> None:
        """Kill all of its processes at once, also those that fork as fast as they can."""
        if self._group is not None:
            self._group.kill()

    def close(self) -> str:
        """Remove the limits; return why it was killed if that was for memory, else an empty string."""
        reason = ""
        if self._pinned is not None:
            self._pinned.give_back()
        if self._event >= 0:
            asyncio.get_running_loop().remove_reader(self._event)
            os.close(self._event)
            self._event = -1
        if self._watch is not None:
            self._watch.remove(self._number)
        if self._group is not None:
            if self._group.oom_kills():
                reason = _reason(self._memory, self._memory)
            self._enforcement.remove(self._group)
            self._group = None
        return reason

    def _out_of_memory(self) -> None:
        """Version 1 kills one process of it; the others would wait for that one for ever."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._event, 8)
        self._on_over(_reason(self._memory, self._memory))


def _reason(used: Bytes, reserved: Bytes) -> str:
    return (
        f"out of memory: it used {format_bytes(used)} of {format_bytes(reserved)} reserved, "
        "with its shared memory and all processes that it started"
    )
