"""
What the port for control groups promises, of the kernel's own where groups can be made here (version 1 or 2), and of
version 2 on a directory with the kernel's file names, in which this file does what the kernel would do.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, until

from gpufaas_gpu_manager import cgroup_files, cgroups_v1, cgroups_v2
from gpufaas_gpu_manager.cgroup_group import Group
from gpufaas_gpu_manager.cgroups import Cgroups, find
from gpufaas_gpu_manager.cgroups_v2 import CgroupsV2, GroupV2
from gpufaas_gpu_manager.proc import cpu_seconds, started_at

MiB = 1024 * 1024
V2_FILES = {
    "cgroup.controllers": "cpu memory pids",
    "cgroup.subtree_control": "",
    "cgroup.procs": "",
    "cgroup.kill": "",
    "memory.max": "max",
    "memory.stat": "anon 0\nfile 0\ninactive_anon 0\nactive_anon 0\nunevictable 0",
    "memory.swap.max": "max",
    "memory.oom.group": "0",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0",
    "pids.max": "max",
    "cpu.max": "max 100000",
    "cpu.weight": "100",
}


class Directory:
    """A tree of version 2 in a plain directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fill(root)

    def fill(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        for name, content in V2_FILES.items():
            (directory / name).write_text(content)

    def remove(self, directory: Path) -> bool:
        if not directory.exists():
            return True
        self.settle(directory)
        if (directory / "cgroup.procs").exists() and (directory / "cgroup.procs").read_text().split():
            return False
        if any(each.is_dir() for each in directory.iterdir()):
            return False
        shutil.rmtree(directory)
        return True

    def settle(self, directory: Path) -> None:
        procs = directory / "cgroup.procs"
        if (directory / "cgroup.kill").read_text() == "1":
            for pid in map(int, procs.read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            (directory / "cgroup.kill").write_text("")
            procs.write_text("")

    def join(self, group: Group, pid: int) -> None:
        with open(group.entries[0], "a") as procs:
            procs.write(f"{pid}\n")


@pytest.fixture(params=["kernel", "directory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Directory:
    tree = Directory(tmp_path / "unified")
    monkeypatch.setattr(cgroup_files, "make", tree.fill)
    monkeypatch.setattr(cgroup_files, "remove", tree.remove)
    return tree


@pytest.fixture
def made(kind: str, request: pytest.FixtureRequest) -> Iterator[Cgroups]:
    groups: Cgroups
    if kind == "directory":
        tree: Directory = request.getfixturevalue("directory")
        groups = CgroupsV2(tree.root, _name(os.getpid()))
    else:
        groups = kernels()
    yield groups
    groups.close()


def kernels() -> Cgroups:
    try:
        return find()
    except OSError as exc:
        pytest.skip(f"no control groups can be made here: {exc}")


def _name(pid: int, started: int | None = None) -> str:
    began = started_at(pid) if started is None else started
    return f"gpufaas-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-{began}-0"


Run = Callable[[Group, str], "subprocess.Popen[str]"]


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run Python code in a group; killed at the end."""
    running = []
    kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else "kernel"

    def start(group: Group, code: str) -> "subprocess.Popen[str]":
        join = "".join(f"open({entry!r}, 'w').write('0')\n" for entry in group.entries) if kind == "kernel" else ""
        program = f"{join}print('joined', flush=True)\n{code}"
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        if kind == "directory":
            with open(group.entries[0], "a") as procs:
                procs.write(f"{process.pid}\n")
        return process

    yield start
    for each in running:
        each.kill()
        each.communicate()


def test_a_process_that_joined_is_in_the_group_and_keeps_it_from_being_removed(made: Cgroups, run: Run) -> None:
    group = made.make("worker-1")

    process = run(group, "import time; time.sleep(60)")

    assert group.pids() == [process.pid]
    assert not group.remove()


def test_kill_ends_all_of_it_and_then_it_can_be_removed(made: Cgroups, run: Run, kind: str) -> None:
    group = made.make("worker-1")
    forks = "if os.fork() == 0: os.setsid()" if kind == "kernel" else "pass"
    process = run(group, f"import os, time\n{forks}\nprint('all', flush=True)\ntime.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == "all\n"

    group.kill()

    until(lambda: [process.poll()] and group.remove(), "it can be removed")  # a zombie is in its group yet
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert group.remove(), "asked again, it is gone"


def test_those_that_are_forked_while_others_are_killed_are_killed_too_and_none_is_waited_for() -> None:
    """A process that holds much memory takes long to be gone: the event loop of a node has other things to do."""
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    looks = [[children[0].pid], [each.pid for each in children], [each.pid for each in children]]

    class Forking(GroupV2):
        def pids(self) -> list[int]:
            return looks.pop(0)  # a look too many fails

    try:
        assert Forking(Path()).kill_all()
        assert [each.wait(LIMIT_S) for each in children] == [-signal.SIGKILL] * 2
    finally:
        for each in children:
            each.kill()


def test_limits_can_be_set_changed_and_taken_away(made: Cgroups) -> None:
    group = made.make("worker-1")
    for size in (64 * MiB, 128 * MiB, 32 * MiB):
        group.limit_memory(size)
    group.limit_pids(100)
    for cores in (0.5, 2.0, None):
        group.limit_cpu(cores)
    assert group.oom_kills() == 0


@pytest.mark.parametrize(("booted", "counts"), [("quiet", True), ("quiet cgroup.memory=nokmem,nosocket", False)])
def test_version_2_says_whether_it_counts_sockets(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, booted: str, counts: bool
) -> None:
    (tmp_path / "cmdline").write_text(booted)
    monkeypatch.setattr(cgroups_v2, "_BOOTED_WITH", tmp_path / "cmdline")

    assert CgroupsV2(directory.root, _name(os.getpid())).counts_sockets == counts


def test_version_1_goes_on_without_a_limit_on_sockets_and_says_so(
    kernel: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel.version != "v1":
        pytest.skip("version 2 charges them as memory")
    assert kernel.counts_sockets
    monkeypatch.setattr(cgroups_v1, "_SOCKETS", "memory.kmem.tcp.none_in_bytes")
    without = find("v1")
    try:
        without.make("worker-1").limit_memory(64 * MiB)
        assert not without.counts_sockets
    finally:
        without.close()


def test_closing_ends_what_is_left(made: Cgroups, run: Run) -> None:
    process = run(made.make("worker-1"), "import time; time.sleep(60)")

    made.close()

    assert process.wait(LIMIT_S) == -signal.SIGKILL


# --- what only the kernel can show ---


@pytest.fixture
def kernel() -> Iterator[Cgroups]:
    groups = kernels()
    yield groups
    groups.close()


def _in(group: Group, code: str) -> "subprocess.CompletedProcess[str]":
    join = "".join(f"open({entry!r}, 'w').write('0')\n" for entry in group.entries)
    return subprocess.run([sys.executable, "-c", join + code], capture_output=True, text=True, timeout=60, check=False)


PRIVATE = """
kept = [bytearray(b'x' * (1 << 20)) for _ in range(300)]
"""
SHARED = """
import mmap
kept = [mmap.mmap(-1, 1 << 20) for _ in range(300)]
for each in kept:
    each.write(b'x' * (1 << 20))
"""
FORKS = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made, flush=True)
    os.close(1)
"""


def used_up(directory: Path) -> int | None:
    """Return in how many periods a group had used all of its CPU time, and was stopped; None: it has no limit."""
    stat = directory / "cpu.stat"
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(fields["nr_throttled"]) if "nr_throttled" in fields else None


@pytest.mark.parametrize("take", [PRIVATE, SHARED])
def test_more_than_its_memory_ends_it_and_is_counted(kernel: Cgroups, take: str) -> None:
    group = kernel.make("worker-1")
    group.limit_memory(48 * MiB)

    assert _in(group, take).returncode == -signal.SIGKILL

    assert group.oom_kills() >= 1


def test_enough_memory_lets_it_end_well(kernel: Cgroups) -> None:
    group = kernel.make("worker-1")
    group.limit_memory(200 * MiB)
    assert _in(group, "x = bytearray(b'x' * (64 << 20)); print(len(x))").stdout == f"{64 * MiB}\n"
    assert group.oom_kills() == 0


def test_what_it_holds_is_all_of_its_memory_and_no_page_cache(kernel: Cgroups, run: Run, tmp_path: Path) -> None:
    """Also a file in a tmpfs that is neither open nor mapped. The kernel counts per processor: some pages come late."""
    group, cached = kernel.make("worker-1"), tmp_path / "cached"
    shared = Path(f"/dev/shm/held-{os.getpid()}")
    try:
        run(
            group,
            f"""if True:
                private = b"x" * (20 << 20)
                open({str(shared)!r}, "wb").write(bytes(30 << 20))
                open({str(cached)!r}, "wb").write(bytes(40 << 20))
                print("done", flush=True)
                import time; time.sleep(60)""",
        ).stdout.readline()  # type: ignore[union-attr]

        until(lambda: 48 * MiB <= group.held() < 75 * MiB, lambda: f"it holds {group.held()} bytes")
    finally:
        shared.unlink(missing_ok=True)


def test_files_that_do_not_fit_are_read_again(kernel: Cgroups, run: Run, tmp_path: Path) -> None:
    group, file = kernel.make("worker-1"), tmp_path / "file"
    group.limit_memory(40 * MiB)

    run(
        group,
        f"""if True:
            import mmap, os
            with open({str(file)!r}, "wb") as out:
                out.write(bytes(80 << 20))
                os.fsync(out.fileno())
            pages = mmap.mmap(os.open({str(file)!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ)
            for _ in range(3):
                pages[::4096]
            print("done", flush=True)""",
    ).stdout.readline()  # type: ignore[union-attr]

    until(lambda: group.read_again() > 40 * MiB, "they were read again")


def test_a_fork_too_many_fails(kernel: Cgroups, run: Run) -> None:
    group = kernel.make("worker-1")
    group.limit_pids(10)

    process = run(group, FORKS)

    assert process.stdout is not None
    assert process.stdout.readline() == "9\n"
    group.kill()


def test_in_version_1_all_groups_together_weigh_less_than_a_process_of_the_platform(kernel: Cgroups) -> None:
    homes = [Path(each).parents[1] for each in kernel.make("worker-1").entries]
    shares = [int((each / "cpu.shares").read_text()) for each in homes if (each / "cpu.shares").exists()]
    if not shares:
        pytest.skip("this machine has no groups of version 1 for CPU time")
    assert shares == [128], "a process, or the group that it is in, has 1024"


def test_groups_within_one_share_its_cores_and_each_is_held_to_its_own(kernel: Cgroups, run: Run) -> None:
    if not kernel.limits_cpu:
        pytest.skip("no CPU controller here")
    groups = [kernel.make(f"of-a-device-{share}", "cpu-0", 0.4) for share in (25, 100)]
    groups[0].limit_cpu(0.1)
    busy = [run(each, "while True: pass") for each in groups]
    began, before = time.monotonic(), [cpu_seconds(each.pid) for each in busy]
    first = next(each for each in (Path(entry).parent for entry in groups[0].entries) if used_up(each) is not None)

    until(lambda: (used_up(first) or 0) > 20, "it is stopped when its time is used up")
    used = [cpu_seconds(each.pid) - of for each, of in zip(busy, before, strict=True)]
    took = time.monotonic() - began

    assert used[0] <= 0.1 * took + 0.1
    assert sum(used) <= 0.4 * took + 0.1
    if kernel.version == "v1":  # version 2 gives what there is
        with pytest.raises(OSError, match="Invalid argument"):
            groups[0].limit_cpu(4.0)
    kernel.close()
    assert all(each.wait(LIMIT_S) for each in busy), "groups within groups are ended, too"


# --- what a killed platform left ---


def test_groups_of_a_platform_that_is_dead_are_ended_and_those_of_a_living_one_left_alone(directory: Directory) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead, living = (CgroupsV2(directory.root, _name(os.getpid())) for _ in range(2))
    directory.join(dead.make("worker-1"), left.pid)
    (directory.root / _name(os.getpid())).rename(directory.root / _name(os.getpid(), started=1))
    living = CgroupsV2(directory.root, _name(os.getppid()))
    directory.join(living.make("worker-1"), other.pid)

    CgroupsV2(directory.root, _name(os.getpid()))

    assert left.wait(LIMIT_S) == -signal.SIGKILL
    assert (directory.root / _name(os.getppid())).exists()
    assert not (directory.root / _name(os.getpid(), started=1)).exists()
    other.terminate()
    assert other.wait(LIMIT_S) == -signal.SIGTERM, "it lived until then"


# --- version 2: what is written ---


def test_version_2_writes_what_the_kernel_reads(directory: Directory) -> None:
    group = CgroupsV2(directory.root, _name(os.getpid())).make("worker-1")
    path = Path(group.entries[0]).parent

    group.limit_memory(64 * MiB)
    group.limit_pids(100)
    group.limit_cpu(1.5)

    written = {name: (path / name).read_text() for name in V2_FILES}
    assert written["memory.max"] == str(64 * MiB)
    assert written["memory.swap.max"] == "0"
    assert written["memory.oom.group"] == "1"
    assert written["pids.max"] == "100"
    assert written["cpu.max"] == "30000 20000"
    assert (path.parent / "cpu.weight").read_text() == "12", "all workers together weigh less than the platform: 100"
    assert (path.parent / "cgroup.subtree_control").read_text() in ("+cpu", "+pids", "+memory")


def test_version_2_limits_the_cores_of_groups_together(directory: Directory) -> None:
    groups = CgroupsV2(directory.root, _name(os.getpid()))
    assert groups.limits_cpu

    first = groups.make("worker-1", "cpu-0", 0.6)
    second = groups.make("worker-2", "cpu-0", 0.6)
    first.limit_cpu(0.006)

    one, other = (Path(each.entries[0]).parent for each in (first, second))
    assert one.parent == other.parent
    assert (one.parent / "cpu.max").read_text() == "12000 20000"
    assert (one / "cpu.max").read_text() == "1000 166667", "the kernel takes no quota below 1 ms"
    assert (other / "cpu.max").read_text() == "max 100000"
    assert "cpu" in (one.parent / "cgroup.subtree_control").read_text()
    groups.close()
    assert not one.parent.exists()


def test_version_2_counts_its_kills(directory: Directory) -> None:
    group = CgroupsV2(directory.root, _name(os.getpid())).make("worker-1")
    events = Path(group.entries[0]).with_name("memory.events")
    events.write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 1")
    assert group.oom_kills() == 2


def test_version_2_tells_memory_from_page_cache(directory: Directory) -> None:
    group = CgroupsV2(directory.root, _name(os.getpid())).make("worker-1")
    stat = Path(group.entries[0]).with_name("memory.stat")
    stat.write_text(
        "anon 5\nfile 9000\nshmem 7\ninactive_anon 4\nactive_anon 8\ninactive_file 8993\nunevictable 3\n"
        "workingset_refault_anon 1\nworkingset_refault_file 2"
    )
    assert group.held() == 15
    assert group.read_again() == 2 * os.sysconf("SC_PAGE_SIZE")


# --- which is found ---


def process(tmp_path: Path, cgroup: str, mounts: str) -> Path:
    (tmp_path / "cgroup").write_text(cgroup)
    (tmp_path / "mountinfo").write_text(mounts)
    return tmp_path


def test_version_2_with_the_memory_controller_is_taken_below_our_own_group(
    directory: Directory, tmp_path: Path
) -> None:
    directory.fill(directory.root / "user.slice")
    mount = f"30 23 0:26 / {directory.root} rw,nosuid shared:4 - cgroup2 cgroup2 rw"

    groups = find(process=process(tmp_path, "0::/user.slice\n", mount))

    assert groups.version == "v2"
    assert Path(groups.make("worker-1").entries[0]).is_relative_to(directory.root / "user.slice")


def test_in_a_container_that_sees_only_its_own_part_that_part_is_the_parent(
    directory: Directory, tmp_path: Path
) -> None:
    mount = f"30 23 0:26 /docker/abc {directory.root} rw - cgroup2 cgroup2 rw"
    groups = find(process=process(tmp_path, "0::/docker/abc\n", mount))
    assert Path(groups.make("worker-1").entries[0]).parent.parent.parent == directory.root


@pytest.mark.parametrize(
    ("cgroup", "mounts", "why"),
    [
        ("0::/\n", "", "v2 is not mounted; v1 has no memory controller mounted"),
        ("0::/\n", "30 23 0:26 / ROOT/none rw - cgroup2 cgroup2 rw", "v2 has no memory controller"),
        ("4:memory:/a\n", "30 23 0:26 / /proc rw - cgroup cgroup rw,memory", "/proc/a"),
    ],
)
def test_where_there_are_none_it_says_why(tmp_path: Path, cgroup: str, mounts: str, why: str) -> None:
    with pytest.raises(OSError, match=why):
        find(process=process(tmp_path, cgroup, mounts.replace("ROOT", str(tmp_path))))


def test_a_group_with_processes_of_others_is_not_taken(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a login session's is: version 2 gives no controllers to groups below one that has processes."""
    write = cgroup_files.write

    def busy(path: Path, text: str) -> None:
        if path == directory.root / "cgroup.subtree_control" and path.with_name("cgroup.procs").read_text().strip():
            raise OSError(16, "Device or resource busy")
        write(path, text)

    monkeypatch.setattr(cgroup_files, "write", busy)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (directory.root / "cgroup.procs").write_text(f"{os.getpid()}\n{other.pid}\n")
        with pytest.raises(OSError, match="systemd-run --user --scope"):
            CgroupsV2(directory.root, _name(os.getpid()))
    finally:
        other.kill()
        other.wait()


def test_an_unknown_stale_name_is_left_alone(directory: Directory) -> None:
    directory.fill(directory.root / "gpufaas-mine")
    CgroupsV2(directory.root, _name(os.getpid()))
    assert (directory.root / "gpufaas-mine").exists()
    assert isinstance(GroupV2(directory.root).pids(), list)
