"""
Control groups: processes whose memory, CPU and number the kernel limits together.

`Group` (`cgroup_group`) has two forms: version 1 (a tree of directories for each controller) and version
2 (one tree). `find` returns the one that can be used here. Groups are made below this process's own group, so that the
limits of the platform itself hold for them, too: ``OWN/gpufaas-PLATFORM/NAME``, or one level deeper where groups share
a limit on CPU time. PLATFORM names the process that made them, so that the next platform recognises those that a killed
one left.

Memory is everything that the kernel charges to the group: private, shared (MAP_SHARED, memfd, files in a tmpfs), page
tables, kernel stacks, pipes and buffers of Unix sockets. Those of IP sockets are charged as memory by version 2 only;
version 1 has a limit of their own for them. Page cache is charged, too, but the kernel reclaims it before the group
is out of memory. Pages that a process shared with its parent before it joined stay charged to the parent's group.
"""

import itertools
import os
from pathlib import Path
from typing import Final

from gpufaas_gpu_manager import cgroup_files as files
from gpufaas_gpu_manager.cgroup_mounts import own_groups
from gpufaas_gpu_manager.cgroups_v1 import CgroupsV1
from gpufaas_gpu_manager.cgroups_v2 import CgroupsV2
from gpufaas_gpu_manager.proc import started_at

Cgroups = CgroupsV1 | CgroupsV2
"""The groups of one platform."""

_serial: Final = itertools.count()


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
        elif "memory" not in files.words(parent / "cgroup.controllers"):
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
