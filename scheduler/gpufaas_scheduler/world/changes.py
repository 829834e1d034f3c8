"""
Which docs have changed since they were last taken. A method that changes the content of a doc calls `mark`.
"""

from typing import Final

_MAX_GONE: Final = 10_000
"""A limit, for engines whose docs are never taken."""


class Changes:
    """The states that are marked, and the keys of docs whose device or function is gone."""

    __slots__ = ("_gone", "marked")

    def __init__(self) -> None:
        self.marked: list[Marked] = []
        self._gone: dict[str, None] = {}

    def gone(self, key: str) -> None:
        """The doc under *key* is obsolete: its device or function is gone."""
        self._gone[key] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def take(self) -> list[str]:
        """Return the keys of the docs that may have changed since the last call of this method."""
        for each in self.marked:
            each.marked = False
        keys = [*[each.key for each in self.marked], *self._gone]
        self.marked.clear()
        self._gone.clear()
        return keys


class Marked:
    """State that has a doc."""

    __slots__ = ("_changes", "key", "marked")

    def __init__(self, key: str, changes: Changes) -> None:
        self.key = key
        """The key of the doc."""
        self.marked = False
        self._changes = changes

    def mark(self) -> None:
        """Its doc changes. On the path of a call, check `marked` before you call this."""
        if not self.marked:
            self.marked = True
            self._changes.marked.append(self)

    def forget(self) -> None:
        """The state is gone, and its doc is obsolete."""
        if self.marked:
            self._changes.marked.remove(self)
            self.marked = False
        self._changes.gone(self.key)


def device_key(device: str) -> str:
    return f"devices/{device}"


def function_key(function: str) -> str:
    return f"functions/{function}"
