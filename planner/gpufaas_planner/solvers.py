"""
Solvers make plans from snapshots. This module finds them by name, and runs one in a process of its own.

A solver is a function that takes a `Snapshot` and returns an `Answer`; it raises `BadProblem` if it cannot plan that.
Ours are in `SOLVERS`; others are installed as entry points of the group ``gpufaas.solvers``.

``python -m gpufaas_planner.solvers NAME OPTIONS`` reads a snapshot from stdin and writes the answer to stdout, both in
JSON; OPTIONS is a JSON object with the ``limit`` in seconds, after which the process ends by itself.
"""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.plans import Answer, Snapshot
from gpufaas_scheduler.plans.problem import BadProblem
from gpufaas_scheduler.solving import BAD_PROBLEM

Solver: TypeAlias = Callable[[Snapshot], Answer]

SOLVERS: Final[Mapping[str, str]] = {}
"""Ours, by name: ``module:function``."""
ENTRY_POINTS: Final = "gpufaas.solvers"

_NICENESS: Final = 10
"""Calls go before plans where both want a processor."""
_EXPENDABLE: Final = "1000"
"""Where memory runs out, the kernel ends this process first."""


def solver_name(name: str) -> str:
    """
    Return *name*.

    :raises InvalidSpec: no solver is called so
    """
    known = [*SOLVERS, *_installed()]
    if name not in known:
        there = f"choose one of {', '.join(known)}" if known else f"none is installed (entry points {ENTRY_POINTS})"
        raise InvalidSpec(f"no solver is called {name!r}: {there}")
    return name


def find(name: str) -> Solver:
    """
    Return the solver of that name. What it raises when it is imported is passed on.

    :raises InvalidSpec: as `solver_name`
    """
    if solver_name(name) in SOLVERS:
        module, _, function = SOLVERS[name].partition(":")
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    return _installed()[name].load()  # type: ignore[no-any-return]


def _installed() -> "dict[str, importlib.metadata.EntryPoint]":
    from importlib.metadata import entry_points  # takes 15 ms, only needed where a solver is named

    return {each.name: each for each in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name)}


def main(name: str, options: str) -> int:
    signal.alarm(1 + int(json.loads(options)["limit"]))  # the process that waits for the answer may have been killed
    os.nice(_NICENESS)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with suppress(OSError):  # it is forbidden in some containers
        Path("/proc/self/oom_score_adj").write_text(_EXPENDABLE)
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Snapshot)
    try:
        answer = find(name)(asked)
    except BadProblem as exc:
        print(exc, file=sys.stderr)
        return BAD_PROBLEM
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
