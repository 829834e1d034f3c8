"""
The decision log: one JSON line per start of service and per load without a call, in order of time. Users can compare
the scheduler with a program of their own. docs/simulator.md describes the format.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from gpufaas_simulator.timeline import Done, Evicted, Left, LoadBegun, Started


class DecisionLog:
    """An observer that writes lines to *file*."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, done: Done) -> None:
        line: dict[str, object] = {"t": done.t}
        match done:
            case Started(_, _, device, victims, calls, hit, local):
                via = "local" if local else "global"
                line |= {"call": calls[0], "device": device, "hit": hit, "victims": victims, "via": via}
                if len(calls) > 1:
                    line["with"] = calls[1:]
            case LoadBegun(_, function, device, victims):
                line |= {"device": device, "prefetch": function, "victims": victims}
            case Evicted(_, function, device):
                line |= {"device": device, "evict": function}
            case Left():
                return  # the workload has it
        self._file.write(self._encode(line) + b"\n")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write *path* completely or not at all: the file appears when the block ends without an error."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with aside.open("xb", buffering=1 << 16) as file:
            yield file
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
