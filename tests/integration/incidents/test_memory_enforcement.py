"""
Functions that take memory in ways that no allocation of theirs fails for, and that leave processes behind: each ends
for it, with the reason, and nothing of it is left. Its neighbours and the platform notice nothing.

Each is replayed with what the machine has (control groups, if the platform may make some) and with the watcher.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.conftest import ECHO_MODEL, HTTP, Platform, until

from gpufaas_gpu_manager.cgroups import find

Make = Callable[..., Platform]
MiB = 1024 * 1024
DEVICE = 400 * MiB
RESERVED = 96 * MiB


def _cgroups() -> str:
    """Return the version of control groups that can be made here; empty: none can."""
    try:
        groups = find()
    except OSError:
        return ""
    groups.close()
    return groups.version


@pytest.fixture(scope="module", params=["cgroup", "watcher"])
def held(request: pytest.FixtureRequest, module_platform: Make) -> Platform:
    if request.param == "cgroup" and not _cgroups():
        pytest.skip("no control groups can be made here")
    platform = module_platform("--device", f"cpu:0={DEVICE // MiB}MiB", "--memory-enforcement", request.param)
    return platform.start()


@pytest.fixture
def platform(held: Platform) -> Iterator[Platform]:
    yield held
    held.remove_all()
    until(held.is_empty)


NEIGHBOUR = """
    import os

    def load(device):
        return None

    def handle(model, event, context):
        return str(os.getpid())
"""
HOSTILE = """
    import ctypes, mmap, os, subprocess, sys, time

    def touch(memory, size):
        for at in range(0, size, 4096):
            memory[at] = 1
        time.sleep(5)

    def shared(size):
        touch(mmap.mmap(-1, size), size)

    def memfd(size):
        fd = os.memfd_create("hidden")
        for _ in range(size >> 20):
            os.write(fd, bytes(1 << 20))
        time.sleep(5)

    def shm_file(size):
        with open("/dev/shm/gpufaas-test-hog", "wb", 0) as file:
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
            time.sleep(5)

    def children(size):
        take = f"import time; x = bytearray({size // 6}); x[::4096] = bytes(len(x) // 4096); time.sleep(5)"
        each = [subprocess.Popen([sys.executable, "-c", take], start_new_session=True) for _ in range(6)]
        [one.wait() for one in each]

    def raised_limit(size):
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except ValueError:
            pass
        x = bytearray(b"x" * size)
        time.sleep(5)

    def handle(event, context):
        globals()[event.text](300 << 20)
        return "took it"
"""


@pytest.mark.parametrize("how", ["shared", "memfd", "shm_file", "children", "raised_limit"])
def test_memory_that_no_allocation_fails_for_ends_its_worker_only(platform: Platform, how: str) -> None:
    neighbour = platform.deploy("neighbour", NEIGHBOUR)
    hog = platform.deploy("hog", HOSTILE, HTTP, memory="96Mi")
    its_worker = platform.call(neighbour).text

    with Held(platform) as sampled:
        answer = platform.call(hog, how.encode())

    assert answer.status_code in (500, 502, 507), answer.text
    assert "memory" in answer.text
    assert "96.0 MiB" in answer.text or "96 MiB" in answer.text or "MemoryError" in answer.text, answer.text
    assert platform.call(neighbour).text == its_worker
    assert sampled.most_bytes < DEVICE


class Held:
    """Looks from outside at what all descendants of the fork server hold, in bytes: private and shared memory."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._over = threading.Event()
        self.most_bytes = 0

    def __enter__(self) -> "Held":
        self._zygote = self._platform.zygote()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            held = sum(_held(each.pid) for each in self._zygote.children(recursive=True))
            self.most_bytes = max(self.most_bytes, held)


def _held(pid: int) -> int:
    try:
        # In this order: what is taken meanwhile must not look as if another process had it, too.
        lines = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("Rss")]
        lines += Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (each.partition(":") for each in lines)}
    # Private_Dirty has shared memory, too, where only this process has it mapped.
    shared = sizes["Pss_Shmem"] if sizes["Pss_Shmem"] < sizes.get("RssShmem", 0) else 0
    return sizes["Private_Dirty"] + shared


