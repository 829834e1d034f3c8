"""Files that are replaced whole: a reader finds the old text or the new one, never a part of it."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gpufaas_core import files
from gpufaas_core.errors import GpufaasError


@contextlib.contextmanager
def alone(file: Path, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """
    Make the folder of *file*, and keep other commands from changing what is in it, from reading to replacing it.

    :param waits: called before another command keeps this one waiting
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folders
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def replace_file(file: Path, text: str, mode: int = 0o600) -> None:
    """
    Write *text* to *file*, in `alone`; a link stays one. Until it has *mode*, only its owner can read it.

    :raises GpufaasError: it cannot be written
    """
    try:
        files.replace_file(file.resolve(), text.encode(), mode)
    except OSError as exc:
        raise GpufaasError(f"{file.resolve()} cannot be written: {exc.strerror}") from exc
