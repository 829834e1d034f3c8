"""A worker's end of the connection to its node: frames in, for one thread at a time, and frames out, of all threads."""

import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.wire.prefix import PREFIX

_BUFFER: Final = 64 * 1024
HELD_S: Final[Seconds] = 0.0003
"""An answer that waits for others goes out when another one comes that much after it."""
_unpack: Final = PREFIX.unpack_from
_join: Final = b"".join


class Closed(Exception):
    """The node closed the connection."""


class Absent:
    """A body that has come, and for which there was no memory."""

    def __init__(self, size: Bytes) -> None:
        self._size = size

    def __len__(self) -> Bytes:
        return self._size


Body: TypeAlias = bytes | Absent
Frame: TypeAlias = tuple[int, bytes, Body]
"""Kind and slot, as in `prefix.PREFIX`; header; body."""


class NodeConnection:
    """See module."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        waits = select.poll()
        waits.register(sock, select.POLLIN)
        self._await_more: Callable[[], object] = waits.poll
        """Waits until something has come. A thread that waits in ``recv`` on a unix socket is also woken when the other
        end has read what was sent on it."""
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._at = 0
        self._filled = 0
        self._sending = threading.Lock()
        self._out: deque[bytes | memoryview] = deque()
        self._held_until = 0.0

    def leave(self) -> None:
        """
        Called in a process that the author's code has forked: the connection is its parent's, with all that has come.
        What it would send or receive from now on raises `Closed`.
        """
        self.sock.close()
        self._await_more = list  # a thread of the parent may wait there
        self._at = self._filled = 0
        self._sending = threading.Lock()  # another thread may have had it

    # --- frames out ---

    def later(self, frame: bytes, now: Seconds) -> None:
        """
        Send *frame* with those that follow it at once; before this thread waits for a frame, at the latest.

        :raises Closed: the connection is closed
        """
        out = self._out
        if self._at == self._filled and not out:  # nothing follows
            self.send(frame)
            return
        out.append(frame)
        if len(out) == 1:
            self._held_until = now + HELD_S
        elif now > self._held_until:
            self.flush()

    def send(self, *frame: bytes | memoryview) -> None:
        """Send a frame in pieces, behind those that wait for it. :raises Closed: the connection is closed"""
        with self._sending:
            self._put(frame)

    def flush(self) -> None:
        """Send what was left for `later`. :raises Closed: the connection is closed"""
        if self._out:
            with self._sending:
                self._put(())

    def flush_at_exit(self) -> None:
        """As `flush`, unless this thread is sending: a signal's handler may end the process then."""
        if self._out and self._sending.acquire(timeout=HELD_S):
            self._put(())

    def _put(self, frame: tuple[bytes | memoryview, ...]) -> None:
        out, pieces = self._out, frame
        if out:
            before = []
            while out:  # another thread may add to it meanwhile
                before.append(out.popleft())
            pieces = (*before, *frame)
        try:
            if len(pieces) > 1 and sum(map(len, pieces)) <= _BUFFER:
                try:
                    pieces = (_join(pieces),)
                except MemoryError:
                    pass  # the author's code has it all; they go one by one
            for each in pieces:
                self.sock.sendall(each)
        except OSError:
            # It would look like an error of the author's generator.
            raise Closed from None

    # --- frames in: one recv for many small ones; a large body is received into its own buffer ---

    def next(self) -> Frame:
        """Wait for the next frame. :raises Closed: the connection is closed"""
        if self._filled - self._at < 16:
            self._need(16)
        kind, header_bytes, body_bytes = _unpack(self._buffer, at := self._at)
        header_at = at + 16
        body_at = header_at + header_bytes
        end = body_at + body_bytes
        if end <= self._filled:  # nearly always: all of the frame is here
            self._at, view = end, self._view
            header = bytes(view[header_at:body_at])
            try:
                return kind, header, bytes(view[body_at:end])
            except MemoryError:
                return kind, header, Absent(body_bytes)
        self._at = header_at
        taken = self._take(header_bytes)
        if isinstance(taken, Absent):
            raise MemoryError("for the header of a frame")
        return kind, taken, self._take(body_bytes)

    @property
    def unread(self) -> bool:
        """Whether more was received than `next` has returned."""
        return self._filled > self._at

    def has_more(self) -> bool:
        """Whether `next` would not wait, or not for long. :raises Closed: the connection is closed"""
        if self.unread:
            return True
        self._at = self._filled = 0
        try:
            self._filled = self.sock.recv_into(self._view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            raise Closed from None
        if not self._filled:
            raise Closed
        return True

    def _need(self, size: int) -> None:
        """Receive until *size* bytes, at most those of the buffer, are ready at `_at`."""
        ready = self._filled - self._at
        if not ready:
            self._at = self._filled = 0
            self._filled = self._receive(self._view)
        elif self._at:
            self._buffer[:ready] = self._buffer[self._at : self._filled]
            self._at, self._filled = 0, ready
        while self._filled < size:
            self._filled += self._receive(self._view[self._filled :])

    def _take(self, size: int) -> Body:
        """Receive the next *size* bytes, also if there is no memory for them."""
        ready = min(size, self._filled - self._at)
        try:
            whole = bytearray(size)
            view = memoryview(whole)
            view[:ready] = self._view[self._at : self._at + ready]  # the bytearray itself would take as much again
        except MemoryError:
            whole = None
        self._at += ready
        if ready < size:
            self._at = self._filled = 0
        while ready < size:
            ready += self._receive(self._view[: size - ready] if whole is None else view[ready:])
        try:
            return Absent(size) if whole is None else bytes(whole)
        except MemoryError:
            return Absent(size)

    def _receive(self, view: memoryview) -> int:
        if self._out:
            self.flush()
        try:
            self._await_more()
            count = self.sock.recv_into(view)
        except OSError:
            raise Closed from None
        if not count:
            raise Closed
        return count
