"""
Functions that take memory in ways that no allocation of theirs fails for, and that leave processes behind: each ends
for it, with the reason, and nothing of it is left. Its neighbours and the platform notice nothing.

Each is replayed with what the machine has (control groups, if the platform may make some) and with the watcher.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.files import as_user
from tests.integration.conftest import ECHO_MODEL, HTTP, Platform, Watching, all_ended, until

from gpufaas_gpu_manager.cgroups import find
from gpufaas_gpu_manager.enforcement import group_limit

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
        time.sleep(30)

    def shared(size):
        touch(mmap.mmap(-1, size), size)

    def memfd(size):
        fd = os.memfd_create("hidden")
        for _ in range(size >> 20):
            os.write(fd, bytes(1 << 20))
        time.sleep(30)

    def shm_file(size):
        with open("/dev/shm/gpufaas-test-hog", "wb", 0) as file:
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
            time.sleep(30)

    def children(size):
        take = f"import time; x = bytearray({size // 6}); x[::4096] = bytes(len(x) // 4096); time.sleep(30)"
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
        time.sleep(30)

    def handle(event, context):
        globals()[event.text](300 << 20)
        return "took it"
"""


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "how",
    [
        "memfd",
        "children",
        pytest.param("shared", marks=LONG),
        pytest.param("shm_file", marks=LONG),
        pytest.param("raised_limit", marks=LONG),
    ],
)
def test_memory_that_no_allocation_fails_for_ends_its_worker_only(platform: Platform, how: str) -> None:
    neighbour = platform.deploy("neighbour", NEIGHBOUR)
    hog = platform.deploy("hog", HOSTILE, HTTP, memory="96Mi")
    its_worker = platform.call(neighbour).text

    with Held(platform) as sampled:
        answer = platform.call(hog, how.encode())

    if how == "shm_file" and "No space left on device" in answer.text:
        assert "watcher" in platform.options, "where nothing counts such files, there is room for its reservation"
    else:
        assert answer.status_code == 507, answer.text
        assert re.search(r"used \d+ MiB of \d+ MiB reserved|MemoryError", answer.text), answer.text
    assert platform.call(neighbour).text == its_worker
    if "cgroup" in platform.options:  # the watcher is late, by as much as can be taken meanwhile
        assert sampled.most_bytes < DEVICE


class Held(Watching):
    """Looks from outside at what all descendants of the fork server hold, in bytes: private and shared memory."""

    every_s = 0.01

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self._fork_server = platform.fork_server()
        self.most_bytes = 0

    def now(self) -> int:
        sizes = {each.pid: _held(each.pid) for each in self._fork_server.children(recursive=True)}
        # One by one, and each takes a while: what ended since then was not there together with the last.
        return sum(size for pid, size in sizes.items() if _held(pid))

    def look(self) -> None:
        self.most_bytes = max(self.most_bytes, self.now())


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
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", path], start_new_session=True)

    def daemon(path):
        ends, begins = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", path])
            os._exit(0)
        os.wait()
        os.close(begins)
        os.read(ends, 1)  # until it is the other program, or was ended

    def stubborn(path):
        code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
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


@pytest.mark.parametrize(
    "how", ["daemon", "disowned", pytest.param("setsid", marks=LONG), pytest.param("stubborn", marks=LONG)]
)
def test_what_a_worker_started_is_gone_before_its_memory_is_free(platform: Platform, how: str) -> None:
    path = platform.deploy("escapes", ESCAPES, HTTP)
    mark = f"gpufaas-test-{how}-{time.monotonic_ns()}"
    assert platform.call(path, f"{how} {mark}".encode()).status_code == 200
    if how != "disowned":
        until(lambda: _named(mark))
    whole = platform.deploy("whole", f"{NEIGHBOUR}    # never measured: {how}", memory=f"{DEVICE // MiB}Mi")

    assert platform.call(whole).status_code == 200

    assert not _named(mark)


@LONG
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
        platform.fork_server().kill()

    until(lambda: not _named(mark))
    if killed == "fork server":
        assert platform.call(path, b"setsid x").status_code == 200


