"""A load that makes no progress."""

import time
from types import SimpleNamespace

import pytest
from tests.waiting import eventually

from gpufaas_gpu_manager import load_watch
from gpufaas_gpu_manager.timers import Timers


async def test_a_node_that_was_held_up_itself_has_looked_only_once_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def progress_of(pid: int) -> tuple[int]:
        looks.append(pid)
        return (1,)

    looks: list[int] = []
    killed: list[str] = []
    monkeypatch.setattr(load_watch, "progress_of", progress_of)
    worker = SimpleNamespace(
        spec=SimpleNamespace(stall_s=0.1), pid=1, timers=Timers(), run=SimpleNamespace(waits_for=""), kill=killed.append
    )
    load_watch.watch_load(worker)  # type: ignore[arg-type]
    await eventually(lambda: looks)
    time.sleep(0.2)  # twice as long as it may make no progress
    await eventually(lambda: killed)
    worker.timers.close()

    assert len(looks) == 1 + load_watch.LOOKS
    assert killed[0].startswith("its load made no progress for 0.1 s")
