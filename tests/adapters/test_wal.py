"""A write-ahead log that the disk damaged is detected; one that a crash cut short is accepted."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufaas_adapters.sqlite import file
from gpufaas_adapters.sqlite.async_queue import SqliteAsyncQueue
from gpufaas_adapters.sqlite.functions import SqliteStore
from gpufaas_adapters.sqlite.wal import damage
from gpufaas_core.errors import StorageAway, StorageFailed
from gpufaas_gateway.spec import FunctionRecord, FunctionSpec

FRAME = 24 + 4096


def crashed(tmp_path: Path, commits: int = 6, *, anew: bool = False) -> Path:
    """Return a database as a kill leaves it, with a frame or more in the log for each commit."""
    live, left = tmp_path / "live.db", tmp_path / "left.db"
    db = sqlite3.connect(live, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE t (x)")
    if anew:
        for number in range(20):
            db.execute("INSERT INTO t VALUES (?)", (number,))
        db.execute("PRAGMA wal_checkpoint(RESTART)")
    for number in range(commits):
        db.execute("INSERT INTO t VALUES (?)", (number,))
    for suffix in ("", "-wal"):
        shutil.copy(f"{live}{suffix}", f"{left}{suffix}")
    db.close()
    return left


def edit(database: Path, change: Callable[[bytearray], object]) -> None:
    log = Path(f"{database}-wal")
    content = bytearray(log.read_bytes())
    change(content)
    log.write_bytes(content)


def flip(at: int) -> Callable[[bytearray], object]:
    def change(content: bytearray) -> None:
        content[at] ^= 0xFF

    return change


@pytest.mark.parametrize("anew", [False, True])
def test_a_log_that_is_whole_or_was_begun_anew_or_is_not_there_is_in_order(tmp_path: Path, anew: bool) -> None:
    left = crashed(tmp_path, anew=anew)
    assert damage(left) == ""
    assert damage(tmp_path / "nothing.db") == ""


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (32 + FRAME + 24 + 100, "frame 2 is wrong"),  # a page
        (32 + FRAME + 5, "frame 2 is wrong"),  # its number
        (32 + FRAME + 9, "frame 2 is wrong"),  # the salt
        (32 + FRAME + 17, "frame 2 is wrong"),  # the checksum
        (13, "header"),
    ],
)
def test_a_byte_that_is_wrong_in_the_midst_is_found(tmp_path: Path, at: int, says: str) -> None:
    left = crashed(tmp_path)
    edit(left, flip(at))
    assert says in damage(left)


def test_a_log_that_a_crash_cut_short_is_in_order(tmp_path: Path) -> None:
    left = crashed(tmp_path)
    for size in (3 * FRAME, 2 * FRAME + 700, 32, 7):
        edit(left, lambda content, size=size: content.__delitem__(slice(size, None)))  # type: ignore[misc]
        assert damage(left) == ""
    left = crashed(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path)
    edit(left, flip(-1))  # the last write did not come through
    assert damage(left) == ""


@pytest.mark.parametrize("opened", ["gpufaas.db", "calls.db"])
def test_a_platform_does_not_start_over_a_damaged_log(tmp_path: Path, opened: str) -> None:
    left = crashed(tmp_path)
    edit(left, flip(32 + FRAME + 24))
    for suffix in ("", "-wal"):
        Path(f"{left}{suffix}").rename(tmp_path / f"{opened}{suffix}")

    with pytest.raises(StorageFailed, match=f"{opened}-wal is damaged: frame 2.*move {opened}-wal away"):
        SqliteStore(tmp_path / opened) if opened == "gpufaas.db" else SqliteAsyncQueue(tmp_path)


def test_what_is_deployed_and_removed_is_in_the_file_itself_at_once(tmp_path: Path) -> None:
    path = tmp_path / "gpufaas.db"
    store = SqliteStore(path)
    store.put(FunctionRecord("echo", "openfaas-fn", FunctionSpec("echo", "echo:1"), "r1", 1.0))

    shutil.copy(path, tmp_path / "copy.db")  # without its log
    copy = SqliteStore(tmp_path / "copy.db")
    assert [each.name for each in copy.all()] == ["echo"]
    store.remove("echo.openfaas-fn")
    assert Path(f"{path}-wal").stat().st_size == 0
    copy.close()
    store.close()


def test_a_file_that_another_process_holds_is_away_and_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_BUSY_S", 0.05)
    store = SqliteStore(tmp_path / "gpufaas.db")
    held = sqlite3.connect(tmp_path / "gpufaas.db", isolation_level=None)
    held.execute("BEGIN IMMEDIATE")

    with pytest.raises(StorageAway, match="locked"):
        store.remove("echo.openfaas-fn")

    held.close()
    store.remove("echo.openfaas-fn")
    store.close()
