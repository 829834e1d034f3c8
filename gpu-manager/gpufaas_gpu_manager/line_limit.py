"""
How much of what a worker prints is kept: bytes become lines, at a rate that the log, its disk and the loop can bear.

No IO: the reader of a pipe or a stream feeds it, takes lines, and reads on after `wait`. So the pipe of a worker that
prints without end fills up and holds it up, and it costs this process some 5 ms a second.
"""

import re
from typing import Final

from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.units import KiB, MiB, format_bytes

LINES_PER_S: Final = 1000
BYTES_PER_S: Final[Bytes] = 1 * MiB
BURST_LINES: Final = 10_000
BURST_BYTES: Final[Bytes] = 4 * MiB
"""This much at once is always kept: a traceback, the table of a training run."""
PATIENCE_S: Final[Seconds] = 5.0
"""A worker that prints more is held up for so long, and nothing is lost. Then lines above the rate are left out."""
LINE_BYTES: Final[Bytes] = 64 * KiB
"""A line without end is cut, as OpenFaaS's watchdog does."""
OPEN_S: Final[Seconds] = 1.0
"""After so long a line that has no end yet, as of a prompt or a progress bar, is taken as far as it is."""
TURN_LINES: Final = 200
"""Taken in one turn of the loop: under 1 ms."""
_TURN_S: Final[Seconds] = 0.005
_TICK_S: Final[Seconds] = 0.1
_NOTE_S: Final[Seconds] = 1.0
_LAST: Final = 40
_MARK: Final = re.compile(rb"\x1e[^\x1e\x1f]{,600}\x1f")  # of the call that wrote a line: gpufaas_core.log_marks
_BROKEN: Final = re.compile(rb"([\xc0-\xff]|[\xe0-\xff][\x80-\xbf]|[\xf0-\xff][\x80-\xbf]{2})\Z")  # end, of UTF-8


class Allowance:
    """What both streams of a worker may print, as a token bucket. Times are of any monotonic clock."""

    def __init__(self, now: Seconds) -> None:
        self.lines: float = BURST_LINES
        self.bytes: float = BURST_BYTES
        self._at = now

    def refill(self, now: Seconds) -> None:
        passed, self._at = max(0.0, now - self._at), now
        self.lines = min(BURST_LINES, self.lines + passed * LINES_PER_S)
        self.bytes = min(BURST_BYTES, self.bytes + passed * BYTES_PER_S)


class LineLimit:
    """The bytes of one stream that wait for their allowance."""

    def __init__(self, now: Seconds, allowance: Allowance | None = None) -> None:
        """:param allowance: None: of its own"""
        self.left_out: list[bytes] = []
        """The newest lines that the last `take` left out: they may be the reason for what happens next."""
        self._may = allowance or Allowance(now)
        self._buffer = b""
        self.open_since: Seconds | None = None
        """Since when there is something of a line without its end: `take` it after `OPEN_S`."""
        self._taken: bytes | None = None
        """What was left of a line when its beginning was taken before its end came; None: there is none."""
        self._short_since: Seconds | None = None
        self._noted_at = now
        self._left_lines = self._left_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether there are lines to take: read no more before that."""
        return b"\n" in self._buffer or len(self._buffer) > LINE_BYTES

    def feed(self, data: bytes) -> None:
        """Add *data*. A read that ends no line counts as a line: a worker could print single characters."""
        self._buffer += data
        if b"\n" not in data:
            self._may.lines -= 1
        elif self._taken is not None:
            line, _, rest = self._buffer.partition(b"\n")
            self._buffer = self._buffer if _MARK.sub(b"", line).strip() else rest
            self._taken = None

    def turn(self, now: Seconds, *, idle: bool = False) -> list[str]:
        """Return the lines of `take`, then that of `note`; call `wait` before the next time."""
        lines = self.take(now)
        if note := self.note(now, idle=idle):
            lines.append(note)
        return lines

    def end(self, now: Seconds) -> list[str]:
        """Return the line of `note`, then the lines of `rest`, when nothing more will come."""
        lines = self.rest()
        if note := self.note(now, idle=True):
            lines.insert(0, note)
        return lines

    def take(self, now: Seconds) -> list[str]:
        """Return the lines that may be kept now, `TURN_LINES` at most; call `wait` before the next time."""
        allowance = self._may
        allowance.refill(now)
        self.left_out = []
        may = min(TURN_LINES, max(0, int(allowance.lines))) if allowance.bytes > 0 else 0
        taken: list[bytes] = []
        if may and self.waiting:
            *taken, self._buffer = self._buffer.split(b"\n", may)
            if not taken:  # it has no end
                taken, self._buffer = [self._buffer[:LINE_BYTES]], self._buffer[LINE_BYTES:]
        elif may and self.open_since is not None and now >= self.open_since + OPEN_S:
            taken = [_BROKEN.sub(b"", self._buffer)]
            self._taken = self._buffer = b"".join(_MARK.findall(taken[0])[-1:]) + self._buffer[len(taken[0]) :]
        if taken or self.open_since is None:
            self.open_since = now if self._buffer.strip() not in (b"", self._taken) else None
            allowance.lines -= len(taken)
            allowance.bytes -= sum(map(len, taken)) + len(taken)
        if allowance.lines >= LINES_PER_S and allowance.bytes >= BYTES_PER_S:
            self._short_since = None  # it was quiet for a second
        elif allowance.lines < 1 or allowance.bytes <= 0:
            if self._short_since is None:
                self._short_since = now
            elif now - self._short_since > PATIENCE_S and self.waiting:
                self._leave_out()
        return [each.decode(errors="replace") for each in taken]

    def wait(self) -> Seconds:
        """Return after how many seconds to take lines, and then to read, again; 0.0: read as data comes."""
        if self._may.lines < 1 or self._may.bytes <= 0:
            return _TICK_S
        return _TURN_S if self.waiting else 0.0

    def note(self, now: Seconds, *, idle: bool = False) -> str:
        """
        Return the line that says what was left out, once a second and when that is over; else an empty text.

        :param idle: nothing more is there to be read
        """
        if idle:
            self._short_since = None
        if not self._left_lines or (self._short_since is not None and now - self._noted_at < _NOTE_S):
            return ""
        self._noted_at = now
        lines, size = self._left_lines, self._left_bytes
        self._left_lines = self._left_bytes = 0
        return (
            f"gpufaas: {lines} lines ({format_bytes(size)}) are left out here, because it prints more than "
            f"{LINES_PER_S} lines or {format_bytes(BYTES_PER_S)} a second"
        )

    def rest(self) -> list[str]:
        """Return the lines that are left when nothing more will come; of very many the last ones."""
        keep = max(TURN_LINES, int(self._may.lines))
        left, self._buffer = self._buffer.removesuffix(b"\n"), b""
        lines = left.rsplit(b"\n", keep) if left not in (b"", self._taken) else []
        if len(lines) > keep:
            self._count(lines.pop(0))
        return [each[:LINE_BYTES].decode(errors="replace") for each in lines]

    def _leave_out(self) -> None:
        end = self._buffer.rfind(b"\n") if b"\n" in self._buffer else len(self._buffer)
        dropped, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        self._count(dropped)
        self.left_out = dropped.rsplit(b"\n", _LAST)[-_LAST:]

    def _count(self, dropped: bytes) -> None:
        self._left_lines += dropped.count(b"\n") + 1
        self._left_bytes += len(dropped) + 1
