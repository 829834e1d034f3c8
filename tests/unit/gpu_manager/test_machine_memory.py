"""The memory that this process may have: the machine's, or less in a container. Groups are directories here."""

import os
from pathlib import Path

import pytest

from gpufaas_gpu_manager.machine_memory import available_memory, total_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
LIMIT = 256 << 20


def process(tmp_path: Path, kind: str, path: str) -> tuple[Path, Path]:
    """Return the directory of a process in group *path*, and where the groups are mounted."""
    proc, mount = tmp_path / "proc", tmp_path / "mount"
    own = mount / path.strip("/")
    own.mkdir(parents=True)
    for each in own, *own.parents[: path.count("/")]:
        (each / "cgroup.procs").touch()
    proc.mkdir()
    controller = "memory" if kind == "cgroup" else ""
    (proc / "cgroup").write_text(f"4:{controller}:{path}\n")
    (proc / "mountinfo").write_text(f"35 31 0:32 / {mount} rw,relatime - {kind} {kind} rw,{controller or 'x'}\n")
    return proc, mount


@pytest.mark.parametrize(
    ("kind", "limit", "used", "unlimited", "cache"),
    [
        ("cgroup2", "memory.max", "memory.current", "max", "inactive_file"),
        ("cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", str((1 << 63) - 4096), "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_the_limit_of_a_group_around_ours_counts(
    tmp_path: Path, kind: str, limit: str, used: str, unlimited: str, cache: str
) -> None:
    """As of a service with MemoryMax, or in a container that sees the groups of the machine."""
    proc, mount = process(tmp_path, kind, "/pod/own")
    (mount / "pod" / "own" / limit).write_text(unlimited)
    (mount / "pod" / limit).write_text(f"{LIMIT}\n")
    (mount / "pod" / used).write_text(f"{LIMIT - 1000}\n")
    (mount / "pod" / "memory.stat").write_text(f"anon 5\n{cache} 3000\nshmem 70\n")

    assert total_memory(proc) == LIMIT
    assert available_memory(proc) == 4000, "what is in the page cache can be had"


@pytest.mark.parametrize("kind", ["cgroup2", "cgroup"])
def test_groups_without_a_limit_leave_the_machine(tmp_path: Path, kind: str) -> None:
    proc, mount = process(tmp_path, kind, "/own")
    (mount / "own" / "memory.max").write_text("max\n")

    assert total_memory(proc) == MACHINE
    assert 0 < available_memory(proc) < MACHINE


def test_a_kernel_without_control_groups(tmp_path: Path) -> None:
    assert total_memory(tmp_path) == MACHINE
    assert available_memory(tmp_path) > 0
