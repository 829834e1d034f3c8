import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from gpufaas_gpu_manager import proc
from gpufaas_gpu_manager.proc import cpu_seconds


def test_what_a_process_and_the_children_it_waited_for_used() -> None:
    before = cpu_seconds(os.getpid())

    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    subprocess.run(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.2: pass"], check=True, env={}, timeout=60
    )

    assert 0.25 <= cpu_seconds(os.getpid()) - before < 5


def test_a_process_that_is_gone_used_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    assert cpu_seconds(ended.pid) == 0.0


def test_a_pause_while_usage_is_read_does_not_count_as_more_than_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that never rests, seen by one that stands still for 3 s after the first look."""
    now, pauses_s = 0.0, [3.0, 0.0]

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    def ran_s(_: int) -> float:
        seen = now
        pause(pauses_s.pop(0))
        return seen

    monkeypatch.setattr(proc, "descendants_of", lambda pid: [pid])
    monkeypatch.setattr(proc, "_ran_s", ran_s)
    monkeypatch.setattr(proc, "time", SimpleNamespace(monotonic=lambda: now, sleep=pause))

    millicores, _ = proc.usage_of([os.getpid()])

    assert 0 < millicores <= 1000
