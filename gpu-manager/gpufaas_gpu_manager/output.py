"""What a worker prints: line by line into the log of its function, its last words into errors."""

import asyncio
import os
from collections import deque
from typing import Final, Protocol

_TAIL: Final = 2000
"""Characters of a worker's last words that go into an error."""
_LINE: Final = 65536


class Logs(Protocol):
    """Where lines of functions go (gpufaas_core.logs)."""

    def append(self, function: str, instance: str, text: str) -> None: ...


class Output:
    """A worker's stdout and stderr: read as it comes, split into lines for the log, its tail kept for errors."""

    def __init__(self, logs: Logs, function: str, instance: str) -> None:
        self._logs = logs
        self._function = function
        self._instance = instance
        self._fd: int | None = None
        self._line = b""
        self._tail: deque[str] = deque(maxlen=40)

    def open(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        while self._fd is not None:
            try:
                data = os.read(self._fd, _LINE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._detach()
                return
            *lines, self._line = (self._line + data).split(b"\n")
            for line in lines:
                self.say(line.decode(errors="replace"))
            if len(self._line) > _LINE:  # a line without end is cut, as OpenFaaS's watchdog does
                self.say(self._line.decode(errors="replace"))
                self._line = b""

    def say(self, line: str) -> None:
        self._tail.append(line)
        self._logs.append(self._function, self._instance, line)

    def tail(self, wanted: bool) -> str:
        text = "\n".join(self._tail)[-_TAIL:]
        return f"\n--- last lines of its output ---\n{text}" if wanted and text else ""

    def close(self) -> None:
        """Take what is still in the pipe; a grandchild that holds its other end is not waited for."""
        self._read()
        if self._line:
            self.say(self._line.decode(errors="replace"))
            self._line = b""
        self._detach()

    def _detach(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
