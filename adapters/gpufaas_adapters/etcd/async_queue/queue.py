"""`EtcdAsyncQueue`: the port's methods, over the parts that are in this package."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

import gpufaas_adapters.etcd.async_queue.records as records
from gpufaas_adapters.etcd.async_queue.bodies import Bodies
from gpufaas_adapters.etcd.async_queue.dead_letters import DeadLetters
from gpufaas_adapters.etcd.async_queue.owned import OwnedCalls, counted
from gpufaas_adapters.etcd.async_queue.owner import QueueOwner
from gpufaas_adapters.etcd.async_queue.records import CALLS, StoredCall, by_name, encode, key_of, read_calls
from gpufaas_adapters.etcd.async_queue.takeover import Takeover
from gpufaas_adapters.etcd.async_queue.writer import Writer
from gpufaas_adapters.etcd.blocking import Blocking
from gpufaas_adapters.etcd.client import DoGet, DoPut, Etcd, unchanged
from gpufaas_adapters.etcd.election import TTL_S
from gpufaas_async_calls.call import (
    AcceptedCall,
    CallStatus,
    CancelledCall,
    ClaimedCall,
    Outcome,
    Phase,
    Waiting,
    cancelled,
)
from gpufaas_async_calls.spool_file import SpoolFile
from gpufaas_core.errors import StorageAway
from gpufaas_core.units import Seconds

_TOLD_S: Final = 60
"""How long a gateway that was away can still read that its call was cancelled. Later it finds the call gone."""
_AGAIN_S: Final[Seconds] = 1.0


class EtcdAsyncQueue:
    """
    Made by `open`. The port's methods block, and are called from other threads than that of *etcd*'s loop; those that
    are coroutines belong to that loop.

    A `write` that etcd does not answer may have been done in part or whole. The caller writes its outcomes again; calls
    that were not acknowledged are deleted as soon as etcd answers, unless this gateway dies before.
    """

    @classmethod
    async def open(
        cls,
        etcd: Etcd,
        gateway: str,
        folder: Path,
        *,
        done_kept_s: int = 900,
        dead_kept_s: Seconds = 7 * 86_400.0,
        dead_kept: int = 10_000,
        ttl_s: int = TTL_S,
    ) -> "EtcdAsyncQueue":
        """
        Register this gateway, and take over the calls of gateways that have ended.

        :param gateway: its id; after a restart it is another owner
        :param folder: of large bodies while this process works on them; emptied here
        :param done_kept_s: for how long the status of a done or cancelled call can be asked for
        :param dead_kept_s: the same of dead letters, which keep their requests; at most *dead_kept*
        :raises StorageFailed: etcd is away, or refuses
        """
        bodies = Bodies(etcd, folder)
        dead_letters = DeadLetters(etcd, bodies, dead_kept_s, dead_kept)
        queue = cls(etcd, await QueueOwner.register(etcd, gateway, ttl_s), bodies, dead_letters, done_kept_s)
        try:
            await queue._takeover.take_over()
            await bodies.remove_orphans()
        except BaseException:
            await queue.stop()
            raise
        return queue

    def __init__(
        self, etcd: Etcd, owner: QueueOwner, bodies: Bodies, dead_letters: DeadLetters, done_kept_s: int
    ) -> None:
        self.owner = owner
        self._etcd = etcd
        self._blocking = Blocking(etcd)
        self._bodies = bodies
        self._owned = OwnedCalls(bodies)
        self._dead_letters = dead_letters
        self._writer = Writer(etcd, owner, self._owned, bodies, dead_letters, done_kept_s)
        self._lock = asyncio.Lock()
        self._takeover = Takeover(etcd, owner, self._owned, self._writer, self._lock)

    async def stop(self) -> None:
        """End the registration: the other gateways take over what this one owns."""
        await self.owner.registration.close()

    async def follow(
        self, on_found: Callable[[Sequence[Waiting]], None], on_lost: Callable[[int, str, bool], None]
    ) -> None:
        """
        Take over the calls of gateways that end, until cancelled. Call `waiting` first.

        :param on_found: told how many calls are ours now that were not
        :param on_lost: told of a call that is ours no more (its key, its function, whether it was claimed): it was
            cancelled through another gateway, or taken over while we could not be seen
        :raises EtcdRefused: we may not watch
        """
        self._owned.on_found, self._owned.on_lost = on_found, on_lost
        await self._takeover.follow()

    # --- AsyncQueue ---

    def write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        async def write() -> None:
            async with self._lock:
                await self._writer.delete_refused()
                await self._writer.write(accepted, outcomes)
                await self._dead_letters.prune()

        self._blocking(write())

    def claim(self, phase: Phase, function: str, now: float, limit: int) -> tuple[list[ClaimedCall], float | None]:
        return self._blocking(self._claim(phase, function, now, limit))

    def cancel(self, calls: Sequence[str], now: float) -> list[list[CancelledCall]]:
        async def cancel() -> list[list[CancelledCall]]:
            async with self._lock:
                await self._writer.delete_refused()
                return [await self._cancel(call, now) for call in calls]

        return self._blocking(cancel())

    def get(self, call: str) -> CallStatus | None:
        """A call of another gateway is ``queued`` also while it runs: its owner does not write that down."""
        return self._blocking(self._get(call))

    def list_dead(self, function: str | None = None, limit: int = 1000) -> list[CallStatus]:
        return self._blocking(self._dead_letters.list(function, limit))

    def requeue(self, call: str, now: float) -> Waiting | None:
        return self._blocking(self._requeue(call, now))

    def discard(self, call: str) -> bool:
        async def discard() -> bool:
            async with self._lock:
                return await self._dead_letters.discard(call)

        return self._blocking(discard())

    def waiting(self) -> list[Waiting]:
        """Return the counts of our own calls; other gateways count theirs."""

        async def look() -> list[Waiting]:
            return counted(self._owned.all())

        return self._blocking(look())

    def new_file(self) -> SpoolFile:
        return self._bodies.new_file()

    # --- on the loop ---

    async def _claim(
        self, phase: Phase, function: str, now: float, limit: int
    ) -> tuple[list[ClaimedCall], float | None]:
        async with self._lock:
            due = self._owned.due(phase, function, limit)
            if due and not self.owner.may_claim():
                # Another gateway may be about to take them over: they wait until etcd has answered.
                return [], max(due[0][0], now + _AGAIN_S)
            chosen = [call for at, call in due if at <= now]
            bodies = await self._bodies.load([(call.key, call.record) for call in chosen])
            claimed: list[ClaimedCall] = []
            for call in chosen:
                if call.key in bodies:
                    self._owned.claim(call)
                    claimed.append(call.record.claimed(call.key, *bodies[call.key]))
                else:
                    self._owned.lose(call)  # another gateway owns it by now, and has ended it
            left = self._owned.due(phase, function, 1)
            return claimed, left[0][0] if left else None

    async def _cancel(self, name: str, now: float) -> list[CancelledCall]:
        done: list[CancelledCall] = []
        for _ in range(10):  # as often as one was changed meanwhile
            found = read_calls((await self._etcd.range(by_name(CALLS, name))).items)
            if not found:
                break
            for each in found:
                if await self._cancel_one(each, now):
                    call, record = self._owned.get(each.key), each.record
                    is_claimed = call is not None and call.is_claimed
                    if call is not None:
                        self._owned.drop(call)
                    if not is_claimed:
                        self._bodies.remove_files(each.key)
                    done.append(CancelledCall(each.key, record.function, is_claimed, record.owner == self.owner.name))
        return done

    async def _cancel_one(self, call: StoredCall, now: float) -> bool:
        """Return whether it was done: not if the call was changed meanwhile."""
        record = call.record
        operations = await self._writer.ending(call.key, replace(record, **cancelled(now)).seen())
        if record.owner != self.owner.name:
            told, path = await self._etcd.grant_once(_TOLD_S), f"{records.CANCELLED}{record.owner}/{call.key:024x}"
            operations.append(DoPut(path, encode({"id": record.id}), told))
        return (await self._etcd.txn((unchanged(call.path(), call.revision),), operations)).succeeded

    async def _get(self, name: str) -> CallStatus | None:
        found = (
            await self._etcd.txn(
                (), [DoGet(by_name(each, name), below=True) for each in (CALLS, records.DEAD, records.ENDED)]
            )
        ).found
        seen: list[tuple[float, int, CallStatus]] = []
        for call in [*read_calls(found[0]), *read_calls(found[1])]:
            owned = self._owned.get(call.key)
            status = call.record.seen(is_running=owned is not None and owned.is_claimed)
            seen.append((status.accepted_at, call.key, status))
        for item in found[2]:
            status = msgspec.json.decode(item.value, type=CallStatus)
            seen.append((status.accepted_at, key_of(item.key), status))
        return max(seen, key=lambda each: each[:2])[2] if seen else None

    async def _requeue(self, name: str, now: float) -> Waiting | None:
        async with self._lock:
            try:
                call = await self._dead_letters.requeue(name, now, self.owner)
            except StorageAway:
                self._takeover.look()  # it may have been done
                raise
            if call is None:
                return None
            self._owned.add(call)
            return counted([call])[0]
