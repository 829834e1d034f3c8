"""
`Handovers`: a new revision takes the calls of the old one once it is loaded.

The update of a function with copies is *pending*: the scheduler loads the new revision beside the old one, which serves
meanwhile. When it is ready, the catalogue shows it in one step, and the old one drains. If there is no room for both,
or the function has no copy, the new revision takes the calls *on trial*: they wait for its first load, and the old one
takes them again if that fails.

All of this is in the record (`Handover`), so that it goes on after a restart, and at other gateways. Each step is done
by what is there, and may be done twice.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from msgspec.structs import replace

from gpufaas_core.errors import GpufaasError
from gpufaas_core.model import EngineStatus, FunctionId, Seconds
from gpufaas_gateway.catalogue import Catalogue, ServedRevision
from gpufaas_gateway.function_state import Copies, copies_of
from gpufaas_gateway.history import Revision
from gpufaas_gateway.ports import Scheduler, Store, Workers
from gpufaas_gateway.spec import FailedRevision, FunctionRecord, Handover, PendingRevision

log = logging.getLogger(__name__)

LOOK_S: Final[Seconds] = 0.1
OTHERS_S: Final[Seconds] = 3.0
"""How often a gateway looks at what another one has begun, which is quicker unless it is gone."""


Outlook = Literal["wait", "ready", "failed", "full", "idle"]


def outlook(status: EngineStatus, function: FunctionId) -> tuple[Outlook, str]:
    """Return how the copies of *function* come along that are loaded without a call, and why they failed."""
    copies = copies_of(status).get(function) or Copies()
    failing = status.failing.get(function)
    why = status.kept_out.get(function, "") if failing is None else failing.reason
    if why and not (status.age_s or copies.ready):
        return "failed", why  # though it may be loaded once more by now: there is one that serves
    if status.age_s or copies.loading or function in status.rolling:
        return "wait", ""
    if copies.ready:
        return "ready", ""
    return "full" if function in status.lacking else "idle", ""


@dataclass(eq=False)
class Handovers:
    """See module. One event loop owns it. `begin` and `end` are called within `change`."""

    store: Store
    scheduler: Scheduler
    workers: Workers
    catalogue: Catalogue
    define: Callable[[FunctionRecord], Awaitable[ServedRevision]]
    """Installs a revision on the nodes."""
    show: Callable[[ServedRevision], None]
    """Lets calls find a revision."""
    change: Callable[[str], AbstractAsyncContextManager[None]]
    """Lets nobody else change the function ``NAME.NAMESPACE``."""
    on_replaced: Callable[[FunctionId], None] = lambda _: None
    """Called with the old revision after an update: it takes no new calls, and its running calls go on."""
    _pending: dict[FunctionId, ServedRevision] = field(default_factory=dict)
    """What was deployed here, and no call finds yet."""
    _looking: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The task that looks, by the name of a function with a pending revision or one on trial."""
    _ending: set[asyncio.Future[None]] = field(default_factory=set)

    def has(self, function: FunctionId) -> bool:
        """Whether the revision serves, or will."""
        return function in self._pending or self.catalogue.by_id(function) is not None

    async def begin(self, new: ServedRevision, old: ServedRevision | None, noted: Sequence[Revision] = ()) -> None:
        """
        Let *new*, which was checked, take the calls of *old*, now or once it is loaded.

        :param noted: for the history, if it lacks them
        :raises StorageFailed: it could not be stored; nothing has changed
        :raises Overtaken: another gateway has changed the function; nothing has changed here
        """
        status = self.scheduler.status()
        if old is not None and old.trial is not None:
            said, why = outlook(status, old.function_id)
            if said in ("ready", "failed"):
                await self._end_trial(old, why)
                old = self.catalogue.find(old.full_name)
        gone = None if old is None else old.record.handover.pending
        if old is None or old.unavailable is not None or old.function_id in status.failing:
            await self._serve(new, old, Handover(), noted)
        elif old.trial is not None or not (status.age_s or old.function_id in copies_of(status)):
            await self._serve(new, old, Handover(before=old.record.handover.before or _bare(old)), noted)
        else:
            handover = Handover(pending=PendingRevision(new.record, new.spec, new.function))
            await self._store_it(old, handover, noted, new)
            self._pending[new.function_id] = new
            if (asleep := self._looking.pop(old.full_name, None)) is not None:
                asleep.cancel()  # it may sleep for `OTHERS_S`, after a trial; nobody else does a step within `change`
            self.watch(old)
        if gone is not None and gone.record.revision != new.record.revision:
            await self._drop(gone)

    async def withdraw(self, serving: str, deployed: ServedRevision | None) -> bool:
        """Give up what is pending, if revision *serving* of *deployed* serves. Return whether there was something."""
        pending = None if deployed is None else deployed.record.handover.pending
        if deployed is None or pending is None or deployed.record.revision != serving:
            return False
        await self._fail(deployed, pending, f"a rollback went back to {serving} before it was loaded")
        return True

    async def end(self, deployed: ServedRevision) -> None:
        """*deployed* was removed, and what is pending with it."""
        if (pending := deployed.record.handover.pending) is not None:
            await self._drop(pending)
        await self._retire(deployed, drain=False)

    def watch(self, deployed: ServedRevision) -> None:
        """Do for *deployed*, which is shown, what its record says."""
        handover, name = deployed.record.handover, deployed.full_name
        deployed.trial = None if handover.before is None else partial(self._tried, deployed)
        if name not in self._looking and (handover.pending or handover.before):
            self._looking[name] = asyncio.get_running_loop().create_task(self._look(name))

    async def _look(self, name: str) -> None:
        """Do each step for *name* when it can be done."""
        every_s = LOOK_S
        while True:
            await asyncio.sleep(every_s)
            async with self._trying(name):
                if await self._step(self.catalogue.find(name)):
                    del self._looking[name]
                    return
            every_s = LOOK_S if any(each.full_name == name for each in self._pending.values()) else OTHERS_S

    @asynccontextmanager
    async def _trying(self, name: str) -> AsyncIterator[None]:
        """Do a step within `change`. If it cannot be done, it is tried again with the next look."""
        async with self.change(name):
            try:
                yield
            except GpufaasError as exc:
                log.warning("handover.again function=%s reason=%s", name, exc)

    async def _step(self, deployed: ServedRevision | None) -> bool:
        """Do what can be done. Return whether there is nothing to wait for."""
        handover = Handover() if deployed is None else deployed.record.handover
        if deployed is None or (handover.pending is None and handover.before is None):
            return True
        if (pending := handover.pending) is None:
            said, why = outlook(self.scheduler.status(), deployed.function_id)
            if said in ("ready", "failed"):
                await self._end_trial(deployed, why)
            return said not in ("wait", "full")  # one that is idle waits for a call, which tells how it went
        function = pending.record.function_id
        said, why = outlook(self.scheduler.status(), function)
        if said == "failed":
            await self._fail(deployed, pending, why)
        elif said in ("ready", "full"):
            new = self._pending.get(function) or await self.define(pending.record)
            await self._serve(new, deployed, Handover(before=_bare(deployed) if said == "full" else None))
        return said in ("ready", "failed")

    def _tried(self, deployed: ServedRevision, why: str) -> Awaitable[None]:
        """*deployed* was on trial, and has answered; or did not load: *why*. Done when the right revision serves."""

        async def end() -> None:
            async with self._trying(deployed.full_name):
                if self.catalogue.find(deployed.full_name) is deployed and deployed.trial is not None:
                    await self._end_trial(deployed, why)

        self._ending.add(ending := asyncio.ensure_future(end()))
        ending.add_done_callback(self._ending.discard)
        return asyncio.shield(ending)  # a caller who leaves ends the waiting only

    async def _end_trial(self, deployed: ServedRevision, why: str) -> None:
        before = deployed.record.handover.before
        if not why or before is None:
            await self._store_it(deployed, Handover())
            deployed.trial = None
            return
        log.warning("function.not_loaded id=%s reason=%s", deployed.function_id, why)
        await self._serve(await self.define(before), deployed, _failed(deployed.record, why))

    async def _fail(self, deployed: ServedRevision, pending: PendingRevision, why: str) -> None:
        """*deployed* goes on serving."""
        await self._store_it(deployed, _failed(pending.record, why))
        await self._drop(pending)

    async def _serve(
        self, new: ServedRevision, old: ServedRevision | None, handover: Handover, noted: Sequence[Revision] = ()
    ) -> None:
        """Let calls find *new* instead of *old*, which drains; if it has failed, its calls are told so at once."""
        await self._store_it(new, handover, noted, None if new.function_id in self._pending else new)
        self._pending.pop(new.function_id, None)
        self.show(new)
        self.watch(new)
        if old is not None:
            await self._retire(old, drain=handover.failed is None)

    async def _store_it(
        self,
        shown: ServedRevision,
        handover: Handover,
        noted: Sequence[Revision] = (),
        new: ServedRevision | None = None,
    ) -> None:
        """Store *shown* with *handover*, and tell the scheduler of *new*, which may succeed it; both or none."""
        record, there = replace(shown.record, handover=handover), self.catalogue.find(shown.full_name)
        seen = "" if there is None else there.record.state
        if new is not None:
            self.scheduler.deploy(new.function, new.spec, None if new is shown else shown.function_id)
        try:
            await asyncio.to_thread(self.store.put, record, shown.spec, shown.function, noted, seen)
        except BaseException:
            if new is not None:
                self.scheduler.remove(new.function_id, drain=False)
            raise
        shown.record = record

    async def _retire(self, old: ServedRevision, drain: bool) -> None:
        """End a revision that the catalogue no longer shows. The scheduler does not know one that was unavailable."""
        if old.unavailable is None:
            self.scheduler.remove(old.function_id, drain)
        if drain:
            self.on_replaced(old.function_id)
        await self.workers.forget(old.function_id)

    async def _drop(self, pending: PendingRevision) -> None:
        """End a revision that was never shown."""
        self._pending.pop(function := pending.record.function_id, None)
        self.scheduler.remove(function, drain=False)
        await self.workers.forget(function)


def _bare(deployed: ServedRevision) -> FunctionRecord:
    return replace(deployed.record, handover=Handover())


def _failed(record: FunctionRecord, why: str) -> Handover:
    return Handover(failed=FailedRevision(record.revision, why))
