"""Files of this machine: whether one is as it was, and removing folders that cannot be written."""

import contextlib
import os
import shutil
from pathlib import Path

FileIdentity = tuple[int, int, int, int, int]


def identity(status: os.stat_result) -> FileIdentity:
    """
    Return what differs after each change of a file: device, inode, size, mtime and ctime, times in nanoseconds.

    Size and mtime do not tell: weights of one architecture have one size, and `cp -p`, rsync and archives set mtime.
    Nobody can set ctime. It changes with links and modes, too: who finds another identity looks at the bytes.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def remove_tree(folder: Path) -> None:
    """
    Remove *folder* with all that is in it, also what its owner may not write. Links are not followed. No error: what
    cannot go stays.
    """
    if not folder.is_symlink():
        _open_up(folder)
        for at, names, _ in os.walk(folder):
            for name in names:
                _open_up(Path(at, name))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.unlink()  # a link, or a file


def _open_up(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            folder.chmod(0o700)
