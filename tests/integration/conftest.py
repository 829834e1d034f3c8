"""
The whole platform as its users meet it: a `gpufaas serve` of its own process tree, functions that are built, uploaded
and deployed as the CLI does it, calls over real sockets. Nothing here imports what it tests but the CLI's library.
"""

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

import httpx
import psutil
import pytest
from tests.etcd_process import free_port
from tests.files import open_file, open_folder, open_root
from tests.waiting import LIMIT_S, until

from gpufaas import Client
from gpufaas_cli.bundles import BuildRequest, Built, build

LARGE = 50 * 1024 * 1024
TORCH, HTTP = "python3-torch", "python3-http"

ECHO = """
    def handle(event, context):
        return {"statusCode": 200, "body": event.body, "headers": {"content-type": "application/octet-stream"}}
"""
ECHO_MODEL = """
    def load(device):
        return None

    def handle(model, event, context):
        return event.body
"""
SLEEPER = """
    import time

    def load(device):
        return None

    def handle(model, event, context):
        time.sleep(float(event.text))
        return "slept"
"""
"""A model that computes for as many seconds as its input says."""

GATED_MODEL = """
    import os, time

    def load(device):
        return None

    def handle(model, event, context):
        if not event.body:
            return f"{os.getpid()}"
        open(event.text + ".began", "w").close()
        until = time.monotonic() + 60
        while not os.path.exists(event.text) and time.monotonic() < until:
            time.sleep(0.005)
        return f"{os.getpid()}"
"""
"""Runs until the file that its body names exists; answers its process id."""
GATED = GATED_MODEL.replace("def load(device):\n        return None", "").replace("model, event", "event")


def lives(process: psutil.Process) -> bool:
    """Return whether *process* lives. A process that has ended and was not reaped yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_ended(processes: Iterable[psutil.Process]) -> None:
    """Return when none of them lives; signals come, and processes end, when the machine has time for it."""
    until(lambda: not any(map(lives, processes)), lambda: f"all have ended: {processes}")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, and let it go on."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED, "it stands: on a busy machine, its threads run until then")
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


class Gate:
    """What a gated function waits for: `body` goes into the call, `open` lets it through."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.body = str(path).encode()

    def reached(self) -> bool:
        return self._path.with_name(self._path.name + ".began").exists()

    def open(self) -> None:
        self._path.touch()


PROGRAM = ["-m", "gpufaas_cli"]
"""What serves; see ``--over-tcp``."""
HELD = ["--isolation", "best"]
"""What holds functions of platforms and nodes, unless a test says otherwise; see ``--isolation``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--over-tcp", action="store_true", help="calls go over TCP to the node, as in a cluster")
    parser.addoption("--isolation", default="best", help="the level of platforms and nodes: none, best, strict")


def pytest_configure(config: pytest.Config) -> None:
    HELD[1] = config.getoption("--isolation", "best")
    if config.getoption("--over-tcp", False):
        PROGRAM[:] = [str(Path(__file__).with_name("serve_over_tcp.py"))]


class FunctionBuilds:
    """Functions built of their source as the CLI builds them, each once."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._built: dict[tuple[str, str, str, str], Built] = {}
        self.samples: dict[str, str] = {}
        """What is beside the handler as ``sample.json``, by function."""
        self.whose = ""
        """The test that builds. Reservations and times are learnt by bundle: what one test taught is not for others."""

    def build(self, name: str, source: str, lang: str = TORCH) -> Built:
        key = name, source, lang, self.whose
        if key not in self._built:
            self._home.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="source-", dir=self._home))
            (folder / "handler.py").write_text(f"{textwrap.dedent(source)}\n# {self.whose}\n")
            if name in self.samples:
                (folder / "sample.json").write_text(self.samples[name])
            request = BuildRequest(name=name, lang=lang, handler=folder, build_root=self._home / "build")
            self._built[key] = build(request)
        return self._built[key]


