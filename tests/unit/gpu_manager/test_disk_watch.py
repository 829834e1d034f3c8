"""What a worker writes to the node's disk is looked at: one that writes too much ends, and what it wrote is removed."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.waiting import eventually

from gpufaas_gpu_manager import disk_watch
from gpufaas_gpu_manager.disk_watch import first_over, watch_disk
from gpufaas_gpu_manager.isolation.walls import Own
from gpufaas_gpu_manager.timers import Timers

KiB = 1024


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may hold little."""
    monkeypatch.setattr(disk_watch, "BYTES", 200 * KiB)
    monkeypatch.setattr(disk_watch, "FILES", 10)


def nests(folder: Path) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)


def many(folder: Path) -> None:
    for at in range(11):
        (folder / str(at)).touch()


def large(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "large").write_bytes(os.urandom(300 * KiB))


@pytest.mark.parametrize("fill", [nests, many, large])
def test_a_folder_that_holds_too_much_is_found(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "link").symlink_to("/")
    (tmp_path / "filled").mkdir()
    folders = [str(tmp_path / each) for each in ("none", "small", "filled")]

    assert first_over(folders) == ""
    fill(tmp_path / "filled")
    assert first_over(folders) == folders[2]


class Worker:
    def __init__(self, folder: Path) -> None:
        self.own, self.timers, self.reaped = Own(write=(str(folder),)), Timers(), False
        self.killed: list[str] = []

    def kill(self, reason: str) -> None:
        self.killed.append(reason)


async def test_a_worker_that_writes_too_much_is_ended_and_its_folder_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_watch, "_LOOK_S", 0.001)
    looks = 0

    def look(folders: tuple[str, ...]) -> str:
        nonlocal looks
        looks += 1
        return first_over(folders)

    monkeypatch.setattr(disk_watch, "first_over", look)
    worker = Worker(tmp_path / "compiled")
    (tmp_path / "compiled").mkdir()
    watch_disk(worker)
    await eventually(lambda: looks > 2)
    assert not worker.killed

    many(tmp_path / "compiled")

    await eventually(lambda: bool(worker.killed))
    assert worker.killed[0].startswith(worker.own.write[0])
    await eventually(lambda: not (tmp_path / "compiled").exists())
    seen = looks
    await asyncio.sleep(0.02)
    assert (looks, len(worker.killed)) == (seen, 1), "it is not looked at any more"