ESCAPES = """
    import os, subprocess, sys, time

    def setsid(path):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", path], start_new_session=True)

    def daemon(path):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", path])
            os._exit(0)
        os.wait()

    def stubborn(path):
        code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", code, path], start_new_session=True)

    def disowned(path):
        import ctypes
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        daemon(path)

    def handle(event, context):
        how, path = event.text.split()
        globals()[how](path)
        return str(os.getpid())
"""


def _named(text: str) -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter(["cmdline", "status"])
        if text in (each.info["cmdline"] or []) and each.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("how", ["setsid", "daemon", "stubborn", "disowned"])
def test_what_a_worker_started_is_gone_before_its_memory_is_free(platform: Platform, how: str) -> None:
    path = platform.deploy("escapes", ESCAPES, HTTP)
    mark = f"gpufaas-test-{how}-{time.monotonic_ns()}"
    assert platform.call(path, f"{how} {mark}".encode()).status_code == 200
    if how != "disowned":
        until(lambda: _named(mark))
    whole = platform.deploy("whole", f"{NEIGHBOUR}    # never measured: {how}", memory=f"{DEVICE // MiB}Mi")

    assert platform.call(whole).status_code == 200

    assert not _named(mark)


@pytest.mark.parametrize("killed", ["fork server", "platform"])
def test_nothing_outlives_the_platform_or_its_fork_server(make_platform: Make, killed: str) -> None:
    platform = make_platform("--device", "cpu:0=400MiB", "--memory-enforcement", "watcher").start()
    path = platform.deploy("escapes", ESCAPES, HTTP)
    mark = f"gpufaas-test-{time.monotonic_ns()}"
    assert platform.call(path, f"daemon {mark}".encode()).status_code == 200
    until(lambda: _named(mark))

    if killed == "platform":
        platform.kill()
    else:
        platform.zygote().kill()

    until(lambda: not _named(mark))
    if killed == "fork server":
        assert platform.call(path, b"setsid x").status_code == 200


def test_a_killed_platform_s_groups_are_removed_by_the_next_one(make_platform: Make) -> None:
    if not _cgroups():
        pytest.skip("no control groups can be made here")
    platform = make_platform("--device", "cpu:0=400MiB").start()
    path = platform.deploy("echo", ECHO_MODEL)
    assert platform.call(path, b"a").text == "a"
    (worker,) = platform.workers()
    group = Path("/proc", str(worker.pid), "cgroup").read_text()
    name = next(each for each in group.split("/") if each.startswith("gpufaas-")).split("\n")[0]
    assert [Path(each) for each in _directories(name)]

    psutil.wait_procs(platform.kill(), 10)
    next_one = make_platform("--device", "cpu:0=400MiB").start()

    assert not _directories(name)
    assert next_one.stop() == 0


def _directories(name: str) -> list[str]:
    return [str(each) for each in Path("/sys/fs/cgroup").rglob(name)]


def test_a_fork_bomb_is_stopped_by_the_number_of_processes_a_worker_may_have(make_platform: Make) -> None:
    if not _cgroups():
        pytest.skip("no control groups can be made here")
    platform = make_platform("--device", "cpu:0=400MiB", "--memory-enforcement", "cgroup").start()
    bomb = platform.deploy(
        "bomb",
        """
        import os, time

        def handle(event, context):
            made = 0
            try:
                while True:
                    if os.fork() == 0:
                        time.sleep(60)
                        os._exit(0)
                    made += 1
            except BlockingIOError as exc:
                return f"{made} {exc}"
        """,
        HTTP,
        memory="300Mi",
    )
    answer = platform.call(bomb)
    assert answer.status_code in (200, 502, 507), answer.text
    platform.remove("bomb")
    until(platform.is_empty)
