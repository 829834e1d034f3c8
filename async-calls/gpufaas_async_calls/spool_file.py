"""`SpoolFile`: a body that is too large for a queue's own record, in a file beside the queue."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpufaas_core.errors import StorageFailed
from gpufaas_core.files import sync_directory


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


def remove_files(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.unlink()
        except OSError:  # gone already, or to be removed at the next start
            pass
