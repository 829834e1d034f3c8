"""
The decision log: one JSON line per start of service and per load without a call, in the order of time, so that anyone
can check the scheduler against a program of their own. The format is described in docs/simulator.md.
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
    """A line of the log: service of a call begins, its own load included."""

    t: Seconds
    call: int
    """Index into the workload's arrivals."""
    device: str
    hit: bool
    victims: tuple[str, ...]
    via: str
    """``global`` or ``local``: the queue that it came from."""


class Loading(Struct, frozen=True):
    """A line of the log: a load without a call (a replica, a prefetch, a minimum of copies)."""

    t: Seconds
    device: str
    prefetch: str
    victims: tuple[str, ...]


class Evicted(Struct, frozen=True):
    """A line of the log: an eviction on its own. Only workloads that scale or update functions have any."""

    t: Seconds
    device: str
    evict: str


class DecisionLog:
    """An observer of a simulation that writes lines to *file*."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode

    def started(
        self, t: Seconds, call: int, function: str, device: str, hit: bool, victims: tuple[str, ...], local: bool
    ) -> None:
        del function  # the workload says which
        self._write(Started(t, call, device, hit, victims, "local" if local else "global"))

    def loading(self, t: Seconds, function: str, device: str, victims: tuple[str, ...]) -> None:
        self._write(Loading(t, device, function, victims))

    def evicted(self, t: Seconds, function: str, device: str) -> None:
        self._write(Evicted(t, device, function))

    def left(self, t: Seconds, device: str) -> None:
        """The workload says it."""

    def _write(self, line: Struct) -> None:
        self._file.write(self._encode(line) + b"\n")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write *path* as a whole or not at all: it appears under its name when the block ends without an error."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb", buffering=1 << 16) as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes files for nobody else
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