class Login:
    """Of a platform whose data directory is *data*: there once it has started, and if it asks for a password."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def header(self) -> str:
        """:raises OSError: there is none"""
        password = (self._data / "auth" / "basic-auth-password").read_text()
        return "Basic " + base64.b64encode(f"admin:{password}".encode()).decode()

    def sign(self, request: httpx.Request) -> None:
        """A hook for requests: those to the platform have the login, those to functions have not."""
        path, method = request.url.path, request.method
        of_function = path.startswith("/function/") or (path.startswith("/async-function/") and method == "POST")
        if "authorization" not in request.headers and not of_function:
            with contextlib.suppress(OSError):
                request.headers["authorization"] = self.header()


class Platform:
    """One `gpufaas serve`, and hands to use it. `url` is its gateway, `pid` its serving process."""

    def __init__(self, home: Path, *options: str, data: Path | None = None) -> None:
        self.home = home
        self.data = data or home / "data"
        self.options = options
        self.open = open_folder()
        """What its functions may read and write of this machine's files: gates, and what they note."""
        self.record = open_file("record")
        """A file to which they all append."""
        self.prefix: list[str] = []
        """A program that starts it: ``setpriv``."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # As many kept connections as calls at once: closing idle ones races with their next use in other threads.
        limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
        self.login = Login(self.data)
        hooks = {"request": [self.login.sign]}
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S, trust_env=False, limits=limits, event_hooks=hooks)
        self._cli = Client(self.url, event_hooks=hooks)
        self._calls = ThreadPoolExecutor(32)
        self.builds = FunctionBuilds(home)
        self._gates = 0
        self._process: subprocess.Popen[bytes] | None = None

    # --- life ---

    def start(self) -> "Platform":
        """Serve, and return once functions can be called."""
        self.launch()
        until(self.healthy, lambda: f"the platform answers; it said: {self.said()}")
        return self

    def launch(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [*self.prefix, sys.executable, *PROGRAM, "serve", "--port", str(self.port), "--data", str(self.data),
                 "--bind", f"{open_root()}:rw", "--park", "off", *HELD, *self.options],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the platform ended: {self.said()}"
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/healthz").status_code == 200
        return False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def said(self) -> str:
        return (self.home / "output").read_text() if (self.home / "output").exists() else ""

    def tree(self) -> list[psutil.Process]:
        """The serving process's descendants: the fork server and its workers."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def fork_server(self) -> psutil.Process:
        until(lambda: psutil.Process(self.pid).children(), "there is a fork server")
        return psutil.Process(self.pid).children()[0]

    def workers(self) -> list[psutil.Process]:
        """What holds memory: a process that has ended and is about to be reaped does not."""
        alive = []
        for each in self.fork_server().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.status() != psutil.STATUS_ZOMBIE and each.name() != "standby":
                    alive.append(each)
        return alive

    def stop(self) -> int:
        """Ask it to end as an operator does; return its exit status once none of its processes is left."""
        tree = self.tree()
        self._process_of().send_signal(signal.SIGTERM)
        status = self._process_of().wait(LIMIT_S)
        all_ended(tree)
        return status

    def kill(self) -> list[psutil.Process]:
        """kill -9; return what were its descendants."""
        tree = self.tree()
        self._process_of().kill()
        self._process_of().wait(LIMIT_S)
        return tree

    def wait(self) -> int:
        return self._process_of().wait(LIMIT_S)

    def signal(self, number: signal.Signals) -> None:
        self._process_of().send_signal(number)

    def _process_of(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    def close(self) -> None:
        ended = self.kill() if self._process is not None and self._process.poll() is None else []
        self._calls.shutdown()  # after that: calls that wait for a gate fail when the platform ends
        self.http.close()
        self._cli.__exit__()
        all_ended(ended)

    # --- functions ---

    def build(self, name: str, source: str, lang: str = TORCH) -> Built:
        return self.builds.build(name, source, lang)

    def upload(self, built: Built) -> None:
        for digest, path in built.files:
            self._cli.put_artifact(digest, path, lambda _: None)

    def deploy(
        self,
        name: str,
        source: str,
        lang: str = TORCH,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        **annotations: str,
    ) -> str:
        """
        Deploy the function of *source*, or update it; return its path once the new revision serves, or has failed to
        load. Annotations without ``gpufaas.``: memory="48Mi", or "" for none.

        :raises Refused: the gateway says no
        """
        built = self.build(name, source, lang)
        self.upload(built)
        if lang == TORCH:
            annotations.setdefault("memory", "48Mi")
        self._cli.deploy({
            "service": name, "image": f"{name}:latest", "labels": dict(labels or {}), "envVars": dict(env or {}),
            # Marked: an update that changes nothing would do nothing.
            "annotations": {"gpufaas.bundle": built.digest, "deployment": token_hex(4)}
            | {
                key if "." in key else f"gpufaas.{key.replace('_', '-')}": text
                for key, text in annotations.items() if text
            },
        })  # fmt: skip
        self.handed_over(name)
        return f"/function/{name}"

    def detail(self, name: str) -> dict[str, Any]:
        """Return what only this platform says of a function."""
        found: dict[str, Any] = self.http.get(f"/system/function/{name}").raise_for_status().json()["gpufaas"]
        return found

    def handed_over(self, name: str) -> None:
        """Return when no revision of the function waits to be loaded."""
        until(lambda: "pending" not in self.detail(name), lambda: f"{name} is handed over: {self.detail(name)}")

    def deploy_spec(self, spec: Mapping[str, object]) -> httpx.Response:
        """Deploy the function that *spec* describes, or update it; return the gateway's answer."""
        answer = self.http.put("/system/functions", json=spec)
        if answer.status_code == 404:
            return self.http.post("/system/functions", json=spec)
        if answer.is_success:
            self.handed_over(str(spec["service"]))
        return answer

    def remove(self, name: str) -> None:
        self._cli.remove(name)

    def remove_all(self) -> None:
        for each in self._cli.functions():
            self._cli.remove(each["name"])

    def log(self, name: str) -> str:
        lines = self.http.get("/system/logs", params={"name": name}).text.splitlines()
        return "\n".join(json.loads(line)["text"] for line in lines)

    # --- calls ---

    def call(self, path: str, body: bytes | Iterator[bytes] = b"", **kwargs: Any) -> httpx.Response:
        return self.http.post(path, content=body, **kwargs)

    def begin(self, path: str, body: bytes = b"", **kwargs: Any) -> "Future[httpx.Response]":
        """Call in the background."""
        return self._calls.submit(self.call, path, body, **kwargs)

    def gate(self) -> Gate:
        self._gates += 1
        return Gate(self.open / f"gate-{self._gates}")

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)

    def exchange(self, request: bytes, wait_s: float = LIMIT_S) -> bytes:
        """Send *request* as it is; return what comes until the head of an answer, the connection's end, or *wait_s*."""
        with self.socket() as connection:
            connection.settimeout(wait_s)
            answer = b""
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.sendall(request)
                while b"\r\n\r\n" not in answer and (piece := connection.recv(65_536)):
                    answer += piece
            return answer

    # --- what it says of itself ---

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/system/status").json()
        return found

    def residents(self) -> list[str]:
        """Names of what is resident and loaded, on all devices."""
        return [
            resident["name"].partition(".")[0]
            for device in self.status()["devices"]
            for resident in device["resident"]
            if not resident["loading"]
        ]

    def queued(self) -> int:
        return sum(self.status()["queued"].values())

    def running(self) -> int:
        return sum(self.status()["running"].values())

    def is_idle(self) -> bool:
        status = self.status()
        return not status["queued"] and not status["running"] and not any(each["busy"] for each in status["devices"])

    def is_empty(self) -> bool:
        return self.is_idle() and not any(each["used"] for each in self.status()["devices"]) and not self.workers()

    def spooled(self) -> list[Path]:
        return list((self.data / "spool").iterdir())

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class Watching:
    """Calls `look` on a thread of its own, again and again, until the block ends."""

    every_s = 0.002

    def __init__(self) -> None:
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(self.every_s)

    def look(self) -> None:
        raise NotImplementedError


