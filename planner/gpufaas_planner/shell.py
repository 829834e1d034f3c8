"""The planner as the platform runs it: the solver has its own process and a time limit, and nobody waits for it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gpufaas_core._types import Seconds
from gpufaas_core.errors import GpufaasError, PlanConflict
from gpufaas_core.plans import Answer, Snapshot
from gpufaas_planner.planner import Planner
from gpufaas_planner.plans import Plans
from gpufaas_scheduler.solving import SolverFailed, solve

log = logging.getLogger(__name__)

SOLVE_LIMIT_S: Final[Seconds] = 60.0
"""A solver that has not answered after so long is ended."""


class PlannerShell:
    """`run` plans whenever there is reason to; see `Planner`. Without a solver it does nothing."""

    def __init__(
        self, solver: str, snapshot: Callable[[Seconds, bool], Snapshot], plans: Plans,
        *, limit_s: Seconds = SOLVE_LIMIT_S, look_every_s: Seconds = 1.0,
    ) -> None:  # fmt: skip
        self._planner = Planner(solver, snapshot)
        self._plans = plans
        self._limit_s = limit_s
        self._look_every_s = look_every_s
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._waiting: list[asyncio.Future[dict[str, Any]]] = []
        """See `asked`."""

    def status(self) -> dict[str, Any]:
        """Return what people are told (docs/operations.md); empty: there is no solver."""
        return self._planner.status(self._loop.time()) if self._planner.solver else {}

    def asked(self, why: str = "") -> asyncio.Future[dict[str, Any]]:
        """Return `status`. With *why*, plan at once, or as soon as a present attempt ends, and return it after that."""
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        if why and self._planner.solver:
            self._waiting.append(future)
            self._planner.ask(why)
            self._wake.set()
        else:
            future.set_result(self.status())
        return future

    async def run(self) -> None:
        """Plan without end. A solver that runs when this is cancelled is ended."""
        if not self._planner.solver:
            await asyncio.Event().wait()
        while True:
            self._wake.clear()
            in_force = self._plans.in_force()
            asked = self._planner.due(self._loop.time(), None if in_force is None else in_force.plan())
            if asked is not None:
                waiting, self._waiting = self._waiting, []
                try:
                    self._planner.succeeded(await self._plan(asked))
                except (GpufaasError, OSError) as exc:  # also of the store, and of the process that cannot be started
                    log.warning("plan.not_made solver=%s why=%s reason=%s", self._planner.solver, asked.why, exc)
                    self._planner.failed(exc, self._loop.time())
                    if isinstance(exc, PlanConflict):  # the solver is asked again, also for those who wait
                        self._waiting[:0], waiting = waiting, []
                for each in waiting:
                    if not each.done():
                        each.set_result(self.status())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._look_every_s)

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
