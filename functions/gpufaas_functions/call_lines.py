"""
Standard output and error of a worker. Each line is marked with the call that wrote it (gpufaas_core.log_marks).

The call is found by its context: asyncio tasks, and all else that copies contexts, write for the call that started
them. In a worker that runs one call at a time, every thread writes for that call. Lines outside of calls have no mark,
nor have lines that are written to the file descriptors directly.

Lines of several threads do not mix: the start of a line is kept until the line ends or returns to its start, its thread
flushes, or its call ends.
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
"""Bytes of a line. The reader's limit is a little higher, and would cut a mark in two."""
_of_context: Final[ContextVar[str]] = ContextVar("call", default="")
_running = ""
"""The call of a worker that runs one at a time."""
_secret = ""
_streams: Final[list["CallLines"]] = []


def install() -> None:
    """Let `sys.stdout` and `sys.stderr` write through `CallLines`. Call it before importing modules that keep them."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        before.flush()
        lines = CallLines(fd, f"<{name}>")
        _streams.append(lines)
        after = io.TextIOWrapper(lines, before.encoding, before.errors, newline="\n", write_through=True)
        setattr(sys, name, after)
        setattr(sys, f"__{name}__", after)


def mark_with(secret: str) -> None:
    """Mark lines of calls from now on; an empty *secret* marks none."""
    global _secret
    _secret = secret


def begin(call: str, alone: bool) -> None:
    """Mark what this context writes from now on with *call*; if the call runs *alone*, what every thread writes."""
    global _running
    if alone:
        _running = call
    else:
        _of_context.set(call)


def end(call: str, alone: bool) -> None:
    """Stop marking with *call*, and end the lines that it did not end."""
    global _running
    if alone:
        _running = ""
    else:
        _of_context.set("")
    for each in _streams:
        if each.unfinished:  # rarely; every call comes through here
            each.end(call)


class CallLines(io.BufferedIOBase):
    """One of the two streams. Blocks while its pipe is full, which slows down a function that prints too much."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self.mode = "wb"
        self._fd = fd
        self._lock = threading.RLock()  # a signal's handler may print while its thread does
        self._held: dict[tuple[int, str], bytes] = {}
        """Lines without an end, by thread and call."""
        self._open: str | None = None
        """The call whose line is written and not ended; None: every line is ended."""
        self.unfinished = False
        """Some line may have no end yet."""
        self._size = 0
        """Bytes of the line that is not ended yet."""
        os.register_at_fork(after_in_child=self._forked)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        """:raises OSError: the reader is gone"""
        data = bytes(data)
        call = _of_context.get() or _running
        key = threading.get_ident(), call
        with self._lock:
            rest = self._held.pop(key, b"") + data
            if end := max(rest.rfind(b"\n"), rest.rfind(b"\r", 1)) + 1:  # the text after a first \r is written with it
                self._put(call, rest[:end])
                rest = rest[end:]
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
        """End the lines of *call*, in all threads."""
        with self._lock, contextlib.suppress(OSError):
            for key in [key for key in self._held if key[1] == call]:
                self._put(call, self._held.pop(key) + b"\n")
            if self._open == call:
                self._put(call, b"\n")
            self.unfinished = bool(self._held) or self._open is not None

    def _put(self, call: str, data: bytes) -> None:
        """Write *data* of *call*: lines, the last of which may have no end."""
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
        """Return *line* as a continuation of the open line, or as a new line with its mark; in parts if too long."""
        if self._open == call and self._size + len(line) <= _LONGEST:
            self._size += len(line)
            return line
        ended = b"" if self._open is None else b"\n"
        before = mark(_secret, call) if _secret and call else b""
        parts = [line[at : at + _LONGEST] for at in range(0, len(line), _LONGEST)] or [b""]
        self._size = len(parts[-1])
        return ended + b"\n".join(before + part for part in parts)

    def _forked(self) -> None:
        """Forget, in a forked child, the lines that its parent keeps and will write, and the parent's lock."""
        self._lock = threading.RLock()
        self._held.clear()
