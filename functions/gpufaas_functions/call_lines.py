"""
Standard output and error of a worker, of which each line says which call wrote it (gpufaas_core.log_marks).

A call is known by its context: tasks of asyncio, and whatever else copies contexts, write for the call that began
them. A worker that runs one call at a time knows whose line it is from any thread. Lines outside of any call have no
mark, nor has what is written to the file descriptors themselves.

Lines of threads do not mix: the beginning of one is held until its end is there, its thread flushes, or its call ends.
"""

import contextlib
import io
import os
import sys
import threading
from contextvars import ContextVar
from typing import Any, Final

from gpufaas_core.log_marks import mark

_LONGEST: Final = 60 * 1024
"""Bytes of a line; the reader's limit is a little more, and would cut in the middle of a mark."""
_of_context: Final[ContextVar[str]] = ContextVar("call", default="")
_running = ""
"""The call of a worker that runs one at a time."""
_secret = ""
_streams: Final[list["CallLines"]] = []


def install() -> None:
    """Have `sys.stdout` and `sys.stderr` write through `CallLines`. Before modules that keep them are imported."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        before.flush()
        lines = CallLines(fd, f"<{name}>")
        _streams.append(lines)
        after = io.TextIOWrapper(lines, before.encoding, before.errors, newline="\n", write_through=True)
        setattr(sys, name, after)
        setattr(sys, f"__{name}__", after)


def mark_with(secret: str) -> None:
    """From now on lines of calls are marked; with an empty secret none are."""
    global _secret
    _secret = secret


def begin(call: str, alone: bool) -> None:
    """What this context writes from now on is of *call*; if it runs *alone*, what every thread writes."""
    global _running
    if alone:
        _running = call
    else:
        _of_context.set(call)


def end(call: str, alone: bool) -> None:
    """The call that has begun here is over: end the lines that it left without an end."""
    global _running
    if alone:
        _running = ""
    else:
        _of_context.set("")
    for each in _streams:
        if each.unfinished:  # hardly ever, and this is on the way of every call
            each.end(call)


class CallLines(io.BufferedIOBase):
    """One of the two streams. Blocks while its pipe is full: that is how one that prints too much is held up."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self.mode = "wb"
        self._fd = fd
        self._lock = threading.RLock()  # a signal's handler may print while its thread does
        self._held: dict[tuple[int, str], bytes] = {}
        """Beginnings of lines, by thread and call."""
        self._open: str | None = None
        """Whose line is written and not ended; None: all are."""
        self.unfinished = False
        """A line may have begun that has no end."""
        self._size = 0
        """Bytes of the line that is not ended."""
        os.register_at_fork(after_in_child=self._forked)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        """:raises OSError: nobody reads any more"""
        data = bytes(data)
        call = _of_context.get() or _running
        key = threading.get_ident(), call
        with self._lock:
            whole, newline, rest = (self._held.pop(key, b"") + data).rpartition(b"\n")
            if newline:
                self._put(call, whole + newline)
            if len(rest) > _LONGEST:
                self._put(call, rest)
            elif rest:
                self._held[key] = rest
            self.unfinished = bool(self._held) or self._open is not None
        return len(data)

    def flush(self) -> None:
        if not self._held:
            return
        call = _of_context.get() or _running
        with self._lock:
            if rest := self._held.pop((threading.get_ident(), call), b""):
                self._put(call, rest)

    def end(self, call: str) -> None:
        """End each line that *call* has begun, in whatever thread."""
        with self._lock, contextlib.suppress(OSError):
            for key in [key for key in self._held if key[1] == call]:
                self._put(call, self._held.pop(key) + b"\n")
            if self._open == call:
                self._put(call, b"\n")
            self.unfinished = bool(self._held) or self._open is not None

    def _put(self, call: str, data: bytes) -> None:
        """Write *data* of *call*: lines, the last of which may lack its end."""
        *whole, rest = data.split(b"\n")
        written = bytearray()
        for line in whole:
            written += self._begun(call, line) + b"\n"
            self._open = None
        if rest:
            written += self._begun(call, rest)
            self._open = call
        view = memoryview(written)
        while view:
            view = view[os.write(self._fd, view) :]

    def _begun(self, call: str, line: bytes) -> bytes:
        """Return *line* as it goes on the open one, or begins one with its mark; in parts if it is too long."""
        if self._open == call and self._size + len(line) <= _LONGEST:
            self._size += len(line)
            return line
        ended = b"" if self._open is None else b"\n"
        before = mark(_secret, call) if _secret and call else b""
        parts = [line[at : at + _LONGEST] for at in range(0, len(line), _LONGEST)] or [b""]
        self._size = len(parts[-1])
        return ended + b"\n".join(before + part for part in parts)

    def _forked(self) -> None:
        """In a child of the function's: what its parent holds is the parent's to write, and so is the lock."""
        self._lock = threading.RLock()
        self._held.clear()
