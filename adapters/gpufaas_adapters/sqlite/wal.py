"""
Whether the write-ahead log beside an SQLite file is whole.

SQLite ends its reading of the log at the first frame that is wrong, and says nothing: right for a write that a crash
cut short, which was never acknowledged, and wrong where the disk damaged what was. The two differ in what follows: each
frame's checksum goes on from that of the frame before, so that a frame that fits a damaged one was written after it.
Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

import struct
from pathlib import Path
from typing import Final

from gpufaas_core.errors import StorageFailed
from gpufaas_core.units import MiB

_HEADER: Final = struct.Struct(">8I")
_FRAME: Final = struct.Struct(">6I")
_LOOKED_AT: Final = 32 * MiB
"""Some seconds of checksums."""
_MAGIC: Final = 0x377F0682
"""The lowest bit says in which byte order checksums are computed: 1 is big-endian."""


def check_log(database: Path) -> None:
    """
    See that nothing that was committed to *database* is lost with its log; before it is opened.

    :raises StorageFailed: something is; says what can be done
    :raises OSError: it cannot be read
    """
    if harm := damage(database):
        raise StorageFailed(
            f"{database}-wal is damaged: {harm}; some of what was stored last is lost. Restore both files from a "
            f"backup, or move {database.name}-wal away to go on with what {database.name} has"
        )


def damage(database: Path) -> str:
    """
    Return what is damaged in the log of *database*; empty: nothing that was committed.

    Reads the log once: 4 MB as long as SQLite's own checkpoints come through, and no more than `_LOOKED_AT`.

    :raises OSError: it cannot be read
    """
    try:
        with database.with_name(database.name + "-wal").open("rb") as file:
            log = memoryview(file.read(_LOOKED_AT))
    except FileNotFoundError:
        return ""
    if len(log) <= _HEADER.size:
        return ""  # SQLite empties it so
    magic, _version, page, _number, salt1, salt2, sum1, sum2 = _HEADER.unpack_from(log)
    if magic & ~1 != _MAGIC or _checksum(log[:24], magic, (0, 0)) != (sum1, sum2):
        return "its header is wrong"
    if page < 512:
        return f"it says that a page has {page} bytes"
    before, broken = (sum1, sum2), 0
    for number, at in enumerate(range(_HEADER.size, len(log) - _FRAME.size - page + 1, _FRAME.size + page), 1):
        *_, frame_salt1, frame_salt2, stored1, stored2 = _FRAME.unpack_from(log, at)
        after = (stored1, stored2)
        fits = (frame_salt1, frame_salt2) == (salt1, salt2)  # other salts: from before the log was begun anew
        if fits:
            body = log[at + _FRAME.size : at + _FRAME.size + page]
            fits = _checksum(body, magic, _checksum(log[at : at + 8], magic, before)) == after
        if fits and broken:
            return f"frame {broken} is wrong, and what was written after it is there"
        if not fits and not broken:
            broken = number
        before = after
    return ""


def _checksum(data: memoryview, magic: int, start: tuple[int, int]) -> tuple[int, int]:
    order = ">" if magic & 1 else "<"
    first, second = start
    numbers = struct.unpack(f"{order}{len(data) // 4}I", data)
    for at in range(0, len(numbers), 2):
        first = (first + numbers[at] + second) & 0xFFFFFFFF
        second = (second + numbers[at + 1] + first) & 0xFFFFFFFF
    return first, second
