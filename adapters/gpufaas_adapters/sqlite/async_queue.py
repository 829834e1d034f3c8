"""
`SqliteAsyncQueue`: the asynchronous calls of an embedded platform, in one file (port: `ports.AsyncQueue`).

A call is on the disk when `write` returns (WAL, synchronous=FULL); many calls and outcomes share one transaction, and
so one fsync. Bodies too large for a row are files beside it, written aside, synced and renamed before the row that
names them is; a file that no row names is removed at the next start. That a call is claimed is kept in memory only.
"""

import functools
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gpufaas_adapters.sqlite.file import SqliteFile
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
    Waiting,
    cancelled,
    requeued,
    settled,
)
from gpufaas_async_calls.spool_file import SpoolFile, remove_files
from gpufaas_core.units import Seconds

# Large columns last: what stands before them is read without following their pages.
_MIGRATIONS: Final = (
    """
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
""",
)
_STATUS: Final = "id, function, phase, attempts, deliveries, status, reason, accepted_at, ended_at, due_at, key"
_NO_REQUEST: Final = {"head": None, "body": None, "body_file": None}
_NO_ANSWER: Final = {"answer": None, "answer_body": None, "answer_file": None}
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
        self._folder = folder / "bodies"
        self._claimed: set[int] = set()
        self._writes = 0
        self._file = SqliteFile(folder / "calls.db", _MIGRATIONS)
        try:
            self._remove_orphans()
        except BaseException:
            self._file.close()
            raise

    def write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        unnamed: list[Path] = []
        with self._file.transaction() as db:
            for outcome in outcomes:
                unnamed += self._settle(db, outcome)
            db.executemany(
                "INSERT INTO calls (id, function, phase, due_at, accepted_at, head, body_file, body)"
                " VALUES (?, ?, 'queued', ?, ?, ?, ?, ?)",
                [
                    (call.id, call.function, call.accepted_at, call.accepted_at, _head_of(call), *_columns(call.body))
                    for call in accepted
                ],
            )
            if outcomes:
                unnamed += self._prune(db, max(outcome.at for outcome in outcomes))
        self._claimed.difference_update(outcome.key for outcome in outcomes)
        remove_files(unnamed)

    def claim(self, phase: Phase, function: str, now: float, limit: int) -> tuple[list[ClaimedCall], float | None]:
        with self._file.reading() as db:
            # Those claimed are few, and stand at the front: they are read over.
            due = db.execute(
                "SELECT key, due_at FROM calls WHERE phase = ? AND function = ? AND due_at IS NOT NULL"
                " ORDER BY due_at, key LIMIT ?",
                (phase, function, limit + len(self._claimed) + 1),
            ).fetchall()
            free = [(key, at) for key, at in due if key not in self._claimed]
            keys = [key for key, at in free[:limit] if at <= now]
            claimed = [self._read(db, key) for key in keys]
            self._claimed.update(keys)
            return claimed, free[len(keys)][1] if len(free) > len(keys) else None

    def cancel(self, calls: Sequence[str], now: float) -> list[list[CancelledCall]]:
        unnamed: list[Path] = []
        done: list[list[CancelledCall]] = []
        with self._file.transaction() as db:
            for call in calls:
                rows = _update(
                    db, cancelled(now), "id = ? AND due_at IS NOT NULL RETURNING key, function", call
                ).fetchall()
                found = [CancelledCall(key, function, key in self._claimed) for key, function in rows]
                for each in found:
                    if not each.is_claimed:  # one that is may be reading its files
                        unnamed += self._strip(db, each.key)
                done.append(found)
        remove_files(unnamed)
        return done

    def get(self, call: str) -> CallStatus | None:
        with self._file.reading() as db:
            row = db.execute(f"SELECT {_STATUS} FROM calls WHERE id = ? ORDER BY key DESC LIMIT 1", (call,)).fetchone()
            return self._status(row) if row else None

    def list_dead(self, function: str | None = None, limit: int = 1000) -> list[CallStatus]:
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT {_STATUS} FROM calls WHERE phase = 'dead' AND ended_at IS NOT NULL"
                " AND (?1 IS NULL OR function = ?1) ORDER BY ended_at, key LIMIT ?2",
                (function, limit),
            ).fetchall()
            return [self._status(row) for row in rows]

    def requeue(self, call: str, now: float) -> Waiting | None:
        unnamed: list[Path] = []
        with self._file.transaction() as db:
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
            _update(db, requeued(phase, now), "key = ?", key)
        remove_files(unnamed)
        return Waiting(phase, function, 1, now)

    def discard(self, call: str) -> bool:
        with self._file.transaction() as db:
            rows = db.execute(
                "DELETE FROM calls WHERE id = ? AND phase = 'dead' RETURNING body_file, answer_file", (call,)
            ).fetchall()
        remove_files(self._files(*(name for row in rows for name in row)))
        return bool(rows)

    def waiting(self) -> list[Waiting]:
        with self._file.reading() as db:
            rows = db.execute(
                "SELECT phase, function, count(*), min(due_at) FROM calls WHERE due_at IS NOT NULL"
                " GROUP BY phase, function"
            ).fetchall()
            return [Waiting(*row) for row in rows]

    def new_file(self) -> SpoolFile:
        return SpoolFile(self._folder / secrets.token_hex(16))

    def close(self) -> None:
        self._file.close()

    # --- rows ---

    def _settle(self, db: sqlite3.Connection, outcome: Outcome) -> list[Path]:
        """Write one outcome; return the files that no row names once it is committed."""
        row = db.execute("SELECT due_at, body_file, answer_file FROM calls WHERE key = ?", (outcome.key,)).fetchone()
        if row is None or row[0] is None:
            # It was cancelled while it was claimed, and may be forgotten since.
            answered = outcome.answer.body if isinstance(outcome, Deliver) else b""
            return self._strip(db, outcome.key) + ([answered] if isinstance(answered, Path) else [])
        unnamed: list[Path] = []
        changes = settled(outcome)
        match outcome:
            case Done():
                changes |= {**_NO_REQUEST, **_NO_ANSWER}
                unnamed = self._files(*row[1:])
            case Dead(undelivered=False):
                changes |= _NO_ANSWER
                unnamed = self._files(row[2])
            case Deliver(answer=answer):
                head = _AnswerHead(answer.status, answer.headers, answer.duration_s, answer.attempts_allowed)
                file, inline = _columns(answer.body)
                changes |= {"answer": _encode(head), "answer_file": file, "answer_body": inline}
            case _:
                pass
        _update(db, changes, "key = ?", outcome.key)
        return unnamed

    def _strip(self, db: sqlite3.Connection, key: int) -> list[Path]:
        """Forget the request and answer of a call that has ended; return their files."""
        rows = db.execute("SELECT body_file, answer_file FROM calls WHERE key = ?", (key,)).fetchall()
        _update(db, {**_NO_REQUEST, **_NO_ANSWER}, "key = ?", key)
        return self._files(*(name for row in rows for name in row))

    def _prune(self, db: sqlite3.Connection, now: float) -> list[Path]:
        """Forget what ended long ago, and the oldest of what ended if there is too much of it, a few at a time."""
        unnamed: list[Path] = []

        def forget(which: str, *values: object) -> None:
            chosen = f"SELECT key FROM calls WHERE {which} ORDER BY ended_at LIMIT ?"
            sql = f"DELETE FROM calls WHERE key IN ({chosen}) RETURNING body_file, answer_file"
            unnamed.extend(self._files(*(name for row in db.execute(sql, values).fetchall() for name in row)))

        for phase, (kept_s, _) in self._kept.items():
            forget("phase = ? AND ended_at < ?", phase, now - kept_s, _PRUNED_AT_ONCE)
        self._writes += 1
        if self._writes % 100 == 0:  # counting takes milliseconds
            for phase, (_, kept) in self._kept.items():
                ended = "phase = ? AND ended_at IS NOT NULL"
                (count,) = db.execute(f"SELECT count(*) FROM calls WHERE {ended}", (phase,)).fetchone()
                forget(ended, phase, max(0, count - kept))
        return unnamed

    def _read(self, db: sqlite3.Connection, key: int) -> ClaimedCall:
        row = db.execute(
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

    def _remove_orphans(self) -> None:
        """Remove files that no row names."""
        with self._file.reading() as db:
            self._folder.mkdir(exist_ok=True)
            rows = db.execute(
                "SELECT body_file, answer_file FROM calls WHERE body_file IS NOT NULL OR answer_file IS NOT NULL"
            )
            named = {name for row in rows for name in row}
            remove_files([path for path in self._folder.iterdir() if path.name not in named])


def _update(db: sqlite3.Connection, changes: Mapping[str, object], which: str, *values: object) -> sqlite3.Cursor:
    return db.execute(_updating(which, *changes), (*changes.values(), *values))


@functools.cache  # they are few
def _updating(which: str, *columns: str) -> str:
    return f"UPDATE calls SET {', '.join(f'{name} = ?' for name in columns)} WHERE {which}"


def _head_of(call: AcceptedCall) -> bytes:
    return _encode(_Head(call.name, call.path, call.query, call.headers, call.callback_url, call.start_ns))


def _columns(body: Body) -> tuple[str | None, bytes | None]:
    """Return a body as (file, inline)."""
    return (body.name, None) if isinstance(body, Path) else (None, body or None)
