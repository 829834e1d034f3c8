"""
Files for answers whose callers read them more slowly than they are made, so that no function waits for its readers.

Bounded: what one answer may have, and all of them together. Beyond that a function does wait, as long as its call may
take and its reader is patient.
"""

import os
import tempfile
from collections import deque
from pathlib import Path
from typing import IO, Final

from gpufaas_core._types import Bytes

ANSWER_BYTES: Final[Bytes] = 64 * 1024 * 1024
ALL_BYTES: Final[Bytes] = 1024 * 1024 * 1024
_PIECE: Final[Bytes] = 256 * 1024


class AnswerSpool:
    """The files of one process, in *directory*, which it does not outlive: they have no names."""

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
    First in, first out. `size` bytes are in it and were not read yet.

    The file is a ring: an answer without end, whose reader never catches up, takes no more of the disk than that.
    """

    def __init__(self, spool: AnswerSpool) -> None:
        """:raises OSError: there can be no file"""
        self.size: Bytes = 0
        self._spool = spool
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="answer-", dir=spool.directory, buffering=0)  # noqa: SIM115
        self._read_at = self._write_at = 0
        """Bytes since it was empty."""
        self._taken = 0
        """Of the disk."""
        self._rest: deque[bytes] = deque()
        """What the file had no room for. Little: the function is made to wait."""

    @property
    def full(self) -> bool:
        """It takes what comes nevertheless, but nothing more should."""
        return bool(self._rest) or self.size >= self._spool.each or not self._spool.has_room

    @property
    def half_empty(self) -> bool:
        if not self.size:
            return True  # whatever others have: nothing else will wake the function
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
            pass  # no room there
        if view:
            self._rest.append(bytes(view))

    def read(self) -> bytes:
        """Return the next piece; empty: nothing is in it. :raises OSError: the disk fails"""
        if self._read_at < self._write_at:
            at = self._read_at % self._spool.each
            size = min(_PIECE, self._write_at - self._read_at, self._spool.each - at)
            piece = os.pread(self._file.fileno(), size, at)
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