@LONG
def test_daemons_of_a_worker_whose_fork_server_was_stopped_and_replaced_end_with_it(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB", "--memory-enforcement", "watcher").start()
    names = "escapes", "too"  # two at once: the fork server ends after the later one's daemon
    mark = f"gpufaas-test-{time.monotonic_ns()}"
    for name in names:
        assert platform.call(platform.deploy(name, ESCAPES, HTTP), f"daemon {mark}".encode()).status_code == 200
    until(lambda: len(_named(mark)) == 2)
    stopped = [platform.fork_server(), *platform.fork_server().children(recursive=True)]
    platform.fork_server().suspend()
    until(lambda: "the fork server is stuck" in platform.said())

    for worker in platform.workers():
        worker.kill()

    until(lambda: not _named(mark))
    assert "Traceback" not in platform.said()
    until(lambda: not any(each.is_running() for each in stopped), "none of them is left, not even to be reaped")
    assert platform.stop() == 0


@LONG
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

    all_ended(platform.kill())
    next_one = make_platform("--device", "cpu:0=400MiB").start()

    assert not _directories(name)
    assert next_one.stop() == 0


def _directories(name: str) -> list[str]:
    return [str(each) for each in Path("/sys/fs/cgroup").rglob(name)]


@LONG
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can become another user")
def test_a_platform_that_is_not_root_s_has_the_watcher_and_says_so(make_platform: Make) -> None:
    platform = make_platform("--device", "cpu:0=400MiB")
    platform.home.mkdir(parents=True)
    platform.prefix = as_user(platform.home, 65534)
    for each in (platform.home, *platform.home.parents[:3]):
        each.chmod(0o777)
    platform.start()
    assert psutil.Process(platform.pid).uids().effective == 65534
    until(lambda: "by a watcher for the rest" in platform.said())
    hog = platform.deploy("hog", HOSTILE, HTTP, memory="96Mi")
    neighbour = platform.deploy("neighbour", NEIGHBOUR)
    its_worker = platform.call(neighbour).text

    answers = [platform.call(hog, how) for how in (b"shared", b"memfd", b"raised_limit")]

    assert all(each.status_code == 507 for each in answers), answers[-1].text
    assert platform.call(neighbour).text == its_worker
    assert platform.stop() == 0


SOCKETS = """
    import http.client, http.server, socket, threading, zlib

    SIZE = 100 << 20
    PIECE = bytes(range(256)) * 4096

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            left, crc = int(self.headers["Content-Length"]), 0
            while left:
                piece = self.rfile.read(min(left, 1 << 20))
                left, crc = left - len(piece), zlib.crc32(piece, crc)
            self.send_response(200)
            self.send_header("Content-Length", str(SIZE))
            self.end_headers()
            for _ in range(SIZE // len(PIECE)):
                self.wfile.write(PIECE)
            self.server.crc = crc

        def log_message(self, *args):
            pass

    def transfers():
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = http.client.HTTPConnection(*server.server_address)
        client.request("POST", "/", (PIECE for _ in range(SIZE // len(PIECE))), {"Content-Length": str(SIZE)})
        answer, crc, expected = client.getresponse(), 0, 0
        while piece := answer.read(1 << 20):
            crc = zlib.crc32(piece, crc)
        for _ in range(SIZE // len(PIECE)):
            expected = zlib.crc32(PIECE, expected)
        server.shutdown()
        return str(crc == server.crc == expected)

    def takes():
        listener, held, size = socket.create_server(("127.0.0.1", 0)), [], 0
        for _ in range(60):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            one.connect(listener.getsockname())
            held += (one, listener.accept()[0])
            for each in held[-2:]:
                each.setblocking(False)
                try:
                    while True:
                        size += each.send(PIECE)
                except BlockingIOError:
                    pass
        return str(size)

    def handle(event, context):
        return globals()[event.text]()
"""


def test_what_a_worker_s_sockets_hold_is_bounded_and_large_transfers_go_through(platform: Platform) -> None:
    """It was charged to nobody: 512 MiB beside a limit of 200 in 150 connections to itself."""
    if "cgroup" not in platform.options:
        pytest.skip("a watcher does not see it: docs/architecture.md")
    path = platform.deploy("sockets", SOCKETS, HTTP, memory="200Mi")

    assert int(platform.call(path, b"takes").text) < 48 * MiB
    assert platform.call(path, b"transfers").text == "True", "the sockets that took so much are closed"


POOL = """
    import multiprocessing, os

    def square(number):
        return number * number

    def handle(event, context):
        with multiprocessing.get_context("fork").Pool(3) as pool:
            return str(sum(pool.map(square, range(100))))
"""


def test_a_handler_that_uses_a_pool_of_processes_works(platform: Platform) -> None:
    path = platform.deploy("pool", POOL, HTTP)
    assert [platform.call(path).text for _ in range(3)] == ["328350"] * 3


def test_the_ledger_is_never_exceeded_by_what_is_there_while_hostile_functions_run(platform: Platform) -> None:
    """What all descendants of the fork server hold, seen from outside, against what is promised to the workers."""
    paths = [platform.deploy(f"hog-{number}", f"{HOSTILE}    # {number}", HTTP, memory="96Mi") for number in range(3)]
    hows = ["shared", "memfd", "children", "raised_limit"]

    with Held(platform) as sampled:
        calls = [platform.begin(path, how.encode()) for how in hows for path in paths]
        answers = [each.result() for each in calls]

    assert all(each.status_code == 507 for each in answers)
    assert sampled.most_bytes > MiB
    if "cgroup" in platform.options:  # the watcher is late, by as much as can be taken meanwhile
        kernels = 3 * (group_limit(DEVICE) - DEVICE)  # what each group has for the kernel, if that leaves it unused
        assert sampled.most_bytes <= DEVICE + kernels
    assert sampled.now() <= DEVICE


@LONG
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
