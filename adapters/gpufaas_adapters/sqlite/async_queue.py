"""
`SqliteAsyncQueue`: the asynchronous calls of an embedded platform, in one file (port: `ports.AsyncQueue`).

A call is on the disk when `write` returns (WAL, synchronous=FULL); many calls and outcomes share one transaction, and
so one fsync. Bodies too large for a row are files beside it, written aside, synced and renamed before the row that
names them is; a file that no row names is removed at the next start. That a call is claimed is kept in memory only.
"""

import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, assert_never

import msgspec

from gpufaas_adapters.sqlite.wal import check_log
from gpufaas_async_calls.call import (
    AcceptedCall,
    Body,
    CallStatus,
    CancelledCall,
    ClaimedCall,
    Dead,
    Deliver,
    Done,
    KeptAnswer,
    Outcome,
    Phase,
    Redeliver,
    Retry,
    Waiting,
)
from gpufaas_async_calls.spool_file import SpoolFile, remove_files
from gpufaas_core.errors import StorageAway, StorageFailed
from gpufaas_core.units import Seconds

_SCHEMA_VERSION: Final = 1
# Large columns last: what stands before them is read without following their pages.
_SCHEMA: Final = """
CREATE TABLE calls (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    function TEXT NOT NULL,
    phase TEXT NOT NULL,
    due_at REAL,
    ended_at REAL,
    accepted_at REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    deliveries INTEGER NOT NULL DEFAULT 0,
    status INTEGER,
    reason TEXT,
    exhausted TEXT,
    body_file TEXT,
    answer_file TEXT,
    head BLOB,
    answer BLOB,
    body BLOB,
    answer_body BLOB
) STRICT;
CREATE INDEX calls_by_id ON calls (id);
CREATE INDEX calls_due ON calls (phase, function, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX calls_ended ON calls (phase, ended_at) WHERE ended_at IS NOT NULL;
"""
_STATUS: Final = "id, function, phase, attempts, deliveries, status, reason, accepted_at, ended_at, due_at, key"
_STRIPPED: Final = "head = NULL, answer = NULL, body = NULL, answer_body = NULL, body_file = NULL, answer_file = NULL"
_BUSY_S: Final = 5.0
_PRUNED_AT_ONCE: Final = 256

