"""Files that are replaced whole: a reader finds the old text or the new one, never a part of it."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gpufaas_core.errors import GpufaasError


@contextlib.contextmanager
def alone(file: Path) -> Iterator[None]:
    """Make the folder of *file*, and keep other commands from changing what is in it, from reading to replacing it."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with in_turn(file.parent):
        yield


@contextlib.contextmanager
def in_turn(folder: Path, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """
    Keep other commands that ask for it out of *folder*, which is there.

    :param waits: called before another command keeps this one waiting
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folders
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def replace_file(file: Path, text: str, mode: int = 0o600) -> None:
    """
    Write *text* to *file*, in `alone`; a link stays one. Until it has *mode*, only its owner can read it.

    :raises GpufaasError: it cannot be written
    """
    aside, file = None, file.resolve()
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, newline="", encoding="utf-8", delete=False) as made:
            aside = Path(made.name)
            made.write(text)
        aside.chmod(mode)
        os.replace(aside, file)
    except OSError as exc:
        if aside is not None:
            aside.unlink(missing_ok=True)
        raise GpufaasError(f"{file} cannot be written: {exc.strerror}") from exc
