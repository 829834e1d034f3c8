"""Something in the loop did not return, and the platform could only be killed, without a word about where it stood."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.integration.conftest import ECHO_MODEL, LIMIT_S, Platform, until

STUCK = """
from gpufaas_scheduler.policies import make_policy

class Stuck:
    name = "stuck"

    def __init__(self):
        self._lb = make_policy("lb")
        self.pass_limit = self._lb.pass_limit

    def __getattr__(self, name):
        return getattr(self._lb, name)

    def plan(self, view):
        while True:
            pass
"""


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_platform: Callable[..., Platform]) -> Platform:
    """A platform whose loop stands: its policy, installed as others install theirs, does not return."""
    plugin = tmp_path / "plugin"
    (plugin / "stuck-1.dist-info").mkdir(parents=True)
    (plugin / "stuck_policy.py").write_text(STUCK)
    (plugin / "stuck-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1\n")
    (plugin / "stuck-1.dist-info" / "entry_points.txt").write_text("[gpufaas.policies]\nstuck = stuck_policy:Stuck\n")
    monkeypatch.setenv("PYTHONPATH", str(plugin))
    platform = make_platform("--device", "cpu:0=400MiB", "--policy", "stuck").start()
    path = platform.deploy("f", ECHO_MODEL)
    platform.begin(path, timeout=LIMIT_S)
    time.sleep(0.5)
    return platform


def test_a_second_signal_ends_it_and_all_that_it_started(stuck: Platform) -> None:
    tree = stuck.tree()
    assert tree

    stuck.signal(signal.SIGTERM)
    time.sleep(0.5)
    stuck.signal(signal.SIGTERM)

    assert stuck.wait() == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(tree, 10.0)
    assert alive == []
    assert "a second SIGTERM" in stuck.said()
    assert "stuck_policy.py" in stuck.said()


@pytest.mark.long
def test_its_log_says_where_it_stands_and_one_signal_ends_it_in_the_end(stuck: Platform) -> None:
    until(lambda: "loop.stands" in stuck.said(), "its stacks are in the log", 20.0)
    assert "stuck_policy.py" in stuck.said()

    began = time.monotonic()
    stuck.signal(signal.SIGTERM)

    assert stuck.wait() == 1
    assert time.monotonic() - began < 25.0
