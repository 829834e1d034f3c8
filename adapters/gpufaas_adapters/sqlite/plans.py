"""`SqlitePlans`: the plans of an embedded platform, and what its policy keeps, in one file (port: `PlanStore`)."""

from pathlib import Path
from typing import Final

import msgspec

from gpufaas_adapters.sqlite.file import SqliteFile
from gpufaas_core.plans import KEPT, PlanVersion

_MIGRATIONS: Final = (
    """
CREATE TABLE plans (version INTEGER PRIMARY KEY, plan BLOB NOT NULL) STRICT;
CREATE TABLE policies (name TEXT PRIMARY KEY, state BLOB NOT NULL) STRICT;
""",
)


class SqlitePlans:
    """Opens or creates the file at once. :raises StorageFailed: see `SqliteFile`"""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, _MIGRATIONS)
        self.close = self._file.close

    def history(self) -> list[PlanVersion]:
        with self._file.reading() as db:
            rows = db.execute("SELECT plan FROM plans ORDER BY version DESC").fetchall()
            return [msgspec.json.decode(plan, type=PlanVersion) for (plan,) in rows]

    def add(self, plan: PlanVersion) -> bool:
        with self._file.transaction() as db:
            (latest,) = db.execute("SELECT coalesce(max(version), 0) FROM plans").fetchone()
            if latest != plan.version - 1:
                return False
            db.execute("INSERT INTO plans (version, plan) VALUES (?, ?)", (plan.version, msgspec.json.encode(plan)))
            db.execute("DELETE FROM plans WHERE version <= ?", (plan.version - KEPT,))
        self._file.checkpoint()
        return True

    def policy_state(self, name: str) -> bytes | None:
        """Return what the policy *name* kept last; None: nothing."""
        with self._file.reading() as db:
            found = db.execute("SELECT state FROM policies WHERE name = ?", (name,)).fetchone()
        return None if found is None else bytes(found[0])

    def keep_policy_state(self, name: str, state: bytes) -> None:
        self._file.write("REPLACE INTO policies (name, state) VALUES (?, ?)", name, state)
