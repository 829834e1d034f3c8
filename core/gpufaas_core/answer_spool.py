"""
Files for answers whose callers read more slowly than the functions write, so that the functions need not wait.

The space of one answer is bounded, and that of all together. Beyond it a function waits, within its time limit.
"""

import os
import tempfile
from collections import deque
from pathlib import Path
from typing import IO, Final

from gpufaas_core._types import Bytes
from gpufaas_core.errors import StorageFailed

ANSWER_BYTES: Final[Bytes] = 64 * 1024 * 1024
ALL_BYTES: Final[Bytes] = 1024 * 1024 * 1024
_PIECE: Final[Bytes] = 256 * 1024


class AnswerSpool:
    """The files of one process, in *directory*. They have no names, so they end with the process."""

    def __init__(self, directory: Path, *, each: Bytes = ANSWER_BYTES, whole: Bytes = ALL_BYTES) -> None:
        self.directory = directory
        self.each = each
        self.whole = whole
        self.used: Bytes = 0

    @property
    def has_room(self) -> bool:
        return self.used < self.whole


class SpooledAnswer:
    """
    First in, first out. `size` bytes wait in it.

    The file is a ring, so an answer without end, whose reader never catches up, takes bounded space on disk.
    """

    def __init__(self, spool: AnswerSpool) -> None:
        """:raises OSError: the file cannot be made"""
        self.size: Bytes = 0
        self._spool = spool
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="answer-", dir=spool.directory, buffering=0)  # noqa: SIM115
        self._read_at = self._write_at = 0
        """Bytes read and written since it was empty."""
        self._taken = 0
        """Space on disk, in bytes."""
        self._rest: deque[bytes] = deque()
        """Pieces that the file had no room for. They are few, since the function then waits."""

    @property
    def full(self) -> bool:
        """Whether the source should pause. `write` takes what comes nevertheless."""
        return bool(self._rest) or self.size >= self._spool.each or not self._spool.has_room

    @property
    def half_empty(self) -> bool:
        if not self.size:
            return True  # even if other answers fill the spool: nothing else would wake the function
        return not self._rest and self.size <= self._spool.each // 2 and self._spool.has_room

    def write(self, piece: bytes) -> None:
        self.size += len(piece)
        view = memoryview(piece)
        try:
            while view and not self._rest and (room := self._room()):
                at = self._write_at % self._spool.each
                written = os.pwrite(self._file.fileno(), view[:room], at)
                self._write_at += written
                self._spool.used += max(0, at + written - self._taken)
                self._taken = max(self._taken, at + written)
                view = view[written:]
        except OSError:
            pass  # the disk is full
        if view:
            self._rest.append(bytes(view))

    def read(self) -> bytes:
        """Return the next piece; empty: nothing is in it. :raises StorageFailed: the disk fails"""
        if self._read_at < self._write_at:
            at = self._read_at % self._spool.each
            size = min(_PIECE, self._write_at - self._read_at, self._spool.each - at)
            try:
                piece = os.pread(self._file.fileno(), size, at)
            except OSError as exc:
                why = f"an answer could not be read back from its file ({exc.strerror}): call again"
                raise StorageFailed(why) from exc
            self._read_at += len(piece)
            if self._read_at == self._write_at:
                self._empty()
        elif self._rest:
            piece = self._rest.popleft()
        else:
            return b""
        self.size -= len(piece)
        return piece

    def _room(self) -> Bytes:
        """Return how many bytes can be written in one piece."""
        each = self._spool.each
        return min(each - (self._write_at - self._read_at), each - self._write_at % each)

    def _empty(self) -> None:
        self._file.truncate(0)
        self._spool.used -= self._taken
        self._read_at = self._write_at = self._taken = 0

    def close(self) -> None:
        if not self._file.closed:
            self._empty()
            self._file.close()
            self._rest.clear()
            self.size = 0
