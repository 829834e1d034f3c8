"""
Bodies that lie in files. Node and worker have the file open, so that it is there for as long as the call runs, whoever
removes its name: the caller may leave, and others of its batch go on.
"""

import errno
import os
import socket
from typing import Final

from msgspec import structs

from gpufaas_core.errors import StorageFailed
from gpufaas_core.frames import CallHead
from gpufaas_core.model import Bytes

_ROOM: Final[Bytes] = 256 * 1024
"""The kernel takes twice as much, and 768 bytes for each file."""
_MOST: Final[Bytes] = 1 << 30
"""The kernel reads no more at once than some 2 GiB."""


class BodyFile:
    """An open file. It is closed when nobody has it any more."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        """:param descriptor: -1: there was no room for one more"""
        self._descriptor = descriptor

    def fileno(self) -> int:
        """:raises OSError: it could not be opened in this process"""
        if self._descriptor < 0:
            raise OSError(errno.EMFILE, "too many open files to read the body of the call")
        return self._descriptor

    def __len__(self) -> Bytes:
        return os.fstat(self.fileno()).st_size

    def read(self, at: Bytes, size: Bytes) -> bytes:
        """Return a part of the body. :raises OSError: it cannot be read"""
        pieces = []
        while size > 0 and (piece := os.pread(self.fileno(), min(size, _MOST), at)):
            pieces.append(piece)
            at, size = at + len(piece), size - len(piece)
        return b"".join(pieces)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def opened(head: CallHead) -> BodyFile:
    """Return the body of a call, which lies in a file. :raises StorageFailed: it cannot be opened"""
    try:
        return BodyFile(os.open(head.body_path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise StorageFailed(f"the body could not be read where it was kept ({exc.strerror}): call again") from exc


def connected() -> tuple[socket.socket, socket.socket]:
    """
    Return the two ends, the node's first, of what open files go over. There is room for those of two of the largest
    batches: one may be with the worker beside that which it runs.

    :raises OSError: there can be no more open files
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    return ours, theirs


def give(files: socket.socket | None, file: BodyFile | None, head: CallHead) -> CallHead:
    """Send *file* to the worker, ahead of its call, and return the head of that: if it cannot be sent, it says why."""
    why = "there is none"
    if files is not None and file is not None:
        try:
            socket.send_fds(files, [b"\0"], [file.fileno()])
            why = ""
        except BrokenPipeError:
            why = ""  # the author's code has closed it: the worker finds that out, and ends
        except OSError as exc:
            why = exc.strerror or "it could not be sent"
    return structs.replace(head, body_path=why)


def take(files: socket.socket | None, head: CallHead) -> BodyFile:
    """
    Return the body of the call that has come: its file came before it, unless *head* says why not.

    :raises OSError: *files* is closed
    """
    if files is None or head.body_path:
        return BodyFile(-1)
    came, found, _, _ = files.recvmsg(1, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    if not came:
        raise OSError(errno.EPIPE, "closed")
    return BodyFile(int.from_bytes(found[0][2], "little")) if found else BodyFile(-1)
