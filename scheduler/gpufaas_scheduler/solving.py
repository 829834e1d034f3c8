"""
Plans made in another process under a time limit: a solver that hangs, or takes all memory, harms nobody.

``python -m gpufaas_scheduler.solving NAME LIMIT OPTIONS`` reads a problem from stdin and writes the answer to stdout,
both in JSON; OPTIONS is a JSON object of what the plan's `solve` takes besides. A bad problem is one line on stderr and
exit code 2.

NAME is a problem of `PLANS`, or a solver of the planner: an entry point of `ENTRY_POINTS`. Such a
solver is a module or object with ``solve(snapshot: Snapshot) -> Answer``, which may raise `BadProblem`.
"""

import asyncio
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_core.errors import DeadlineExceeded, GpufaasError, InvalidSpec
from gpufaas_core.plans import Snapshot
from gpufaas_scheduler.plans import PLANS, problem

ENTRY_POINTS: Final = "gpufaas.solvers"
_BAD_PROBLEM: Final = 2


class SolverFailed(GpufaasError):
    """The process of a plan ended without an answer; carries the last line that it wrote to stderr."""


async def solve(name: str, asked: bytes, limit: Seconds, options: Mapping[str, object] | None = None) -> bytes:
    """
    Return the answer of the plan *name* for the problem *asked*, both in JSON.

    :raises DeadlineExceeded: there was no answer after *limit*; the process is killed
    :raises BadProblem: the problem cannot be read
    :raises SolverFailed: the process ended otherwise
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", __name__, name, str(limit), json.dumps(dict(options or {})),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit):
            out, err = await process.communicate(asked)
    except TimeoutError:
        raise DeadlineExceeded(f"plan {name}: no answer after {limit:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = err.decode(errors="replace").strip()
    if process.returncode == _BAD_PROBLEM:
        raise problem.BadProblem(said)
    if process.returncode:
        raise SolverFailed(f"plan {name} ended with {process.returncode}: {said.rpartition(chr(10))[2][-500:]}")
    return out


def solver_named(name: str) -> str:
    """Return *name*, which may be empty. :raises InvalidSpec: the planner has no such solver"""
    if name and name not in (known := _installed()):
        there = f"choose one of {', '.join(known)}" if known else f"none is installed (entry points {ENTRY_POINTS})"
        raise InvalidSpec(f"no solver is called {name!r}: {there}")
    return name


def solver(name: str) -> Any:
    """Return the solver *name*, imported. :raises InvalidSpec: there is none"""
    return _installed()[solver_named(name)].load()


def _installed() -> dict[str, Any]:
    from importlib.metadata import entry_points  # takes 15 ms, only needed where a solver is named

    return {each.name: each for each in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name)}


def _confine(limit: Seconds) -> None:
    """End at the limit, also without the process that waits; yield to calls; have little memory, and lose it first."""
    signal.alarm(1 + int(limit))
    os.nice(10)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with suppress(OSError):  # some containers forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(name: str, limit: str, options: str) -> int:
    _confine(float(limit))
    asked = sys.stdin.buffer.read()
    try:
        if name in PLANS:
            module: Any = importlib.import_module(f"gpufaas_scheduler.plans.{PLANS[name]}")
            answer = module.solve(problem.read(asked, module.Problem), **json.loads(options))
        else:
            answer = solver(name).solve(msgspec.json.decode(asked, type=Snapshot))
    except problem.BadProblem as exc:
        print(exc, file=sys.stderr)
        return _BAD_PROBLEM
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
