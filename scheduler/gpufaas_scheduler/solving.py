"""
Plans made in another process under a time limit: a solver that hangs, or takes all memory, harms nobody.

``python -m gpufaas_scheduler.solving NAME [OPTIONS]`` reads a problem from stdin and writes the answer to stdout, both
in JSON; OPTIONS is a JSON object of what the plan's `solve` takes besides. A bad problem is one line on stderr and exit
code 2.
"""

import asyncio
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_core.errors import DeadlineExceeded, GpufaasError
from gpufaas_scheduler.plans import PLANS, problem

BAD_PROBLEM: Final = 2
"""The exit code of a process whose solver was given a bad problem; stderr says why in one line."""


class SolverFailed(GpufaasError):
    """The process of a plan ended without an answer; carries the last line that it wrote to stderr."""


async def solve(
    name: str, asked: bytes, limit: Seconds, options: Mapping[str, object] | None = None, program: str = __name__
) -> bytes:
    """
    Return the answer of the plan *name* for the problem *asked*, both in JSON.

    :param program: the module that is run instead of this one, which takes the same arguments
    :raises DeadlineExceeded: there was no answer after *limit*; the process is killed
    :raises BadProblem: the problem cannot be read
    :raises SolverFailed: the process ended otherwise
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", program, name, json.dumps(dict(options or {})),
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
    if process.returncode == BAD_PROBLEM:
        raise problem.BadProblem(said)
    if process.returncode:
        raise SolverFailed(f"plan {name} ended with {process.returncode}: {said.rpartition(chr(10))[2][-500:]}")
    return out


def main(name: str, options: str) -> int:
    module: Any = importlib.import_module(f"gpufaas_scheduler.plans.{PLANS[name]}")
    try:
        answer = module.solve(problem.read(sys.stdin.buffer.read(), module.Problem), **json.loads(options))
    except problem.BadProblem as exc:
        print(exc, file=sys.stderr)
        return BAD_PROBLEM
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
