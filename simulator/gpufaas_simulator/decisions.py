"""
The decision log: one JSON line per start of service and per load without a call, in order of time. Users can compare
the scheduler with a program of their own. docs/simulator.md describes the format.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from gpufaas_core.model import Seconds


class Started(Struct, frozen=True):
    """A line of the log: the service of a grant begins, with its load if there is one."""

    t: Seconds
    call: int
    """Index into the workload's arrivals, of its first call."""
    device: str
    hit: bool
    victims: tuple[str, ...]
    via: str
    """The queue of the call: ``global`` or ``local``."""


class StartedTogether(Started, frozen=True, rename={"others": "with"}):
    """The start of a grant of several calls."""

    others: tuple[int, ...]
    """Its further calls."""


class LoadBegun(Struct, frozen=True):
    """A line of the log: a load without a call (a replica, a prefetch, a minimum of copies)."""

    t: Seconds
    device: str
    prefetch: str
    victims: tuple[str, ...]


class Evicted(Struct, frozen=True):
    """A line of the log: an eviction that is not for a load. Only workloads with changes have such lines."""

    t: Seconds
    device: str
    evict: str


class DecisionLog:
    """An observer of a simulation that writes lines to *file*."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode

    def started(
        self, t: Seconds, calls: tuple[int, ...], function: str, device: str, hit: bool, victims: tuple[str, ...],
        local: bool,
    ) -> None:  # fmt: skip
        del function  # the workload has it
        via = "local" if local else "global"
        if len(calls) == 1:
            self._write(Started(t, calls[0], device, hit, victims, via))
        else:
            self._write(StartedTogether(t, calls[0], device, hit, victims, via, calls[1:]))

    def loading(self, t: Seconds, function: str, device: str, victims: tuple[str, ...]) -> None:
        self._write(LoadBegun(t, device, function, victims))

    def evicted(self, t: Seconds, function: str, device: str) -> None:
        self._write(Evicted(t, device, function))

    def left(self, t: Seconds, device: str) -> None:
        """No line: the workload has it."""

    def _write(self, line: Struct) -> None:
        self._file.write(self._encode(line) + b"\n")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write *path* completely or not at all: the file appears when the block ends without an error."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb", buffering=1 << 16) as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes files that only we can read
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
