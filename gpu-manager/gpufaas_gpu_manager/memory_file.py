"""
Sealed memory files: a file of the disk in memory that no process can change any more (memfd_create(2)).

Their memory is free when the last descriptor is closed and the last mapping gone, also if this process is killed.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpufaas_core.errors import CorruptArtifact
from gpufaas_core.units import Bytes
from gpufaas_functions.staged import HUGE, map_file
from gpufaas_gpu_manager.huge_pages import collapse

NAME: Final = "gpufaas-weights"
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Stopped(Exception):
    """The copy was not wanted any more."""


def sealed_copy(path: Path, size: Bytes, sha256: str, stopped: Callable[[], bool] = lambda: False) -> int:
    """
    Return the descriptor of a sealed memory file with the bytes of *path*. Blocks: 1 GiB takes about two seconds.

    :raises CorruptArtifact: *path* has another size or digest
    :raises OSError: *path* cannot be read, there is no memory, or memory files are forbidden here
    :raises Stopped: *stopped* said so
    """
    with open(path, "rb", buffering=0) as source:
        found = os.fstat(source.fileno()).st_size
        if found != size:
            raise CorruptArtifact(f"{path} has {found} bytes, and its manifest says {size}")
        copy = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(copy, size)
            digest = _fill(copy, source.fileno(), size, stopped)
            if digest != sha256:
                raise CorruptArtifact(f"{path} has sha256 {digest}, and its manifest says {sha256}")
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(copy)
            raise
    return copy


def _fill(copy: int, source: int, size: Bytes, stopped: Callable[[], bool]) -> str:
    """Copy *size* bytes; return their digest."""
    hashed = hashlib.sha256()
    view = memoryview(bytearray(min(size, HUGE)))
    huge = _HugePages(copy, size)
    at = 0
    while at < size:
        if stopped():
            raise Stopped
        count = os.preadv(source, [view], at)
        if not count:
            raise CorruptArtifact(f"the file ends at byte {at} of {size}")
        piece = view[:count]
        hashed.update(piece)
        written = 0
        while written < count:
            written += os.pwrite(copy, piece[written:], at + written)
        at += count
        huge.up_to(at)
    huge.close()
    return hashed.hexdigest()


class _HugePages:
    """
    Makes pages of 2 MiB of what was written, where the kernel lets this process do so. A worker that touches 1 GiB
    for the first time takes 10 ms then, and 75 ms with pages of 4 KiB.
    """

    def __init__(self, copy: int, size: Bytes) -> None:
        self._at = 0
        self._whole = None
        if size >= HUGE:
            with contextlib.suppress(MemoryError):
                self._whole = map_file(copy, mmap.PROT_READ, mmap.MAP_SHARED)

    def up_to(self, end: Bytes) -> None:
        while self._whole is not None and self._at + HUGE <= end:
            if not collapse(ctypes.addressof(self._whole) + self._at):
                self._whole = None
            self._at += HUGE

    def close(self) -> None:
        """Unmap the file: it cannot be sealed else."""
        self._whole = None
