"""Bodies as they come: in memory, or those that are too large for a queue's own record in files beside the queue."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpufaas_async_calls.call import Body
from gpufaas_core.errors import StorageFailed
from gpufaas_core.files import sync_directory
from gpufaas_core.units import Bytes


class SpoolFile:
    """
    A body that is being written. `keep` gives it to the queue; until then its writer has to `discard` it.

    :raises StorageFailed: from each method: it cannot be written
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        with self._translated():
            self._file = self._part.open("xb")

    def write(self, piece: bytes) -> None:
        with self._translated():
            self._file.write(piece)

    def keep(self) -> Path:
        """Put it under its name, on the disk. Blocks for two fsyncs."""
        with self._translated():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.rename(self.path)
            sync_directory(self.path.parent)
        return self.path

    def discard(self) -> None:
        try:
            self._file.close()  # which flushes, and may find the disk full
        except OSError:
            pass
        remove_files([self._part, self.path])

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StorageFailed(
                f"the body could not be kept in {self.path.parent} ({exc.strerror}): make room there, or send less"
            ) from exc


class KeptBody:
    """A body that comes in pieces: in memory as long as it is small, then in a file. Its writer may `discard` it."""

    def __init__(self, new_file: Callable[[], SpoolFile] | None, inline: Bytes) -> None:
        """:param new_file: None: it stays in memory :param inline: what is larger goes to a file"""
        self.size: Bytes = 0
        self.pieces: list[bytes] = []
        """What is in memory."""
        self._new_file = new_file
        self._inline = inline
        self._file: SpoolFile | None = None

    def write(self, piece: bytes) -> None:
        """:raises StorageFailed: it cannot be written"""
        self.size += len(piece)
        self.pieces.append(piece)
        if self.size > self._inline and self._new_file is not None:
            self._file = self._file or self._new_file()
            for each in self.pieces:
                self._file.write(each)
            self.pieces.clear()

    async def keep(self) -> Body:
        """Return all of it, durable if it is in a file. :raises StorageFailed: it cannot be written"""
        return b"".join(self.pieces) if self._file is None else await asyncio.to_thread(self._file.keep)

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()


def remove_files(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.unlink()
        except OSError:  # gone already, or to be removed at the next start
            pass
