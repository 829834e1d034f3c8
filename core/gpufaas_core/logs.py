"""
The output of functions. It is kept on disk, so that it survives the worker and a restart of the platform.

One file of JSON lines per function, ``NAME.NAMESPACE.jsonl``, in the shape that OpenFaaS clients read (openfaas.md
§4.5). At `max_bytes` it replaces ``NAME.NAMESPACE.jsonl.1``, so a function never has more than twice that. The last
lines are in memory too, since most readers want only those.

The timestamps of a function have a fixed width and strictly grow: their order is that of their texts.
"""

import asyncio
import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from gpufaas_core.units import KiB, MiB

MAX_FILE_BYTES: Final = 10 * MiB
MEMORY_LINES: Final = 1000
_MAX_LINE: Final = 64 * KiB  # characters; of-watchdog's log_buffer_size
_MAX_OPEN: Final = 64  # files kept open for appending, least recently opened closed first: fds are for sockets
_TAIL_BYTES: Final = 256 * KiB  # read back after a restart to fill the memory
_FOLLOWER_LINES: Final = 10_000  # that wait for a slow reader; more are left out, and it is told how many
_MEMORY_CHARS: Final = 1 * MiB  # of the lines in memory, and of those that wait for a follower
_FOLLOWER_CHARS: Final = 8 * MiB
_TURN_LINES: Final = 100  # that a follower gets before the others on its loop have a turn
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{,199}")  # with its endings a file's name: 255 bytes


class Printed(NamedTuple):
    """One line that a function printed."""

    text: str
    stream: str = ""
    """``stdout`` or ``stderr``; empty: unknown, or a line of the platform."""
    call: str = ""
    """X-Call-Id of the call that printed it; empty: unknown, or outside of calls."""


class LogLine(Struct, frozen=True, omit_defaults=True, rename={"call": "callId"}):
    """
    One line as clients read it. Those of OpenFaaS ignore `stream` and `callId`; see `Printed`.

    `timestamp` is RFC 3339 in UTC with six fractional digits.
    """

    name: str
    namespace: str
    instance: str
    timestamp: str
    text: str
    stream: str = ""
    call: str = ""


class LogQuery(Struct, array_like=True, frozen=True):
    """Selects lines of a function. A gateway sends it to nodes unchanged."""

    name: str
    namespace: str
    since: datetime | None = None
    """Only lines of that moment or later. Has a time zone."""
    tail: int = 0
    """Only the last `tail` lines; 0 or less: all."""
    instance: str = ""
    """Only lines of this worker; empty: of all workers."""
    call: str = ""
    """Only lines of the call with this X-Call-Id; empty: all lines."""

    @property
    def function(self) -> str:
        """``NAME.NAMESPACE``."""
        return f"{self.name}.{self.namespace}"

    def wants(self, line: LogLine) -> bool:
        """Whether *line* is of that worker and that call."""
        return (not self.instance or line.instance == self.instance) and (not self.call or line.call == self.call)


_decode: Final = msgspec.json.Decoder(LogLine).decode
_encode: Final = msgspec.json.Encoder().encode


