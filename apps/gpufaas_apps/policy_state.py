"""What the policy of a platform of one process keeps over a restart. In a cluster, `EngineDoc` has it."""

import asyncio
import contextlib
import logging
from typing import Final

import msgspec

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
        self._kept = self._saved()

    def _saved(self) -> bytes | None:
        policy = self._scheduler.engine.policy
        return policy.save() if isinstance(policy, Stateful) else None

    def restore(self) -> None:
        """Give the policy what one of the same spec kept: as an event, so that a replay of the journal has it."""
        kept = self._store.policy_state(self._scheduler.engine.policy.name)
        if kept is not None:
            doc = msgspec.json.decode(kept, type=EngineDoc)
            self._kept = doc.policy_state
            self._scheduler.handle(Restored(doc))
            self._scheduler.handle(Serving())

    async def keep(self, stopped: asyncio.Event) -> None:
        """Write it behind until *stopped*, when all calls have ended."""
        while not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _EVERY_S)
            if self._saved() == self._kept:
                continue
            doc = self._scheduler.driver.doc("engine")
            assert isinstance(doc, EngineDoc)
            # The policy may keep numbers of calls: those of the next run follow them.
            kept = EngineDoc(doc.policy, grant=0, next_number=doc.next_number, policy_state=doc.policy_state)
            try:
                await asyncio.to_thread(self._store.keep_policy_state, doc.policy, msgspec.json.encode(kept))
                self._kept = doc.policy_state
            except StorageFailed as exc:
                logging.getLogger("scheduler").warning("policy.not_kept, will be tried again: %s", exc)
