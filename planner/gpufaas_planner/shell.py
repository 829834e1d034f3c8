"""The planner as the platform runs it: the solver has its own process and a time limit, and nobody waits for it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_core.errors import GpufaasError
from gpufaas_core.plans import Answer, Snapshot
from gpufaas_planner.planner import Planner
from gpufaas_planner.plans import Plans
from gpufaas_scheduler.solving import SolverFailed, solve

log = logging.getLogger(__name__)

SOLVE_LIMIT_S: Final[Seconds] = 60.0
"""A solver that has not answered after so long is ended."""


class PlannerShell:
    """`run` plans whenever there is reason to. See `Planner`."""

    def __init__(
        self, solver: str, snapshot: Callable[[Seconds, bool], Snapshot], plans: Plans,
        *, limit_s: Seconds = SOLVE_LIMIT_S, look_every_s: Seconds = 1.0,
    ) -> None:  # fmt: skip
        self._planner = Planner(solver, snapshot)
        self._plans = plans
        self._limit_s = limit_s
        self._look_every_s = look_every_s
        self._clock = asyncio.get_running_loop().time
        self._asked = asyncio.Event()

    def ask(self, why: str) -> None:
        """Plan at once; while a plan is made, once it is done."""
        self._planner.ask(why)
        self._asked.set()

    def status(self) -> dict[str, Any]:
        return self._planner.status(self._clock())

    async def run(self) -> None:
        """Plan without end. A solver that runs when this is cancelled is ended."""
        while True:
            self._asked.clear()
            in_force = self._plans.in_force()
            asked = self._planner.due(self._clock(), None if in_force is None else in_force.plan())
            if asked is not None:
                try:
                    self._planner.succeeded(await self._plan(asked))
                except (GpufaasError, OSError) as exc:  # also of the store, and of the process that cannot be started
                    log.warning("plan.not_made solver=%s why=%s reason=%s", self._planner.solver, asked.why, exc)
                    self._planner.failed(exc, self._clock())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._look_every_s)

    async def _plan(self, asked: Snapshot) -> int | None:
        """Return the version of the new plan; None: it is in force already."""
        solver = self._planner.solver
        out = await solve(solver, msgspec.json.encode(asked), self._limit_s)
        try:
            answer = self._planner.judged(asked, msgspec.json.decode(out, type=Answer))
        except msgspec.DecodeError as exc:
            raise SolverFailed(f"solver {solver} answered what is no plan: {exc}") from exc
        if answer is None:
            return None
        base = 0 if asked.plan is None else asked.plan.version
        by, why = f"planner {solver}", asked.why
        return (await self._plans.apply(answer.replicas, by=by, why=why, expected=answer.expected, base=base)).version