class FunctionLogs:
    """
    The logs of all functions, under one directory. Safe from any thread; followers are woken in their own loops.

    A function is ``NAME.NAMESPACE`` here. When the disk is full, lines are missing in the file; those in memory can
    still be read and followed.
    """

    def __init__(self, root: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._logs: dict[str, _Log] = {}
        self._open: deque[_Log] = deque()
        self._closed = False

    def extend(self, function: str, instance: str, printed: Iterable[Printed]) -> None:
        """
        Keep lines that *instance* of *function* printed, and wake its followers. Some 3 us for each, 10 us for one.

        A trailing newline is dropped; a line over 64 Ki characters is cut. After `close` it does nothing.
        """
        name, _, namespace = function.rpartition(".")
        with self._lock:
            if self._closed or not _SAFE_NAME.fullmatch(function):
                return
            log = self._log(function)
            lines = [
                LogLine(name, namespace, instance, log.stamp(), text.rstrip("\r\n")[:_MAX_LINE], stream, call)
                for text, stream, call in printed
            ]
            log.keep(lines)
            if log.fd is None:
                self._open_for_append(log)
            log.write(lines, self._max_bytes)
            for follower in log.followers:
                follower.push(lines)

    def query(self, query: LogQuery, until: str | None = None) -> list[LogLine]:
        """
        Return the lines of a function, oldest first; none if it never printed.

        Reads up to 20 MB of files, unless the memory has all of them: do not call it in an event loop.

        :param until: lines after this timestamp are left out; None: none is
        """
        function = query.function
        earliest = _stamp_of(query.since) if query.since is not None else ""
        with self._lock:
            if not _SAFE_NAME.fullmatch(function):
                return []
            if function not in self._logs and not self._path(function).exists():
                return []  # a name that somebody tries must not cost memory
            log = self._log(function)
            lines: Iterable[LogLine] = list(log.lines)
            oldest = log.lines[0].timestamp if log.lines else ""
            all_in_memory = log.complete
            files = [] if all_in_memory else self._files(function)
        try:
            found = _select(lines, query, earliest, until)
            enough = all_in_memory or (oldest and earliest >= oldest) or (0 < query.tail <= len(found))
            if not enough:
                # From the oldest in memory on, memory has it all; the files may not (a full disk, small files).
                stored = _select(_read(files), query, earliest, until)
                found = [line for line in stored if not oldest or line.timestamp < oldest] + found
        finally:
            for fd in files:
                os.close(fd)
        return found[-query.tail :] if query.tail > 0 else found

    async def follow(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
        """
        Yield what `query` returns, then each line as it is printed, until `close`.

        Waits without a deadline: a function may be silent for days. Its reader ends it by closing the iterator.
        """
        function = query.function
        if not _SAFE_NAME.fullmatch(function):
            return
        follower = _Follower(asyncio.get_running_loop())
        with self._lock:
            if self._closed:
                follower.end()
            log = self._log(function)
            log.followers.append(follower)
            # Lines up to here come from the query, later ones from the follower: none twice, none missing.
            until = log.last
        try:
            stored = await asyncio.to_thread(self.query, query, until)
            for number, line in enumerate(stored, 1):
                yield line
                if number % _TURN_LINES == 0:
                    await asyncio.sleep(0)  # a reader that never waits would keep the loop
            del stored
            earliest = _stamp_of(query.since) if query.since is not None else ""
            async for line in follower.lines_as_they_come():
                if (query.wants(line) or not line.instance) and line.timestamp >= earliest:
                    yield line
        finally:
            with self._lock:
                log.followers.remove(follower)

    def known(self, name: str, namespace: str) -> bool:
        """Whether the function ever printed, and was not dropped since."""
        function = f"{name}.{namespace}"
        with self._lock:
            if not _SAFE_NAME.fullmatch(function):
                return False
            log = self._logs.get(function)
            return bool(log and log.lines) or self._path(function).exists()

    def drop(self, name: str, namespace: str) -> None:
        """Delete what a function printed. Its followers stay: it may be deployed again."""
        function = f"{name}.{namespace}"
        with self._lock:
            if not _SAFE_NAME.fullmatch(function):
                return
            if log := self._logs.get(function):
                self._close_file(log)
                log.clear()
            for path in (self._path(function), _older(self._path(function))):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def end_followers(self) -> None:
        """End everyone who follows, while lines are still kept: a server that stops must not wait for them."""
        with self._lock:
            for log in self._logs.values():
                for follower in log.followers:
                    follower.end()

    def close(self) -> None:
        """Close the files and end every follower. Twice is no error."""
        with self._lock:
            self._closed = True
            for log in self._logs.values():
                self._close_file(log)
        self.end_followers()

    # --- below: the lock is held ------------------------------------------------------------------------------------

    def _log(self, function: str) -> "_Log":
        log = self._logs.get(function)
        if log is None:
            log = self._logs[function] = _Log(self._path(function))
        return log

    def _path(self, function: str) -> Path:
        return self._root / f"{function}.jsonl"

    def _files(self, function: str) -> list[int]:
        """Open the files to read, older first. Call it under the lock, so that no file is rotated meanwhile."""
        fds = []
        for path in (_older(self._path(function)), self._path(function)):
            with contextlib.suppress(OSError):
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return fds

    def _open_for_append(self, log: "_Log") -> None:
        while len(self._open) >= _MAX_OPEN:
            self._close_file(self._open[0])
        if log.open():
            self._open.append(log)

    def _close_file(self, log: "_Log") -> None:
        if log.fd is not None:
            self._open.remove(log)
            log.close()


class _Log:
    """One function's lines: the file to append to, the last lines, the followers. `FunctionLogs` has the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd: int | None = None
        self.size = 0
        self.lines: deque[LogLine] = deque()
        self._chars = 0
        # A file that exists may hold more than the memory does.
        self.complete = not path.exists()
        self.keep(_tail_of(path))
        self.followers: list[_Follower] = []
        self._micros = round(datetime.fromisoformat(self.last).timestamp() * 1_000_000) if self.lines else 0
        self._second = -1
        self._prefix = ""

    @property
    def last(self) -> str:
        return self.lines[-1].timestamp if self.lines else ""

    def keep(self, lines: Sequence[LogLine]) -> None:
        """Add *lines* to those in memory, and drop the oldest if there are too many."""
        self.lines.extend(lines)
        self._chars += sum(len(line.text) for line in lines)
        while len(self.lines) > MEMORY_LINES or (self._chars > _MEMORY_CHARS and len(self.lines) > 1):
            self._chars -= len(self.lines.popleft().text)
            self.complete = False

    def clear(self) -> None:
        self.lines.clear()
        self._chars = 0

    def stamp(self) -> str:
        """Return the next timestamp: now, or just after the last one if the clock has not moved."""
        self._micros = micros = max(time.time_ns() // 1000, self._micros + 1)
        second, fraction = divmod(micros, 1_000_000)
        if second != self._second:
            self._second = second
            self._prefix = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._prefix}.{fraction:06d}Z"

    def open(self) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.size = os.fstat(self.fd).st_size
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def write(self, lines: Iterable[LogLine], max_bytes: int) -> None:
        if self.fd is None:
            return
        data = bytearray()
        try:
            for line in lines:
                raw = _encode(line) + b"\n"
                held = self.size + len(data)
                if held and held + len(raw) > max_bytes:
                    self._flush(data)
                    self._rotate()
                data += raw
            self._flush(data)
        except OSError:
            return  # the disk is full; the lines are in memory

    def _flush(self, data: bytearray) -> None:
        """Write whole lines at once, so that a crash leaves whole lines."""
        assert self.fd is not None
        if data:
            self.size += os.write(self.fd, data)
            data.clear()

    def _rotate(self) -> None:
        assert self.fd is not None
        with contextlib.suppress(FileNotFoundError):  # an earlier rotation stopped halfway
            os.replace(self.path, _older(self.path))
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.close(self.fd)
        self.fd, self.size = fd, 0


class _Follower:
    """Lines on their way to one reader, in the reader's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lines: deque[LogLine] = deque()
        self._chars = 0
        self._left_out = 0
        self._ended = False
        self._wake = asyncio.Event()

    def push(self, lines: Sequence[LogLine]) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # its loop is closed, so its reader is gone
            self._loop.call_soon_threadsafe(self._push, lines)

    def end(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    async def lines_as_they_come(self) -> AsyncIterator[LogLine]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            given = 0
            while self._lines:
                line = self._lines.popleft()
                self._chars -= len(line.text)
                given += 1
                if given % _TURN_LINES == 0:
                    await asyncio.sleep(0)  # a reader that never waits would keep the loop
                if self._left_out:
                    text = f"gpufaas: {self._left_out} lines are left out here, because the reader was too slow"
                    yield msgspec.structs.replace(line, text=text, instance="", stream="", call="")
                    self._left_out = 0
                yield line
            if self._ended:
                return

    def _push(self, lines: Sequence[LogLine]) -> None:
        self._lines.extend(lines)
        self._chars += sum(len(line.text) for line in lines)
        while len(self._lines) > _FOLLOWER_LINES or (self._chars > _FOLLOWER_CHARS and len(self._lines) > 1):
            self._chars -= len(self._lines.popleft().text)
            self._left_out += 1
        self._wake.set()

    def _end(self) -> None:
        self._ended = True
        self._wake.set()


def _select(lines: Iterable[LogLine], query: LogQuery, earliest: str, until: str | None) -> list[LogLine]:
    return [
        line
        for line in lines
        if line.timestamp >= earliest and (until is None or line.timestamp <= until) and query.wants(line)
    ]


def _read(fds: Iterable[int]) -> Iterable[LogLine]:
    for fd in fds:
        with open(fd, "rb", closefd=False) as file:
            yield from _decoded(file)


def _decoded(raw_lines: Iterable[bytes]) -> Iterator[LogLine]:
    for raw in raw_lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # cut short by a full disk, or by who reads
            yield _decode(raw)


def _tail_of(path: Path) -> list[LogLine]:
    """Return the last lines of the file, as far as they lie in its last 256 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return list(_decoded(file.read().splitlines()))[-MEMORY_LINES:]  # the first may be half a line
    except OSError:
        return []


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _stamp_of(moment: datetime) -> str:
    # Not strftime: it does not pad years, and Go's zero time is of the year 1.
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
