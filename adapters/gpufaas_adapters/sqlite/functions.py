"""
`SqliteStore`: the functions, profiles and quotas of an embedded platform, in one file (ports: `ports.FunctionStore`,
`ports.Quotas`).
"""

import logging
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_adapters.sqlite.wal import check_log
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import StorageAway, StorageFailed
from gpufaas_core.model import Function, Profile
from gpufaas_core.plausible import read_profile
from gpufaas_gateway.spec import FunctionRecord, FunctionSpec, Namespace, Quota

log = logging.getLogger(__name__)

_MIGRATIONS: Final = (
    """
CREATE TABLE functions (
    full_name TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    spec BLOB NOT NULL,
    revision TEXT NOT NULL,
    created_at REAL NOT NULL,
    invocations INTEGER NOT NULL
) STRICT;
CREATE TABLE profiles (
    digest TEXT NOT NULL,
    kind TEXT NOT NULL,
    profile BLOB NOT NULL,
    PRIMARY KEY (digest, kind)
) STRICT, WITHOUT ROWID;
""",
    "CREATE TABLE namespaces (name TEXT PRIMARY KEY, spec BLOB NOT NULL) STRICT;",
    "CREATE TABLE quotas (namespace TEXT PRIMARY KEY, quota BLOB NOT NULL) STRICT;",
)
"""Each takes a file from the schema of its index to the next. They are never changed, only added to."""
_SCHEMA_VERSION: Final = len(_MIGRATIONS)
_HELD: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BUSY_S: Final = 5.0  # another process holds the file for milliseconds (a backup), or is a second platform: then say so


class SqliteStore:
    """
    Opens or creates the file at once; made by the composition root, closed by it.

    Every write is a transaction that is on the disk when the call returns (WAL, synchronous=FULL): a function that was
    acknowledged is there after a power failure. One connection behind a lock, because writes are rare and small.

    :raises StorageFailed: the file cannot be opened, is not ours, or was written by a newer version
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with self._translated("open"):
            path.parent.mkdir(parents=True, exist_ok=True)
            check_log(path)
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self._translated("open"):
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def put(
        self,
        record: FunctionRecord,
        worker: WorkerSpec | None = None,  # noqa: ARG002 - whoever reads this file works it out of the record
        function: Function | None = None,  # noqa: ARG002
    ) -> None:
        with self._transaction("write") as db:
            db.execute(
                "INSERT INTO functions (full_name, namespace, name, spec, revision, created_at, invocations)"
                " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (full_name) DO UPDATE SET"
                " spec = excluded.spec, revision = excluded.revision, created_at = excluded.created_at",
                (
                    record.full_name,
                    record.namespace,
                    record.name,
                    msgspec.json.encode(record.spec),
                    record.revision,
                    record.created_at,
                    record.invocations,
                ),
            )
        self._checkpoint()

    def remove(self, name: str) -> None:
        with self._transaction("write") as db:
            db.execute("DELETE FROM functions WHERE full_name = ?", (name,))
        self._checkpoint()

    def all(self) -> list[FunctionRecord]:
        with self._lock, self._translated("read"):
            rows = self._db.execute(
                "SELECT name, namespace, spec, revision, created_at, invocations FROM functions"
                " ORDER BY namespace, name"
            ).fetchall()
            return [
                FunctionRecord(name, namespace, msgspec.json.decode(spec, type=FunctionSpec), revision, at, invocations)
                for name, namespace, spec, revision, at, invocations in rows
            ]

    def save_profile(self, digest: str, kind: str, profile: Profile) -> None:
        with self._transaction("write") as db:
            db.execute(
                "INSERT INTO profiles (digest, kind, profile) VALUES (?, ?, ?)"
                " ON CONFLICT (digest, kind) DO UPDATE SET profile = excluded.profile",
                (digest, kind, msgspec.json.encode(profile)),
            )

    def profiles(self, digest: str) -> dict[str, Profile]:
        with self._lock, self._translated("read"):
            rows = self._db.execute("SELECT kind, profile FROM profiles WHERE digest = ?", (digest,)).fetchall()
        found: dict[str, Profile] = {}
        for kind, profile in rows:
            try:
                found[kind] = read_profile(profile)
            except ValueError as exc:
                log.error("store.profile_unreadable digest=%s kind=%s reason=%s", digest, kind, exc)
        return found

    def add_invocations(self, counts: Mapping[str, int]) -> None:
        with self._transaction("write") as db:
            db.executemany(
                "UPDATE functions SET invocations = invocations + ? WHERE full_name = ?",
                [(count, name) for name, count in counts.items()],
            )

    def put_namespace(self, namespace: Namespace) -> None:
        with self._transaction("write") as db:
            db.execute(
                "INSERT INTO namespaces (name, spec) VALUES (?, ?)"
                " ON CONFLICT (name) DO UPDATE SET spec = excluded.spec",
                (namespace.name, msgspec.json.encode(namespace)),
            )

    def remove_namespace(self, name: str) -> None:
        with self._transaction("write") as db:
            db.execute("DELETE FROM namespaces WHERE name = ?", (name,))

    def namespaces(self) -> list[Namespace]:
        with self._lock, self._translated("read"):
            rows = self._db.execute("SELECT spec FROM namespaces ORDER BY name").fetchall()
            return [msgspec.json.decode(spec, type=Namespace) for (spec,) in rows]

    def put_quota(self, namespace: str, quota: Quota) -> None:
        with self._transaction("write") as db:
            db.execute(
                "INSERT INTO quotas (namespace, quota) VALUES (?, ?)"
                " ON CONFLICT (namespace) DO UPDATE SET quota = excluded.quota",
                (namespace, msgspec.json.encode(quota)),
            )

    def remove_quota(self, namespace: str) -> None:
        with self._transaction("write") as db:
            db.execute("DELETE FROM quotas WHERE namespace = ?", (namespace,))

    def quotas(self) -> dict[str, Quota]:
        with self._lock, self._translated("read"):
            rows = self._db.execute("SELECT namespace, quota FROM quotas ORDER BY namespace").fetchall()
            return {namespace: msgspec.json.decode(quota, type=Quota) for namespace, quota in rows}

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION:
            raise StorageFailed(
                f"{self._path} was written by a newer version (schema {version}, this one knows {_SCHEMA_VERSION}): "
                "start that version, or give another data directory"
            )
        if version < _SCHEMA_VERSION:
            # One transaction, so that a platform killed here finds either nothing or all of it.
            steps = "".join(_MIGRATIONS[version:])
            self._db.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")

    def _checkpoint(self) -> None:
        """Have what was deployed in the file itself: a log that is damaged or lost takes none of it along."""
        try:
            with self._lock:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as exc:  # it is in the log, and on the disk
            log.warning("store.not_checkpointed path=%s reason=%s", self._path, exc)

    @contextmanager
    def _transaction(self, what: str) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translated(what):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # A full disk has rolled it back already; then there is nothing to roll back.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, msgspec.DecodeError) as exc:
            kind = StorageAway if getattr(exc, "sqlite_errorcode", 0) & 0xFF in _HELD else StorageFailed
            raise kind(f"cannot {what} {self._path}: {exc}: {_advice(exc)}") from exc


def _advice(error: Exception) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
    match code:
        case sqlite3.SQLITE_FULL:
            return "free space on the disk of the data directory"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            return "make the data directory writable, or give another one"
        case code if code in _HELD:
            return "another platform uses this data directory: stop it, or give another one"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return "restore the file from a backup, or move it away and deploy the functions again"
        case _:
            return "check the data directory"
