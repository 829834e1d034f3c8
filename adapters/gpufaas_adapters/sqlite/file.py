"""`SqliteFile`: one SQLite file of ours, with its schema, its transactions, and its errors as ours."""

import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_adapters.sqlite.wal import check_log
from gpufaas_core.errors import StorageAway, StorageFailed

log = logging.getLogger(__name__)

_HELD: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BUSY_S: Final = 5.0  # another process holds the file for milliseconds (a backup), or is a second platform: then say so


class SqliteFile:
    """
    Opens or creates the file at once.

    Every transaction is on the disk when it ends (WAL, synchronous=FULL). One connection behind a lock: the writers are
    few. May be used from any thread.

    :param migrations: each takes a file from the schema of its index to the next; they are only ever added to
    :raises StorageFailed: the file cannot be opened, is not ours, or was written by a newer version
    """

    def __init__(self, path: Path, migrations: Sequence[str]) -> None:
        self._path = path
        self._lock = threading.Lock()
        with self._translated("open"):
            path.parent.mkdir(parents=True, exist_ok=True)
            check_log(path)
            self.db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self._translated("open"):
                self._prepare(migrations)
        except BaseException:
            self.db.close()
            raise

    def _prepare(self, migrations: Sequence[str]) -> None:
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        known = len(migrations)
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        if version > known:
            raise StorageFailed(
                f"{self._path} was written by a newer version (schema {version}, this one knows {known}): start that "
                "version, or give another data directory"
            )
        if version < known:
            # One transaction, so that a platform killed here finds either nothing or all of it.
            steps = "".join(migrations[version:])
            self.db.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {known}; COMMIT;")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """:raises StorageFailed: nothing was changed"""
        with self._lock, self._translated("write"):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:  # a full disk has rolled it back already
                    self.db.execute("ROLLBACK")
                raise

    def write(self, sql: str, *values: object) -> None:
        """Do one statement. :raises StorageFailed: nothing was changed"""
        with self.transaction() as db:
            db.execute(sql, values)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translated("read"):
            yield self.db

    def checkpoint(self) -> None:
        """Have what was written in the file itself: a log that is damaged or lost takes none of it along."""
        try:
            with self._lock:
                self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as exc:  # it is in the log, and on the disk
            log.warning("store.not_checkpointed path=%s reason=%s", self._path, exc)

    def close(self) -> None:
        with self._lock:
            self.db.close()

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, msgspec.DecodeError) as exc:
            code = getattr(exc, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
            kind = StorageAway if code in _HELD else StorageFailed
            raise kind(f"cannot {what} {self._path}: {exc}: {_advice(code)}") from exc


def _advice(code: int) -> str:
    match code:
        case sqlite3.SQLITE_FULL:
            return "free space on the disk of the data directory"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            return "make the data directory writable, or give another one"
        case code if code in _HELD:
            return "another platform uses this data directory: stop it, or give another one"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return "restore the file from a backup, or move it away, and deploy or apply again what it held"
        case _:
            return "check the data directory"