class Sampler(Watching):
    """Looks at the workers' private memory from outside, in bytes, as often as it can."""

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self._fork_server = platform.fork_server().pid
        self.most_bytes = 0
        self.most_workers = 0
        """Those with a model; one that has just begun, or is about to be reaped, has next to nothing."""
        self.samples = 0

    def look(self) -> None:
        children = Path(f"/proc/{self._fork_server}/task/{self._fork_server}/children").read_text().split()
        sizes = {pid: private_bytes(pid) for pid in children}
        # One by one, and each takes a while: what ended since then was not there together with the last.
        held = [size for pid, size in sizes.items() if size is not None and private_bytes(pid) is not None]
        self.most_bytes = max(self.most_bytes, sum(held))
        self.most_workers = max(self.most_workers, sum(size > LARGE for size in held))
        self.samples += 1


def private_bytes(pid: str | int) -> int | None:
    """Return what would become free if the process ended; None: it has ended."""
    return _rollup(pid, ("Private_Clean", "Private_Dirty"))


def pss_bytes(pid: str | int) -> int:
    """Return its memory with shared pages counted by their share."""
    found = _rollup(pid, ("Pss",))
    assert found is not None
    return found


class Peak:
    """The most memory that a process has had since then, in bytes: the kernel notes it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._first = self._most()

    @property
    def growth(self) -> int:
        return self._most() - self._first

    def _most(self) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _rollup(pid: str | int, names: tuple[str, ...]) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # ESRCH of a zombie, whose memory is free
        return None
    fields = (line.partition(":") for line in lines[1:])
    return sum(int(value.split()[0]) * 1024 for name, _, value in fields if name in names)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    platform = Platform(tmp_path_factory.mktemp("shared"), "--device", "cpu:0=400MiB")
    try:
        yield platform.start()
        assert platform.stop() == 0
        assert "Traceback" not in platform.said()
    finally:
        platform.close()


@pytest.fixture
def platform(shared: Platform, request: pytest.FixtureRequest) -> Iterator[Platform]:
    """The platform that most tests share: one device of 400 MiB. Each test leaves it as it found it."""
    shared.builds.whose = request.node.nodeid.encode("ascii", "replace").decode().replace("\n", " ")
    yield shared
    shared.remove_all()
    until(shared.is_empty, "no call, no worker and no reservation outlives its function")
    assert shared.spooled() == []


@pytest.fixture(scope="module")
def module_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Platform]]:
    """For the tests of a module that share a platform with options of its own; not yet started."""
    made: list[Platform] = []

    def make(*options: str) -> Platform:
        made.append(Platform(tmp_path_factory.mktemp("platform"), *options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert "Traceback" not in each.said()


@pytest.fixture
def open_path() -> Path:
    """As `tmp_path`, and functions of the tests' platforms may read and write there, too."""
    return open_folder()


@pytest.fixture
def make_platform(tmp_path: Path) -> Iterator[Callable[..., Platform]]:
    """For tests that stop or kill it: ``make_platform("--device", "cpu:0=400MiB")`` is not yet started."""
    made: list[Platform] = []

    def make(*options: str, data: Path | None = None) -> Platform:
        platform = Platform(tmp_path / f"platform-{len(made)}", *options, data=data)
        made.append(platform)
        return platform

    yield make
    for each in made:
        each.close()
        assert "Traceback" not in each.said()
