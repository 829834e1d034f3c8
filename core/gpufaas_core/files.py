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
    """Remove *folder* with all that is in it, also what its owner may not write. No error: what cannot go stays."""
    for each, _, _ in os.walk(folder):  # links are not followed
        with contextlib.suppress(OSError):
            os.chmod(each, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