_encode: Final = msgspec.msgpack.Encoder().encode


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What of a request is not a column."""

    name: str
    path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    callback_url: str | None
    start_ns: int


class _AnswerHead(msgspec.Struct, frozen=True, array_like=True):
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    duration_s: Seconds
    attempts_allowed: int


_decode_head: Final = msgspec.msgpack.Decoder(_Head).decode
_decode_answer: Final = msgspec.msgpack.Decoder(_AnswerHead).decode


class SqliteAsyncQueue:
    """
    Opens or creates ``calls.db`` in *folder* at once; made by the composition root, closed by it.

    :param done_kept_s: for how long the status of a done or cancelled call can be asked for; at most *done_kept* of
        each
    :param dead_kept_s: the same of dead letters, which keep their requests
    :raises StorageFailed: the file cannot be opened, is not ours, or was written by a newer version
    """

    def __init__(
        self,
        folder: Path,
        *,
        done_kept_s: Seconds = 3600.0,
        done_kept: int = 100_000,
        dead_kept_s: Seconds = 7 * 86_400.0,
        dead_kept: int = 10_000,
    ) -> None:
        self._kept = {
            "done": (done_kept_s, done_kept),
            "cancelled": (done_kept_s, done_kept),
            "dead": (dead_kept_s, dead_kept),
        }
        self._path = folder / "calls.db"
        self._folder = folder / "bodies"
        self._lock = threading.Lock()
        self._claimed: set[int] = set()
        self._writes = 0
        with _translated(self._path, "open"):
            self._folder.mkdir(parents=True, exist_ok=True)
            check_log(self._path)
            self._db = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with _translated(self._path, "open"):
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        unnamed: list[Path] = []
        with self._transaction() as db:
            for outcome in outcomes:
                unnamed += self._settle(outcome)
            db.executemany(
                "INSERT INTO calls (id, function, phase, due_at, accepted_at, head, body_file, body)"
                " VALUES (?, ?, 'queued', ?, ?, ?, ?, ?)",
                [
                    (call.id, call.function, call.accepted_at, call.accepted_at, _head_of(call), *_columns(call.body))
                    for call in accepted
                ],
            )
            if outcomes:
                unnamed += self._prune(max(outcome.at for outcome in outcomes))
        self._claimed.difference_update(outcome.key for outcome in outcomes)
        remove_files(unnamed)

    def claim(self, phase: Phase, function: str, now: float, limit: int) -> tuple[list[ClaimedCall], float | None]:
        with self._lock, _translated(self._path, "read"):
            # Those claimed are few, and stand at the front: they are read over.
            due = self._db.execute(
                "SELECT key, due_at FROM calls WHERE phase = ? AND function = ? AND due_at IS NOT NULL"
                " ORDER BY due_at, key LIMIT ?",
                (phase, function, limit + len(self._claimed) + 1),
            ).fetchall()
            free = [(key, at) for key, at in due if key not in self._claimed]
            keys = [key for key, at in free[:limit] if at <= now]
            claimed = [self._read(key) for key in keys]
            self._claimed.update(keys)
            return claimed, free[len(keys)][1] if len(free) > len(keys) else None

    def cancel(self, calls: Sequence[str], now: float) -> list[list[CancelledCall]]:
        unnamed: list[Path] = []
        cancelled: list[list[CancelledCall]] = []
        with self._transaction() as db:
            for call in calls:
                rows = db.execute(
                    "UPDATE calls SET phase = 'cancelled', due_at = NULL, ended_at = ?, reason = 'it was cancelled'"
                    " WHERE id = ? AND due_at IS NOT NULL RETURNING key, function",
                    (now, call),
                ).fetchall()
                found = [CancelledCall(key, function, key in self._claimed) for key, function in rows]
                for each in found:
                    if not each.is_claimed:  # one that is may be reading its files
                        unnamed += self._strip(each.key)
                cancelled.append(found)
        remove_files(unnamed)
        return cancelled

    def get(self, call: str) -> CallStatus | None:
        with self._lock, _translated(self._path, "read"):
            row = self._db.execute(
                f"SELECT {_STATUS} FROM calls WHERE id = ? ORDER BY key DESC LIMIT 1", (call,)
            ).fetchone()
            return self._status(row) if row else None

    def list_dead(self, function: str | None = None, limit: int = 1000) -> list[CallStatus]:
        with self._lock, _translated(self._path, "read"):
            rows = self._db.execute(
                f"SELECT {_STATUS} FROM calls WHERE phase = 'dead' AND ended_at IS NOT NULL"
                " AND (?1 IS NULL OR function = ?1) ORDER BY ended_at, key LIMIT ?2",
                (function, limit),
            ).fetchall()
            return [self._status(row) for row in rows]

    def requeue(self, call: str, now: float) -> Waiting | None:
        unnamed: list[Path] = []
        with self._transaction() as db:
            row = db.execute(
                "SELECT key, function, answer IS NOT NULL, answer_file FROM calls WHERE id = ? AND phase = 'dead'"
                " ORDER BY key DESC LIMIT 1",
                (call,),
            ).fetchone()
            if row is None:
                return None
            key, function, answered, file = row
            phase: Phase = "callback" if answered else "queued"
            if not answered:
                unnamed += self._files(file)
            db.execute(
                "UPDATE calls SET phase = ?, due_at = ?, ended_at = NULL, attempts = iif(?, attempts, 0),"
                " deliveries = 0, exhausted = NULL, reason = NULL WHERE key = ?",
                (phase, now, answered, key),
            )
        remove_files(unnamed)
        return Waiting(phase, function, 1, now)

    def discard(self, call: str) -> bool:
        with self._transaction() as db:
            rows = db.execute(
                "DELETE FROM calls WHERE id = ? AND phase = 'dead' RETURNING body_file, answer_file", (call,)
            ).fetchall()
        remove_files(self._files(*(name for row in rows for name in row)))
        return bool(rows)

    def waiting(self) -> list[Waiting]:
        with self._lock, _translated(self._path, "read"):
            rows = self._db.execute(
                "SELECT phase, function, count(*), min(due_at) FROM calls WHERE due_at IS NOT NULL"
                " GROUP BY phase, function"
            ).fetchall()
            return [Waiting(*row) for row in rows]

    def new_file(self) -> SpoolFile:
        return SpoolFile(self._folder / secrets.token_hex(16))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # --- rows ---

    def _settle(self, outcome: Outcome) -> list[Path]:
        """Write one outcome; return the files that no row names once it is committed."""
        db = self._db
        row = db.execute("SELECT due_at, body_file, answer_file FROM calls WHERE key = ?", (outcome.key,)).fetchone()
        if row is None or row[0] is None:
            # It was cancelled while it was claimed, and perhaps forgotten since.
            answered = outcome.answer.body if isinstance(outcome, Deliver) else b""
            return self._strip(outcome.key) + ([answered] if isinstance(answered, Path) else [])
        match outcome:
            case Done():
                db.execute(
                    "UPDATE calls SET phase = 'done', due_at = NULL, ended_at = ?, status = ?, attempts = ?,"
                    f" reason = NULL, {_STRIPPED} WHERE key = ?",
                    (outcome.at, outcome.status, outcome.attempts, outcome.key),
                )
                return self._files(*row[1:])
            case Retry():
                db.execute(
                    "UPDATE calls SET due_at = ?, attempts = ?, status = ?, reason = ? WHERE key = ?",
                    (outcome.at, outcome.attempts, outcome.status, outcome.reason, outcome.key),
                )
                return []
            case Deliver():
                answer = outcome.answer
                head = _encode(_AnswerHead(answer.status, answer.headers, answer.duration_s, answer.attempts_allowed))
                db.execute(
                    "UPDATE calls SET phase = 'callback', due_at = ?, attempts = ?, status = ?, exhausted = ?,"
                    " reason = ?, answer = ?, answer_file = ?, answer_body = ? WHERE key = ?",
                    (outcome.at, outcome.attempts, answer.status, outcome.exhausted, outcome.exhausted, head,
                     *_columns(answer.body), outcome.key),
                )  # fmt: skip
                return []
            case Redeliver():
                db.execute(
                    "UPDATE calls SET due_at = ?, deliveries = ?, reason = ? WHERE key = ?",
                    (outcome.at, outcome.deliveries, outcome.reason, outcome.key),
                )
                return []
            case Dead():
                unnamed: list[Path] = []
                if not outcome.undelivered:
                    unnamed = self._files(row[2])
                    db.execute(
                        "UPDATE calls SET answer = NULL, answer_file = NULL, answer_body = NULL WHERE key = ?",
                        (outcome.key,),
                    )
                db.execute(
                    "UPDATE calls SET phase = 'dead', due_at = NULL, ended_at = ?, attempts = ?, status = ?,"
                    " reason = ? WHERE key = ?",
                    (outcome.at, outcome.attempts, outcome.status, outcome.reason, outcome.key),
                )
                return unnamed
            case _:
                assert_never(outcome)

    def _strip(self, key: int) -> list[Path]:
        """Forget the request and answer of a call that has ended; return their files."""
        rows = self._db.execute("SELECT body_file, answer_file FROM calls WHERE key = ?", (key,)).fetchall()
        self._db.execute(f"UPDATE calls SET {_STRIPPED} WHERE key = ?", (key,))
        return self._files(*(name for row in rows for name in row))

    def _prune(self, now: float) -> list[Path]:
        """Forget what ended long ago, and the oldest of what ended if there is too much of it, a few at a time."""
        unnamed: list[Path] = []
        for phase, (kept_s, _) in self._kept.items():
            rows = self._db.execute(
                "DELETE FROM calls WHERE key IN (SELECT key FROM calls WHERE phase = ? AND ended_at < ?"
                " ORDER BY ended_at LIMIT ?) RETURNING body_file, answer_file",
                (phase, now - kept_s, _PRUNED_AT_ONCE),
            ).fetchall()
            unnamed += self._files(*(name for row in rows for name in row))
        self._writes += 1
        if self._writes % 100 == 0:  # counting takes milliseconds
            for phase, (_, kept) in self._kept.items():
                (count,) = self._db.execute(
                    "SELECT count(*) FROM calls WHERE phase = ? AND ended_at IS NOT NULL", (phase,)
                ).fetchone()
                rows = self._db.execute(
                    "DELETE FROM calls WHERE key IN (SELECT key FROM calls WHERE phase = ? AND ended_at IS NOT NULL"
                    " ORDER BY ended_at LIMIT ?) RETURNING body_file, answer_file",
                    (phase, max(0, count - kept)),
                ).fetchall()
                unnamed += self._files(*(name for row in rows for name in row))
        return unnamed

    def _read(self, key: int) -> ClaimedCall:
        row = self._db.execute(
            "SELECT id, function, attempts, deliveries, exhausted, head, body_file, body, answer, answer_file,"
            " answer_body FROM calls WHERE key = ?",
            (key,),
        ).fetchone()
        (call_id, function, attempts, deliveries, exhausted, packed, body_file, body, answer, answer_file,
         answer_body) = row  # fmt: skip
        head = _decode_head(packed)
        call = AcceptedCall(
            call_id, function, head.name, head.path, head.query, head.headers, head.callback_url, head.start_ns,
            self._body(body_file, body),
        )  # fmt: skip
        given = None
        if answer is not None:
            kept = _decode_answer(answer)
            given = KeptAnswer(
                kept.status, kept.headers, self._body(answer_file, answer_body), kept.duration_s, kept.attempts_allowed
            )
        return ClaimedCall(key, call, attempts, deliveries, given, exhausted)

    def _status(self, row: tuple[Any, ...]) -> CallStatus:
        *fields, key = row
        status = CallStatus(*fields)
        if status.state == "queued" and key in self._claimed:
            return msgspec.structs.replace(status, state="running")
        return status

    def _body(self, file: str | None, inline: bytes | None) -> Body:
        return self._folder / file if file else inline or b""

    def _files(self, *names: str | None) -> list[Path]:
        return [self._folder / name for name in names if name]

    # --- the file ---

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION:
            raise StorageFailed(
                f"{self._path} was written by a newer version (schema {version}, this one knows {_SCHEMA_VERSION}): "
                "start that version, or give another data directory"
            )
        if version == 0:
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
        named = {
            name
            for row in self._db.execute(
                "SELECT body_file, answer_file FROM calls WHERE body_file IS NOT NULL OR answer_file IS NOT NULL"
            )
            for name in row
        }
        remove_files([path for path in self._folder.iterdir() if path.name not in named])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _translated(self._path, "write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk has rolled it back already
                    self._db.execute("ROLLBACK")
                raise


@contextmanager
def _translated(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, msgspec.DecodeError) as exc:
        code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StorageAway(f"cannot {what} {path}: {exc}: another process holds it, try again") from exc
        full = code == sqlite3.SQLITE_FULL
        advice = "free space on its disk" if full else "check the data directory, that it is whole and writable"
        raise StorageFailed(f"cannot {what} {path}: {exc}: {advice}") from exc


def _head_of(call: AcceptedCall) -> bytes:
    return _encode(_Head(call.name, call.path, call.query, call.headers, call.callback_url, call.start_ns))


def _columns(body: Body) -> tuple[str | None, bytes | None]:
    """Return a body as (file, inline)."""
    return (body.name, None) if isinstance(body, Path) else (None, body or None)
