"""`EtcdProcess`: a real etcd for tests and benchmarks, on free ports of loopback, to be killed and started again."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from gpufaas_core.units import Seconds

_READY_S: Final[Seconds] = 60.0
_ASK_S: Final[Seconds] = 0.02
_AT, _OF = (int(os.environ.get(f"PYTEST_XDIST_WORKER{each}", "").removeprefix("gw") or 0) for each in ("", "_COUNT"))
_PORTS: Final = range(12_000, 20_000)[_AT :: _OF or 1]
"""
Those of this process of the tests. Above are ports of functions that are servers (`launch/served.py`), and those that
systems give to outgoing connections.
"""
_choose: Final = random.SystemRandom().choice
"""Hypothesis sets the seed of `random`, in each process of the tests to the same."""
_given: set[int] = set()


def etcd_missing() -> str:
    """Return why no etcd can be started here; empty: it can."""
    packages = [f"etcd-{of}" for name, of in (("etcd", "server"), ("etcdctl", "client")) if not shutil.which(name)]
    return f"programs are missing to run this: apt install {' '.join(packages)}" if packages else ""


class EtcdProcess:
    """
    One member. Its data is in memory (/dev/shm, where there is one) until `close`; `kill` and `start` keep it.

    :param arguments: more of them, as ``--quota-backend-bytes=…``
    :param scheme: ``https`` with the arguments that this needs
    :param host: the address at which clients find it
    :param name: of one of several members; see `etcd_cluster`
    """

    def __init__(
        self, arguments: Sequence[str] = (), *, scheme: str = "http", host: str = "127.0.0.1", name: str = "test"
    ) -> None:
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="gpufaas-etcd-", dir=memory if memory.is_dir() else None))
        self.port, self._peer_port, self._metrics_port = free_port(), free_port(), free_port()
        self.endpoint = f"{host}:{self.port}"
        self.peer = f"http://127.0.0.1:{self._peer_port}"
        self.cluster = f"{name}={self.peer}"
        """Names and peer addresses of all members, of which this is one."""
        self._name = name
        self._arguments = tuple(arguments)
        self._scheme = scheme
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("this etcd does not run")
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start it, on the data that is there. :raises RuntimeError: it ends, or is not healthy in time"""
        client = f"{self._scheme}://{self.endpoint}"
        with (self.folder / "log").open("ab") as out:
            self._process = subprocess.Popen(
                [
                    "etcd", f"--name={self._name}", f"--data-dir={self.folder / 'data'}",
                    "--logger=zap", "--log-level=warn",
                    f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={self.peer}", f"--initial-advertise-peer-urls={self.peer}",
                    f"--initial-cluster={self.cluster}", f"--listen-metrics-urls=http://127.0.0.1:{self._metrics_port}",
                    *self._arguments,
                ],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=_without_settings(os.environ),
            )  # fmt: skip
        if wait:
            self.wait()

    def wait(self) -> None:
        end = time.monotonic() + _READY_S
        while not self._healthy():
            if self.pid and self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"etcd ended: {self.log()[-500:]}")
            if time.monotonic() > end:
                raise RuntimeError(f"etcd is not healthy after {_READY_S:g} s: {self.log()[-500:]}")
            time.sleep(_ASK_S)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP, and wait until all of its threads stand still: one could answer until then."""
        os.kill(self.pid, signal.SIGSTOP)
        while not all(map(_is_stopped, Path(f"/proc/{self.pid}/task").iterdir())):
            time.sleep(_ASK_S)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ctl(self, *arguments: str, check: bool = True) -> str:
        """Run etcdctl against it; return what it prints."""
        done = subprocess.run(
            ["etcdctl", f"--endpoints={self._scheme}://{self.endpoint}", *arguments],
            capture_output=True, text=True, check=False, timeout=30, env={**os.environ, "ETCDCTL_API": "3"},
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"etcdctl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(30)
            self._process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


@contextmanager
def etcd_cluster(members: int = 3) -> Iterator[list[EtcdProcess]]:
    """Several members that replicate to each other."""
    made = [EtcdProcess(name=f"m{number}") for number in range(members)]
    try:
        for each in made:
            each.cluster = ",".join(f"m{number}={member.peer}" for number, member in enumerate(made))
            each.start(wait=False)
        for each in made:
            each.wait()
        yield made
    finally:
        for each in made:
            each.close()


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """etcd reads every flag from the environment too, and refuses one that it knows twice."""
    return {name: value for name, value in environment.items() if not name.startswith("ETCD_")}


def free_port(host: str = "127.0.0.1") -> int:
    """
    Return a port of *host* that is free, and stays so while the process that it is for is dead.

    Not one of the ephemeral ports: an outgoing connection of another process could take it meanwhile.
    """
    while True:
        port = _choose(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port not in _given:
                probe.bind((host, port))
                _given.add(port)
                return port
