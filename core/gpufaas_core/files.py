"""Files of this machine: whether one is as it was, replacing one, and removing folders that cannot be written."""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

FileIdentity = tuple[int, int, int, int, int]
ASIDE: Final = ".new-"
"""Begins the name of what a process that was killed has not replaced yet."""


def identity(status: os.stat_result) -> FileIdentity:
    """
    Return what differs after each change of a file: device, inode, size, mtime and ctime, times in nanoseconds.

    Size and mtime do not tell: weights of one architecture have one size, and `cp -p`, rsync and archives set mtime.
    Nobody can set ctime. It changes with links and modes, too: who finds another identity looks at the bytes.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def hash_file(path: Path) -> str:
    """Return the sha256 of *path*. :raises OSError: it cannot be read"""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Return when the names of the files in *path* are on the disk. :raises OSError: it refuses"""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replace_file(path: Path, value: bytes, mode: int = 0o600, uid: int = 0) -> None:
    """
    Write *value* to the file *path*, which has all of it or what it had, also after a power cut.

    :param uid: its owner, and gid; 0: those of this process
    :raises OSError: it cannot be written
    """
    aside = path.with_name(f"{ASIDE}{path.name}"[:255])
    aside.unlink(missing_ok=True)
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(file, "wb") as out:
            out.write(value)
            out.flush()
            os.fsync(out.fileno())
            os.fchmod(out.fileno(), mode)
            if uid:
                os.fchown(out.fileno(), uid, uid)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def remove_tree(folder: Path) -> None:
    """
    Remove *folder* with all that is in it, also what its owner may not write, and however deep. Links are not followed,
    not even by a name that another process gives to a link meanwhile. No error: what cannot go stays.
    """
    with contextlib.suppress(OSError):
        folder.unlink()  # a link, or a file
        return
    with contextlib.suppress(OSError):
        top = _opened(str(folder))
        left = _emptied(top, top)
        for name in left:  # grows meanwhile
            with contextlib.suppress(OSError):
                inside = _opened(name, top)
                left += _emptied(inside, top)
                os.close(inside)
                os.rmdir(name, dir_fd=top)
        os.close(top)
        folder.rmdir()


def _emptied(folder: int, top: int) -> list[str]:
    """Remove the files in *folder*, and move the folders in it to *top*; return their new names. No error."""
    moved = []
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(_opened(name, folder))
                os.rename(name, moved_as := secrets.token_hex(8), src_dir_fd=folder, dst_dir_fd=top)
                moved.append(moved_as)
    return moved


def _opened(name: str, within: int | None = None) -> int:
    """Return a descriptor of the folder *name*, which its owner may read and write then. :raises OSError: it is none"""
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=within)
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(found)
