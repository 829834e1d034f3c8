"""`Takeover`: finds calls that become ours because another gateway ended, and calls that another took from us."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from gpufaas_adapters.etcd.async_queue.owned import OwnedCalls
from gpufaas_adapters.etcd.async_queue.owner import QueueOwner
from gpufaas_adapters.etcd.async_queue.records import CALLS, CANCELLED, GATEWAYS, StoredCall, encode, key_of, read_calls
from gpufaas_adapters.etcd.async_queue.steps import WriteStep, commit
from gpufaas_adapters.etcd.async_queue.writer import Writer
from gpufaas_adapters.etcd.client import Deleted, DoPut, Etcd, Listed, Put, absent, present, unchanged
from gpufaas_core.errors import StorageAway
from gpufaas_core.units import Seconds

log = logging.getLogger(__name__)

_AGAIN_S: Final[Seconds] = 1.0


@dataclass(eq=False)
class Takeover:
    """See module."""

    etcd: Etcd
    owner: QueueOwner
    owned: OwnedCalls
    writer: Writer
    lock: asyncio.Lock
    """Held while calls are changed."""
    _look: asyncio.Event = field(default_factory=asyncio.Event)

    def look(self) -> None:
        """Check soon whether a request that etcd did not answer has made a call ours."""
        self._look.set()

    async def follow(self) -> None:
        """:raises EtcdRefused: we may not watch"""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_gateways())
            tasks.create_task(self._follow_cancelled())
            tasks.create_task(self._follow_doubts())

    async def take_over(self) -> None:
        """
        Take the calls of gateways that have ended, and find calls that are ours already. Several gateways do this at
        once; each call goes to one of them.
        """
        mine: list[StoredCall] = []
        try:
            async with self.lock:
                await self.writer.delete_refused()
                alive = {key.removeprefix(GATEWAYS) for key in await self.etcd.keys(GATEWAYS)}
                steps: list[WriteStep] = []
                for found in read_calls((await self.etcd.range(CALLS)).items):
                    owner = found.record.owner
                    if owner == self.owner.name and self.owned.get(found.key) is None:
                        # Won, or taken from the dead letters, by a request whose answer did not reach us.
                        mine.append(found)
                        self.owned.add(found)
                    elif owner != self.owner.name and owner not in alive:
                        steps.append(self._taken(found, mine))
                secrets.SystemRandom().shuffle(steps)  # so that two gateways seldom try the same ones first
                await commit(self.etcd, steps)
        finally:
            if mine:
                log.info("async.taken_over calls=%d", len(mine))
                self.owned.found(mine)

    def _taken(self, found: StoredCall, mine: list[StoredCall]) -> WriteStep:
        call = StoredCall(found.key, replace(found.record, owner=self.owner.name), 0)

        def done(revision: int) -> None:
            call.revision = revision
            self.owned.add(call)
            mine.append(call)

        async def not_won() -> None:
            pass  # another gateway was faster

        compares = [
            unchanged(found.path(), found.revision),
            absent(f"{GATEWAYS}{found.record.owner}"),
            present(self.owner.path),
        ]
        return WriteStep(compares, [DoPut(call.path(), encode(call.record))], done, not_won)

    async def _reconcile(self) -> None:
        """Our lease had ended: read which calls are still ours."""
        async with self.lock:
            lease = self.owner.registration.lease
            there = {found.key: found for found in read_calls((await self.etcd.range(CALLS)).items)}
            for call in self.owned.all():
                found = there.get(call.key)
                if found is None or found.record.owner != self.owner.name or found.revision != call.revision:
                    self.owned.lose(call)
            self.owner.is_sure_under(lease)
        await self.take_over()

    async def _follow_gateways(self) -> None:
        async with aclosing(self.etcd.watch(GATEWAYS)) as changes:
            async for change in changes:
                match change:
                    case Put(item) if item.key == self.owner.path and self.owner.is_unsure:
                        await self._until_answered(self._reconcile)
                    case Deleted(key) if key == self.owner.path:
                        pass  # nothing is claimed until it is registered again
                    case Deleted() | Listed():
                        await self._until_answered(self.take_over)
                    case Put():
                        pass

    async def _follow_doubts(self) -> None:
        while True:
            await self._look.wait()
            self._look.clear()
            await self._until_answered(self.take_over)

    async def _follow_cancelled(self) -> None:
        prefix = f"{CANCELLED}{self.owner.name}/"
        async with aclosing(self.etcd.watch(prefix)) as changes:
            async for change in changes:
                if isinstance(change, Put):
                    async with self.lock:
                        if (call := self.owned.get(key_of(change.item.key))) is not None:
                            self.owned.lose(call)

    async def _until_answered(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await work()
            except StorageAway:
                await asyncio.sleep(_AGAIN_S)
