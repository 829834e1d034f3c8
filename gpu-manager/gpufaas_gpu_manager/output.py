"""What a worker prints: as much as `line_limit` allows goes into its function's log, the last lines into errors."""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from gpufaas_core.log_marks import lines_in, new_secret
from gpufaas_core.logs import Printed
from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.line_limit import OPEN_S, Allowance, LineLimit

STREAMS: Final = ("stdout", "stderr")
_TAIL: Final = 2000
"""Characters of a worker's last lines that go into an error."""
_KEPT: Final = 100
"""Lines: those of other calls may come between those of one."""
_READ: Final = 65536
"""Bytes of one read: as much as a pipe holds, unless its writer enlarges it, to 1 MiB at most."""
_LAST_READS: Final = 16


class LogSink(Protocol):
    """Where lines of functions go (gpufaas_core.logs)."""

    def extend(self, function: str, instance: str, printed: Iterable[Printed]) -> None: ...


class Output:
    """A worker's stdout and stderr: each line goes into the log with its stream and call, the last ones into errors."""

    def __init__(self, logs: LogSink, function: str, instance: str) -> None:
        self.secret = new_secret()
        """The secret in the marks that tell which call wrote a line (gpufaas_core.log_marks)."""
        self._logs = logs
        self._function = function
        self._instance = instance
        self._pipes: list[_Pipe] = []
        self._tail: deque[tuple[Seconds, str, str]] = deque(maxlen=_KEPT)
        """When a line was read, the call that wrote it (empty: of none), and its text."""

    @contextlib.contextmanager
    def piped(self) -> Iterator[list[int]]:
        """
        Yield the write ends of two pipes, for stdout and stderr, and close them afterwards; the read ends stay open.

        :raises OSError: there are no descriptors left
        """
        allowance = Allowance(time.monotonic())
        ends: list[int] = []
        try:
            for stream in STREAMS:
                read, write = os.pipe()
                ends.append(write)
                self._pipes.append(_Pipe(read, stream, allowance, self))
            yield ends
        finally:
            for end in ends:
                os.close(end)

    def say(self, line: str) -> None:
        """Add a line of the platform to the log."""
        self.extend((line,))

    def extend(self, lines: Sequence[str], stream: str = "") -> None:
        """Add *lines* to the log, which came through *stream* (empty: unknown)."""
        printed = [Printed(text, stream, call) for line in lines for call, text in lines_in(line, self.secret)]
        self._keep_all((each.call, each.text) for each in printed)
        self._logs.extend(self._function, self._instance, printed)

    def keep(self, left_out: Iterable[bytes]) -> None:
        """Keep lines that are not in the log: they may be the reason for what happens next."""
        for each in left_out:
            self._keep_all(lines_in(each.decode(errors="replace"), self.secret))

    def _keep_all(self, lines: Iterable[tuple[str, str]]) -> None:
        now = time.monotonic()
        self._tail.extend((now, call, text[-_TAIL:]) for call, text in lines)

    def tail(self, call: str = "", since: Seconds = 0.0) -> str:
        """
        Return its last lines, as they go into an error; empty: there are none.

        :param call: only its lines, and those of no call that came *since*; empty: all
        """
        lines = [text for at, of, text in self._tail if not call or of == call or (not of and at >= since)]
        text = "\n".join(lines)[-_TAIL:]
        return f"\n--- last lines of its output ---\n{text}" if text else ""

    def close(self) -> None:
        """Take what is still in the pipes, without waiting for a grandchild that holds their other ends."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()


class _Pipe:
    """The read end of one stream of *output*."""

    def __init__(self, fd: int, stream: str, allowance: Allowance, output: Output) -> None:
        self._fd: int | None = fd
        self._stream = stream
        self._output = output
        self._limit = LineLimit(time.monotonic(), allowance)
        self._later: asyncio.TimerHandle | None = None
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._on_readable)

    def _on_readable(self) -> None:
        """One read, one batch of lines, so that a worker that prints without end does not hold up others."""
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
        if lines := self._limit.turn(now, idle=idle):
            self._output.extend(lines, self._stream)
        if self._limit.left_out:
            self._output.keep(self._limit.left_out)
        loop = asyncio.get_running_loop()
        if (wait := self._limit.wait()) and self._fd is not None:
            loop.remove_reader(self._fd)  # its pipe fills, and then its writer waits
        if self._later is not None:
            self._later.cancel()
        wait = wait or (0.0 if self._limit.open_since is None else OPEN_S)
        self._later = loop.call_later(wait, self._go_on) if wait else None

    def _go_on(self) -> None:
        self._later = None
        more = self._limit.waiting or self._read()
        if self._fd is not None:
            asyncio.get_running_loop().add_reader(self._fd, self._on_readable)
        self._take(idle=not more)

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for _ in range(_LAST_READS):  # a grandchild may print on
            if not self._read():
                break
        if rest := self._limit.end(time.monotonic()):
            self._output.extend(rest, self._stream)
        self._detach()

    def _detach(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
