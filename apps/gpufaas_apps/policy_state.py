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


def restore(scheduler: SchedulerService, store: SqlitePlans) -> None:
    """Give the policy what one of the same spec kept: as an event, so that a replay of the journal has it."""
    policy = scheduler.engine.policy
    if (kept := store.policy_state(policy.name)) and isinstance(policy, Stateful):
        try:
            doc = msgspec.json.decode(kept, type=EngineDoc)
            policy.load(doc.policy_state or b"")  # first alone: an event that fails in its middle would be half done
        except msgspec.DecodeError as exc:
            logging.getLogger("scheduler").warning("policy.not_restored, it begins anew: %s", exc)
        else:
            scheduler.handle(Restored(doc))
            scheduler.handle(Serving())


async def keep(scheduler: SchedulerService, store: SqlitePlans, stopped: asyncio.Event) -> None:
    """Write it behind until *stopped*, when all calls have ended."""
    policy = scheduler.engine.policy
    kept = policy.save() if isinstance(policy, Stateful) else b""
    while isinstance(policy, Stateful) and not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _EVERY_S)
        if (state := policy.save()) != kept:
            # The policy may keep numbers of calls: those of the next run follow them.
            number = getattr(scheduler.driver.doc("engine"), "next_number", 0)
            doc = EngineDoc(policy.name, grant=0, next_number=number, policy_state=state)
            try:
                await asyncio.to_thread(store.keep_policy_state, policy.name, msgspec.json.encode(doc))
                kept = state
            except StorageFailed as exc:
                logging.getLogger("scheduler").warning("policy.not_kept, will be tried again: %s", exc)
