"""The last that a process does to itself to become a worker: it goes within the walls (`root.begin` may come ahead)."""

import os
import resource
from collections.abc import Sequence
from typing import Final

from gpufaas_gpu_manager.confine import dumpable, give_up_all, stay_with_parent
from gpufaas_gpu_manager.isolation import kernel, landlock, root, seccomp
from gpufaas_gpu_manager.isolation.walls import HOME, PIDS, Own, Walls

_FILES: Final = ("/tmp", "/dev/shm", HOME)  # in its own root


def enter(walls: Walls, own: Own) -> None:
    """
    Confine this process, which has begun, and all that it will start, for good.

    :raises OSError: the kernel refuses it: this process must end
    """
    if walls == Walls():
        return
    if walls.root:
        root.finish(walls, own)
    _limit(walls, own)
    if own.uid:
        become(own.uid, own.devices)
    else:
        give_up_all()
    dumpable(True)
    kernel.no_new_privs()
    if walls.landlock:
        _restrict(walls, own)
    if walls.seccomp:
        seccomp.install(deny_others=0 if own.uid else os.getpid())


def become(uid: int, devices: Sequence[str] = ()) -> None:
    """
    Change to *uid* and its gid, for good, without capabilities, and with the groups of *devices* that are theirs only.

    :raises OSError: this process may not
    """
    parent = os.getppid()
    os.setgroups(sorted({about.st_gid for about in map(os.stat, devices) if about.st_gid and not about.st_mode & 2}))
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    stay_with_parent(parent)


def _limit(walls: Walls, own: Own) -> None:
    """No core files, which would hold secrets; and no more processes and larger files than one worker may have."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = {resource.RLIMIT_NPROC: PIDS if own.uid or walls.root == "user" else 0}
    if walls.root and not any(each.endswith(":rw") for each in walls.binds):
        limits[resource.RLIMIT_FSIZE] = own.room
    # Files on their way through sockets count for a user. The platform, as that user, must be able to send some yet.
    limits[resource.RLIMIT_NOFILE] = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    for kind, limit in limits.items():
        allowed = resource.getrlimit(kind)[1]
        if limit and not 0 <= allowed <= limit:  # -1: it is not limited
            resource.setrlimit(kind, (limit, limit))


def _restrict(walls: Walls, own: Own) -> None:
    seen = root.seen(walls)
    if walls.root:  # all that it holds may be read; the machine's by no way, were one left open
        read, write = ["/"], [*_FILES, *filter(None, [own.scratch]), *own.write, *seen.opened]
    else:
        read, write = [*seen.paths, *own.read, "/proc", *root.SYS], ["/dev/shm", *own.write, *seen.opened]
    landlock.restrict(read, write, own.ports, walls.landlock, (*root.NODES, *own.devices))
