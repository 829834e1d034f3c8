"""The event loop was blocked, and the platform could only be killed, without a hint about the cause."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import ECHO_MODEL, LIMIT_S, Platform, all_ended, until

STUCK = """
import os

from gpufaas_scheduler.policies import make_policy

class Stuck:
    name = "stuck"

    def __init__(self):
        self._lb = make_policy("lb")

    def __getattr__(self, name):
        return getattr(self._lb, name)

    def plan(self, view):
        open(os.environ["STANDS"], "w").close()
        while True:
            pass
"""


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Is told what a platform that is started after it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield made


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_platform: Callable[..., Platform]) -> Platform:
    """A platform whose loop stands: its policy, installed as others install theirs, does not return."""
    plugin = tmp_path / "plugin"
    (plugin / "stuck-1.dist-info").mkdir(parents=True)
    (plugin / "stuck_policy.py").write_text(STUCK)
    (plugin / "stuck-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1\n")
    (plugin / "stuck-1.dist-info" / "entry_points.txt").write_text("[gpufaas.policies]\nstuck = stuck_policy:Stuck\n")
    monkeypatch.setenv("PYTHONPATH", str(plugin))
    monkeypatch.setenv("STANDS", str(tmp_path / "stands"))
    platform = make_platform("--device", "cpu:0=400MiB", "--policy", "stuck").start()
    path = platform.deploy("f", ECHO_MODEL)
    platform.begin(path, timeout=LIMIT_S)
    until((tmp_path / "stands").exists, "its policy was asked")
    return platform


def test_a_second_signal_ends_it_and_all_that_it_started(systemd: socket.socket, stuck: Platform) -> None:
    tree = stuck.tree()
    assert tree

    stuck.signal(signal.SIGTERM)
    while systemd.recv(100) != b"STOPPING=1":
        pass  # until the first one is heard: two that come together are one
    time.sleep(0.4)  # two that are closer than 0.2 s are one, too
    stuck.signal(signal.SIGTERM)

    assert stuck.wait() == 128 + signal.SIGTERM
    all_ended(tree)
    assert "a second SIGTERM" in stuck.said()
    assert "stuck_policy.py" in stuck.said()


@pytest.mark.long
def test_its_log_says_where_it_stands_and_one_signal_ends_it_in_the_end(stuck: Platform) -> None:
    until(lambda: "loop.stands" in stuck.said(), "its stacks are in the log", 20.0)
    assert "stuck_policy.py" in stuck.said()

    stuck.signal(signal.SIGTERM)

    assert stuck.wait() == 1
