"""
`SqliteStore`: the functions, profiles and quotas of an embedded platform, in one file (ports: `ports.FunctionStore`,
`ports.QuotaStore`).
"""

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_adapters.sqlite.file import SqliteFile
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import Function, Profile
from gpufaas_core.plausible import read_profile
from gpufaas_gateway.history import Revision, check_seen, noting
from gpufaas_gateway.spec import FunctionRecord, FunctionSpec, Handover, Namespace, Quota

log = logging.getLogger(__name__)

_encode: Final = msgspec.json.encode
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
    "ALTER TABLE functions ADD COLUMN history BLOB NOT NULL DEFAULT (CAST('[]' AS BLOB));",
    "ALTER TABLE functions ADD COLUMN handover BLOB NOT NULL DEFAULT '{}';",
)


class SqliteStore:
    """
    Opens or creates the file at once. A function that was acknowledged is there after a power failure.

    :raises StorageFailed: the file cannot be opened, is not ours, or was written by a newer version
    """

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, _MIGRATIONS)

    def put(
        self,
        record: FunctionRecord,
        worker: WorkerSpec | None = None,  # noqa: ARG002 - derived from the record when it is read
        function: Function | None = None,  # noqa: ARG002
        noted: Sequence[Revision] = (),
        seen: str | None = None,
    ) -> None:
        with self._file.transaction() as db:
            check_seen(record.full_name, next(iter(_records(db, record.full_name)), None), seen)
            db.execute(
                "INSERT INTO functions (full_name, namespace, name, spec, revision, created_at, invocations, handover,"
                " history) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (full_name) DO UPDATE SET"
                " spec = excluded.spec, revision = excluded.revision, created_at = excluded.created_at,"
                " handover = excluded.handover, history = excluded.history",
                (
                    record.full_name,
                    record.namespace,
                    record.name,
                    _encode(record.spec),
                    record.revision,
                    record.created_at,
                    record.invocations,
                    _encode(record.handover),
                    _encode(noting(_history(db, record.full_name), record, noted)),
                ),
            )
        self._file.checkpoint()

    def history(self, name: str) -> list[Revision]:
        with self._file.reading() as db:
            return _history(db, name)

    def remove(self, name: str) -> None:
        self._file.write("DELETE FROM functions WHERE full_name = ?", name)
        self._file.checkpoint()

    def all(self) -> list[FunctionRecord]:
        with self._file.reading() as db:
            return _records(db)

    def save_profile(self, digest: str, kind: str, profile: Profile) -> None:
        self._file.write(
            "REPLACE INTO profiles (digest, kind, profile) VALUES (?, ?, ?)", digest, kind, _encode(profile)
        )

    def profiles(self, digest: str) -> dict[str, Profile]:
        with self._file.reading() as db:
            rows = db.execute("SELECT kind, profile FROM profiles WHERE digest = ?", (digest,)).fetchall()
        found: dict[str, Profile] = {}
        for kind, profile in rows:
            try:
                found[kind] = read_profile(profile)
            except ValueError as exc:
                log.error("store.profile_unreadable digest=%s kind=%s reason=%s", digest, kind, exc)
        return found

    def add_invocations(self, counts: Mapping[str, int]) -> None:
        with self._file.transaction() as db:
            db.executemany(
                "UPDATE functions SET invocations = invocations + ? WHERE full_name = ?",
                [(count, name) for name, count in counts.items()],
            )

    def put_namespace(self, namespace: Namespace) -> None:
        self._file.write("REPLACE INTO namespaces (name, spec) VALUES (?, ?)", namespace.name, _encode(namespace))

    def remove_namespace(self, name: str) -> None:
        self._file.write("DELETE FROM namespaces WHERE name = ?", name)

    def namespaces(self) -> list[Namespace]:
        with self._file.reading() as db:
            rows = db.execute("SELECT spec FROM namespaces ORDER BY name")
            return [msgspec.json.decode(spec, type=Namespace) for (spec,) in rows]

    def put_quota(self, namespace: str, quota: Quota) -> None:
        self._file.write("REPLACE INTO quotas (namespace, quota) VALUES (?, ?)", namespace, _encode(quota))

    def remove_quota(self, namespace: str) -> None:
        self._file.write("DELETE FROM quotas WHERE namespace = ?", namespace)

    def quotas(self) -> dict[str, Quota]:
        with self._file.reading() as db:
            rows = db.execute("SELECT namespace, quota FROM quotas ORDER BY namespace").fetchall()
            return {namespace: msgspec.json.decode(quota, type=Quota) for namespace, quota in rows}

    def close(self) -> None:
        self._file.close()


def _records(db: sqlite3.Connection, only: str = "") -> list[FunctionRecord]:
    """Return the record of *only*, a ``NAME.NAMESPACE``, or all."""
    rows = db.execute(
        "SELECT name, namespace, spec, revision, created_at, invocations, handover FROM functions"
        " WHERE ? IN ('', full_name) ORDER BY namespace, name",
        (only,),
    ).fetchall()
    read, state = msgspec.json.Decoder(FunctionSpec).decode, msgspec.json.Decoder(Handover).decode
    return [
        FunctionRecord(name, namespace, read(spec), revision, at, invocations, state(handover))
        for name, namespace, spec, revision, at, invocations, handover in rows
    ]


def _history(db: sqlite3.Connection, name: str) -> list[Revision]:
    found = db.execute("SELECT history FROM functions WHERE full_name = ?", (name,)).fetchone()
    return msgspec.json.decode(found[0], type=list[Revision]) if found else []
