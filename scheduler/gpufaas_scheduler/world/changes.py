"""
Which docs may be others than were last taken. State marks itself: a method that changes what a doc says calls `mark`.
"""

from typing import Final

_MAX_GONE: Final = 10_000
"""For those who take no docs."""


class Changes:
    """The states that are marked, and the keys of docs whose device or function is there no more."""

    __slots__ = ("_gone", "marked")

    def __init__(self) -> None:
        self.marked: list[Marked] = []
        self._gone: dict[str, None] = {}

    def gone(self, key: str) -> None:
        """Nothing is to be kept under *key* any more."""
        self._gone[key] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def take(self) -> list[str]:
        """Return the keys of the docs that may be others since this was called last."""
        for each in self.marked:
            each.marked = False
        keys = [*[each.key for each in self.marked], *self._gone]
        self.marked.clear()
        self._gone.clear()
        return keys


class Marked:
    """State that a doc is made of."""

    __slots__ = ("_changes", "key", "marked")

    def __init__(self, key: str, changes: Changes) -> None:
        self.key = key
        """Of its doc."""
        self.marked = False
        self._changes = changes

    def mark(self) -> None:
        """Its doc is another one now. Where a call passes, `marked` is looked at first."""
        if not self.marked:
            self.marked = True
            self._changes.marked.append(self)

    def forget(self) -> None:
        """It is there no more, nor is its doc."""
        if self.marked:
            self._changes.marked.remove(self)
            self.marked = False
        self._changes.gone(self.key)


def device_key(device: str) -> str:
    return f"devices/{device}"


def function_key(function: str) -> str:
    return f"functions/{function}"
