"""
What a new worker does to itself before code of its function runs, so that it stays within its limits.

It joins its control groups, gets a ``/dev/shm`` of its own that ends with it, inherits orphans of its children, and, as
root, gives up the right to raise its own limits. What this process has no right to do is left out; enforcement.py says
which of it is in force.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from gpufaas_core.units import Bytes
from gpufaas_gpu_manager.isolation.kernel import call, libc
from gpufaas_gpu_manager.isolation.walls import Own, Walls

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 4, 15, 24, 36
_CLONE_NEWNS, _CLONE_NEWIPC = 0x0002_0000, 0x0800_0000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_SLAVE = 2, 4, 16384, 1 << 19
_CAPABILITIES: Final = struct.pack("Ii", 0x2008_0522, 0)
"""The version of their sets, and of this thread, for the kernel."""
_SETRESUID, _SETRESGID = (117, 119) if os.uname().machine == "x86_64" else (147, 149)
CAP_SYS_RESOURCE: Final = 24
CAP_SYS_ADMIN: Final = 21


class Confine(msgspec.Struct, frozen=True):
    """The limits of a worker besides its RLIMIT_DATA."""

    entries: tuple[str, ...] = ()
    """``cgroup.procs`` of its groups."""
    own_shm: bool = False
    """Give it a /dev/shm and System V memory of its own, which end with its last process."""
    cpus: tuple[int, ...] = ()
    """Numbers of the CPUs that it may use; none: all."""
    hard: Bytes = 0
    """The reservation in bytes up to which it may raise its own limit; 0: it may not."""
    walls: Walls = Walls()
    """What is in force on its node."""
    own: Own = Own()
    """What it has within them; of a standby, nothing until it is taken."""


NOT_CONFINED: Final = Confine()


def confine(wanted: Confine) -> None:
    """
    Confine this process, which has one thread, and all that it will start.

    :raises OSError: it cannot join its groups
    """
    join(wanted.entries)
    bind(wanted.cpus)
    inherit_orphans()
    if wanted.own_shm and not wanted.walls.root:
        _own_shm()
    give_up(CAP_SYS_RESOURCE)


def join(entries: tuple[str, ...], pid: int = 0) -> None:
    """
    Move process *pid*, or this one, to the control groups with these ``cgroup.procs``.

    :raises OSError: it cannot be moved, or is gone
    """
    for each in entries:
        with open(each, "wb", buffering=0) as procs:
            procs.write(str(pid).encode())


def bind(cpus: tuple[int, ...]) -> None:
    """Let this process run on *cpus* only; none: on all."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def inherit_orphans() -> None:
    """Inherit descendants that lose their parent, in place of init. Kept over exec, and not passed on to children."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(number: int) -> None:
    """Have the kernel send signal *number* to this process when its parent ends, in place of an earlier number."""
    libc.prctl(_PR_SET_PDEATHSIG, number)


def stay_with_parent(parent: int) -> None:
    """Have the kernel kill this process with *parent* again, which it forgets when credentials change."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def dumpable(is_so: bool) -> None:
    """Say whether processes of the same user may look into this one, and whether it leaves a core file."""
    libc.prctl(_PR_SET_DUMPABLE, int(is_so), 0, 0, 0)


def name_process(name: str) -> None:
    """Show *name* in `ps` and `top`, in 15 bytes: a fork would have the fork server's."""
    libc.prctl(_PR_SET_NAME, name.encode()[:15])


def may(capability: int) -> bool:
    """Whether this thread has *capability*, one of the first 32, in effect."""
    return bool(_capabilities()[0] >> capability & 1)


def give_up(capability: int) -> None:
    """Drop *capability*, one of the first 32, for good, for this process and for programs that it executes."""
    libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    sets = _capabilities()
    libc.capset(_CAPABILITIES, struct.pack("6I", *(each & ~(1 << capability) for each in sets[:3]), *sets[3:]))


def _capabilities() -> tuple[int, ...]:
    """Return those in effect, permitted and inheritable: of each the first 32, then the others."""
    sets = ctypes.create_string_buffer(24)
    libc.capget(_CAPABILITIES, sets)
    return struct.unpack("6I", sets.raw)


def give_up_all() -> None:
    """Drop all capabilities that this thread has."""
    libc.capset(_CAPABILITIES, bytes(24))


@contextlib.contextmanager
def real_ids(uid: int) -> Iterator[None]:
    """
    Give this thread the real uid and gid *uid* meanwhile, if it is not 0: root without CAP_SYS_RESOURCE, as in most
    containers, may limit processes of its real ids only. What it may do else goes by the effective ones.
    """
    mine = os.getuid(), os.getgid()
    try:
        _set_real(uid or mine[0], uid or mine[1])
        yield
    finally:
        _set_real(*mine)


def _set_real(uid: int, gid: int) -> None:
    """Of this thread alone; libc's functions set the ids of all threads."""
    call(_SETRESGID, gid, -1, -1)
    call(_SETRESUID, uid, -1, -1)


def set_data_limit(limit: Bytes, hard: Bytes) -> None:
    """Set RLIMIT_DATA of this process to *limit*, which it may raise to *hard*."""
    _, allowed = resource.getrlimit(resource.RLIMIT_DATA)
    if allowed != resource.RLIM_INFINITY:
        limit, hard = min(limit, allowed), min(hard, allowed)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, max(limit, hard)))


def _own_shm() -> None:
    """Mount a ``/dev/shm`` that only the control group limits: by default it may have half of the memory."""
    with contextlib.suppress(OSError):
        call("unshare", _CLONE_NEWNS | _CLONE_NEWIPC)
        # Mounts made outside are still seen here; what is mounted here is not seen outside.
        call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
        call("mount", b"gpufaas", b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=1777")
