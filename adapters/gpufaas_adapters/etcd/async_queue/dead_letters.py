"""`DeadLetters`: calls that are tried again only if an operator asks for it."""

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from gpufaas_adapters.etcd.async_queue.bodies import Bodies
from gpufaas_adapters.etcd.async_queue.owner import QueueOwner
from gpufaas_adapters.etcd.async_queue.records import DEAD, StoredCall, bodies_of, by_name, encode, read_calls
from gpufaas_adapters.etcd.client import DoDelete, DoPut, Etcd, present, unchanged
from gpufaas_async_calls.call import CallStatus, Phase, requeued
from gpufaas_core.units import Seconds

_LOOKED_AT: Final = 100
"""New dead letters between two prunings: each reads all of them."""


@dataclass(eq=False)
class DeadLetters:
    """See module."""

    etcd: Etcd
    bodies: Bodies
    kept_s: Seconds
    """How long they are kept."""
    kept: int
    """How many are kept at most."""
    _new: int = 0

    def added(self) -> None:
        """Count one more."""
        self._new += 1

    async def list(self, function: str | None, limit: int) -> list[CallStatus]:
        found = read_calls((await self.etcd.range(DEAD)).items)
        chosen = [each.record.seen() for each in found if function in (None, each.record.function)]
        return sorted(chosen, key=lambda each: each.ended_at or 0.0)[:limit]

    async def requeue(self, name: str, now: float, owner: QueueOwner) -> StoredCall | None:
        """
        Make the latest of this id a call of *owner*.

        :raises StorageAway: etcd does not answer, and it may have been done; or the owner's lease has ended
        """
        while found := read_calls((await self.etcd.range(by_name(DEAD, name))).items):
            dead = found[-1]
            phase: Phase = "queued" if dead.record.answer is None else "callback"
            changed = replace(dead.record, owner=owner.name, **requeued(phase, now))
            done = await self.etcd.txn(
                (unchanged(dead.path(DEAD), dead.revision), present(owner.path)),
                (DoDelete(dead.path(DEAD)), DoPut(dead.path(), encode(changed))),
            )
            if done.succeeded:
                return StoredCall(dead.key, changed, done.revision)
            if await self.etcd.get(owner.path) is None:
                raise owner.lease_ended()
        return None

    async def discard(self, name: str) -> bool:
        """Forget those of this id; return whether there were any."""
        found = read_calls((await self.etcd.range(by_name(DEAD, name))).items)
        for each in found:
            await self._forget(each)
        return bool(found)

    async def prune(self) -> None:
        """Forget those that are too old or too many, if enough were added since the last time."""
        if self._new < _LOOKED_AT:
            return
        self._new = 0
        found = read_calls((await self.etcd.range(DEAD)).items)
        dead = sorted(found, key=lambda each: each.record.ended_at or 0.0)
        newest = dead[-1].record.ended_at or 0.0 if dead else 0.0
        for number, each in enumerate(dead):
            if number < len(dead) - self.kept or (each.record.ended_at or 0.0) < newest - self.kept_s:
                await self._forget(each)

    async def _forget(self, dead: StoredCall) -> None:
        await self.etcd.txn((), (DoDelete(dead.path(DEAD)), DoDelete(bodies_of(dead.key), below=True)))
        self.bodies.remove_files(dead.key)
