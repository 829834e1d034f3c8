"""
Runs of the simulator that outlive their process: a file with the reports so far, and the simulation that is under way.

The first line of the file is JSON. The rest is the simulation, pickled, which only the code that wrote it can read. The
file is always replaced as a whole.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Seconds
from gpufaas_scheduler.journal import Header
from gpufaas_simulator.decisions import whole_file
from gpufaas_simulator.entries import workload_json
from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.report import Report, report
from gpufaas_simulator.run import simulation_of
from gpufaas_simulator.simulation import Simulation
from gpufaas_simulator.workload import BadWorkload, Workload

KEEP_EVERY_S: Final[Seconds] = 10.0
"""At least so much time lies between two writes of a simulation, and ten times what a write takes."""


class _Head(Struct):
    run: str
    """The code that wrote it."""
    reports: dict[str, Report] = {}
    """Of the simulations that were finished, by what was simulated."""
    under_way: str = ""
    """What is under way; empty: nothing."""


_DEPTH: Final = 400_000
_STACK: Final = 1 << 30
"""Devices, copies and calls refer to each other, and pickle goes from each to the next: as deep as there are many."""


def _pickled(simulation: Simulation) -> bytes:
    limit, stack = sys.getrecursionlimit(), threading.stack_size(_STACK)
    try:
        sys.setrecursionlimit(_DEPTH)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(pickle.dumps, simulation, pickle.HIGHEST_PROTOCOL).result()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(stack)


class RunFile:
    """See module. Name only files of your own: what is read from one can run code."""

    def __init__(self, path: Path) -> None:
        """:raises BadWorkload: it is no such file, or of other code"""
        self._path = path
        self._head, self._kept = _Head(_code()), b""
        if path.exists():
            try:
                head, _, self._kept = path.read_bytes().partition(b"\n")
                self._head = msgspec.json.decode(head, type=_Head)
            except (OSError, msgspec.DecodeError) as exc:
                raise BadWorkload(f"{path}: this is no file of --run ({exc}): name another file") from exc
            if self._head.run != _code():
                raise BadWorkload(f"{path}: another version of gpufaas wrote it: remove it to begin anew")
        self._next_at = time.monotonic() + KEEP_EVERY_S

    def simulate(
        self, workload: Workload, header: Header, noise: Noise | None, progress: Callable[[int], object]
    ) -> Report:
        """
        Return the report of this simulation: the one that the file has, or that of what is left to simulate.

        :raises InvalidSpec: as `run.simulate`, or its policy cannot be kept
        """
        what = hashlib.sha256(workload_json(workload) + msgspec.json.encode(header) + pickle.dumps(noise)).hexdigest()
        if what not in self._head.reports:
            kept = self._head.under_way == what
            simulation = pickle.loads(self._kept) if kept else simulation_of(workload, header, noise)
            record = simulation.run(functools.partial(self._tell, what, simulation, progress))
            self._head.reports[what] = report(record, simulation.engine.policy.name)
            self._write("", b"")
        return self._head.reports[what]

    def _tell(self, what: str, simulation: Simulation, progress: Callable[[int], object], ended: int) -> None:
        progress(ended)
        began = time.monotonic()
        if began < self._next_at:
            return
        try:
            kept = _pickled(simulation)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as exc:
            reason = f"policy {simulation.engine.policy.name} cannot be kept in {self._path} ({exc})"
            raise InvalidSpec(f"{reason}: leave --run out") from exc
        self._write(what, kept)
        self._next_at = time.monotonic() + max(KEEP_EVERY_S, 10.0 * (time.monotonic() - began))

    def _write(self, under_way: str, kept: bytes) -> None:
        self._head.under_way = under_way
        with whole_file(self._path) as file:
            file.write(msgspec.json.encode(self._head) + b"\n")
            file.write(kept)


@functools.cache
def _code() -> str:
    """Return a digest of the code that a simulation consists of."""
    rooms = [
        import_module(f"gpufaas_{each}") for each in ("core", "cache_manager", "scheduler", "planner", "simulator")
    ]
    files = [file for room in rooms for file in sorted(Path(room.__path__[0]).rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
