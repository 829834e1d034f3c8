"""What a worker prints: into the log of its function as far as `line_limit` lets it, its last words into errors."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from gpufaas_gpu_manager.line_limit import LineLimit

_TAIL: Final = 2000
"""Characters of a worker's last words that go into an error."""
_READ: Final = 65536
"""What is read at a time: as much as a pipe holds unless its writer enlarges it, to 1 MiB at most."""
_LAST_READS: Final = 16


class Logs(Protocol):
    """Where lines of functions go (gpufaas_core.logs)."""

    def extend(self, function: str, instance: str, texts: Iterable[str]) -> None: ...


class Output:
    """A worker's stdout and stderr: read as it comes, split into lines for the log, its tail kept for errors."""

    def __init__(self, logs: Logs, function: str, instance: str) -> None:
        self._logs = logs
        self._function = function
        self._instance = instance
        self._fd: int | None = None
        self._limit = LineLimit(time.monotonic())
        self._tail: deque[str] = deque(maxlen=40)
        self._later: asyncio.TimerHandle | None = None

    def open(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._on_readable)

    def _on_readable(self) -> None:
        """One read, one batch of lines: whoever prints without end gets a turn like all others."""
        self._read()
        self._take()

    def _read(self) -> bool:
        """Return whether there was something to read, or may be."""
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._limit.feed(data)
        else:
            self._detach()
        return bool(data)

    def _take(self, *, idle: bool = False) -> None:
        now = time.monotonic()
        lines = self._limit.take(now)
        if note := self._limit.note(now, idle=idle):
            lines.append(note)
        if lines:
            self.extend(lines)
        if self._limit.left_out:
            self._tail.extend(each.decode(errors="replace") for each in self._limit.left_out)
        if wait := self._limit.wait():
            loop = asyncio.get_running_loop()
            if self._fd is not None:
                loop.remove_reader(self._fd)  # its pipe fills, and then it waits
            self._later = loop.call_later(wait, self._go_on)

    def _go_on(self) -> None:
        self._later = None
        more = self._limit.waiting or self._read()
        if self._fd is not None:
            asyncio.get_running_loop().add_reader(self._fd, self._on_readable)
        self._take(idle=not more)

    def say(self, line: str) -> None:
        self.extend((line,))

    def extend(self, lines: Sequence[str]) -> None:
        self._tail.extend(lines)
        self._logs.extend(self._function, self._instance, lines)

    def tail(self, wanted: bool) -> str:
        text = "\n".join(self._tail)[-_TAIL:]
        return f"\n--- last lines of its output ---\n{text}" if wanted and text else ""

    def close(self) -> None:
        """Take what is still in the pipe; a grandchild that holds its other end is not waited for."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for _ in range(_LAST_READS):  # and one that prints on has nothing to say to anybody
            if not self._read():
                break
        rest = self._limit.rest()
        if note := self._limit.note(time.monotonic(), idle=True):
            rest.insert(0, note)
        if rest:
            self.extend(rest)
        self._detach()

    def _detach(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
