"""Whether a file is as it was."""

import os

FileIdentity = tuple[int, int, int, int, int]


def identity(status: os.stat_result) -> FileIdentity:
    """
    Return what differs after each change of a file: device, inode, size, mtime and ctime, times in nanoseconds.

    Size and mtime do not tell: weights of one architecture have one size, and `cp -p`, rsync and archives set mtime.
    Nobody can set ctime. It changes with links and modes, too: who finds another identity looks at the bytes.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
