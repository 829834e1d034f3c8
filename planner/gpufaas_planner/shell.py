"""The planner as the platform runs it: the solver has its own process and a time limit, and nobody waits for it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_core.errors import GpufaasError, PlanConflict
from gpufaas_core.model import Replica
from gpufaas_core.plans import Answer, PlannerStatus, PlanVersion, Snapshot
from gpufaas_planner import solvers
from gpufaas_planner.planner import Planner, Question
from gpufaas_scheduler.solving import SolverFailed, solve

log = logging.getLogger(__name__)

SOLVE_LIMIT_S: Final[Seconds] = 60.0
"""A solver that has not answered after so long is ended."""
_LOOK_EVERY_S: Final[Seconds] = 1.0


class Applies(Protocol):
    """What plans are handed to; see `gpufaas_planner.plans.Plans`."""

    def in_force(self) -> PlanVersion | None: ...

    async def apply(
        self, replicas: tuple[Replica, ...], *, by: str, why: str, expected: dict[str, float], base: int | None
    ) -> PlanVersion: ...


class PlannerShell:
    """
    `run` plans whenever there is reason to.

    :param snapshot: see `Planner`
    :param limit_s: of the solver
    """

    def __init__(
        self,
        solver: str,
        snapshot: Callable[[Seconds, bool], Snapshot],
        plans: Applies,
        *,
        limit_s: Seconds = SOLVE_LIMIT_S,
        look_every_s: Seconds = _LOOK_EVERY_S,
    ) -> None:
        self._planner = Planner(solver, snapshot)
        self._plans = plans
        self._limit_s = limit_s
        self._look_every_s = look_every_s
        self._clock = asyncio.get_running_loop().time
        self._asked = asyncio.Event()

    def ask(self, why: str) -> None:
        """Plan at once; while a plan is made, once it is done."""
        self._planner.triggers.ask(why)
        self._asked.set()

    def status(self) -> PlannerStatus:
        return self._planner.status(self._clock())

    async def run(self) -> None:
        """Look once a second whether there is reason to plan, without end. A solver that runs ends with this."""
        while True:
            self._asked.clear()
            in_force = self._plans.in_force()
            question = self._planner.due(self._clock(), None if in_force is None else in_force.plan())
            if question is not None:
                await self._plan(question)
            try:
                await asyncio.wait_for(self._asked.wait(), self._look_every_s)
            except TimeoutError:
                pass

    async def _plan(self, question: Question) -> None:
        planner, solver = self._planner, self._planner.solver
        try:
            answer = planner.judged(question, await self._answer(question.snapshot))
            applied = None
            if answer is not None:
                applied = await self._plans.apply(
                    answer.replicas, by=f"planner {solver}", why=question.why, expected=answer.expected,
                    base=question.base,
                )  # fmt: skip
        except (GpufaasError, OSError) as exc:
            planner.failed(exc, self._clock())
            if not isinstance(exc, PlanConflict):
                log.warning("plan.failed solver=%s why=%s reason=%s", solver, question.why, exc)
            return
        planner.succeeded(0 if applied is None else applied.version)
        if applied is not None:
            log.info("plan.made solver=%s version=%d why=%s", solver, applied.version, question.why)

    async def _answer(self, snapshot: Snapshot) -> Answer:
        solver = self._planner.solver
        asked = msgspec.json.encode(snapshot)
        out = await solve(solver, asked, self._limit_s, {"limit": self._limit_s}, program=solvers.__name__)
        try:
            return msgspec.json.decode(out, type=Answer)
        except msgspec.DecodeError as exc:
            raise SolverFailed(f"solver {solver} answered what is no plan: {exc}") from exc
