"""What the policy of a platform of one process keeps over a restart. In a cluster, `EngineDoc` has it."""

import asyncio
import contextlib
import logging
from typing import Final

from gpufaas_adapters.sqlite.plans import SqlitePlans
from gpufaas_core.errors import StorageFailed
from gpufaas_core.messages import Restored, Serving
from gpufaas_core.model import Seconds
from gpufaas_core.snapshot import EngineDoc
from gpufaas_scheduler.policies import Stateful
from gpufaas_scheduler.service import SchedulerService

_EVERY_S: Final[Seconds] = 5.0


class PolicyState:
    """Of a policy that keeps nothing, nothing is stored or restored."""

    def __init__(self, scheduler: SchedulerService, store: SqlitePlans) -> None:
        self._scheduler = scheduler
        self._store = store
        self._kept: bytes | None = None

    def restore(self) -> None:
        """Give the policy what one of the same spec kept: as an event, so that a replay of the journal has it."""
        name = self._scheduler.engine.policy.name
        self._kept = self._store.policy_state(name)
        if self._kept is not None:
            self._scheduler.handle(Restored(EngineDoc(name, 0, 0, policy_state=self._kept)))
            self._scheduler.handle(Serving())

    async def keep(self, stopped: asyncio.Event) -> None:
        """Write it behind until *stopped*, when all calls have ended."""
        policy = self._scheduler.engine.policy
        while isinstance(policy, Stateful) and not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _EVERY_S)
            if (state := policy.save()) != self._kept:
                try:
                    await asyncio.to_thread(self._store.keep_policy_state, policy.name, state)
                    self._kept = state
                except StorageFailed as exc:
                    logging.getLogger("scheduler").warning("policy.not_kept, will be tried again: %s", exc)
