"""
Bodies that lie in files. Node and worker keep such a file open, so it can be read for as long as the call runs, even
when its name is removed because the caller has left. Other calls of the batch go on.
"""

import errno
import os
import socket
from typing import Final

from msgspec import structs

from gpufaas_core.errors import StorageFailed
from gpufaas_core.model import Bytes
from gpufaas_core.wire.heads import CallHead

_ROOM: Final[Bytes] = 256 * 1024
"""For the files of two of the largest batches. The kernel takes twice as much, and 768 bytes for each file."""


class BodyFile:
    """An open file. It is closed when nobody has it any more."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        """:param descriptor: -1: there was no room for one more"""
        self.descriptor = descriptor

    def __len__(self) -> Bytes:
        """:raises OSError: it could not be opened in this process"""
        if self.descriptor < 0:
            raise OSError(errno.EMFILE, "too many open files to read the body of the call")
        return os.fstat(self.descriptor).st_size

    def read(self, at: Bytes, size: Bytes) -> bytes:
        """Return a part of the body. :raises OSError: it cannot be read"""
        pieces = []
        while size > 0 and (piece := os.pread(self.descriptor, size, at)):  # some 2 GiB at once, at most
            pieces.append(piece)
            at, size = at + len(piece), size - len(piece)
        return b"".join(pieces)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def opened(head: CallHead) -> BodyFile:
    """Return the body of a call, which lies in a file. :raises StorageFailed: it cannot be opened"""
    try:
        return BodyFile(os.open(head.body_path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise StorageFailed(f"the body could not be read where it was kept ({exc.strerror}): call again") from exc


def connected() -> tuple[socket.socket, socket.socket]:
    """Return the two ends, the node's first, of what open files go over. :raises OSError: there can be no more"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    return ours, theirs


def give(files: socket.socket, file: BodyFile, head: CallHead) -> CallHead:
    """Send *file* to the worker, and return the head of its call, which goes next: without a path if it was sent."""
    try:
        socket.send_fds(files, [b"\0"], [file.descriptor])
    except BrokenPipeError:
        pass  # the author's code has closed it: the worker finds that out, and ends
    except OSError:
        return head
    return structs.replace(head, body_path="")


def take(files: socket.socket, head: CallHead) -> BodyFile:
    """
    Return the body of the call that has come. Its file came before it, unless *head* has a path.

    :raises OSError: *files* is closed
    """
    if head.body_path:
        return BodyFile(-1)
    came, found, _, _ = socket.recv_fds(files, 1, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    if not came:
        raise OSError(errno.EPIPE, "closed")
    return BodyFile(found[0] if found else -1)
