"""
Which scheduler leads, and which processes are there: keys under leases in etcd.

The scheduler that made the key `LEADER` leads. Its epoch is that key's create_revision, which grows from leader to
leader: a node that has seen a later one refuses an earlier one. Two schedulers that both believe to lead (one of them
is cut off) therefore do no harm. Nodes and gateways are there while their `Registration` is.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpufaas_adapters.etcd.client import (
    Compare,
    Deleted,
    DoGet,
    DoPut,
    Etcd,
    EtcdLease,
    EtcdRefused,
    EtcdUnreachable,
    Listed,
    Put,
    absent,
    created_at,
    unchanged,
)
from gpufaas_adapters.etcd.reading import decoded
from gpufaas_core.errors import StorageFailed
from gpufaas_core.units import Seconds

log = logging.getLogger(__name__)

LEADER: Final = "v1/scheduler/leader"
TTL_S: Final = 5
"""The time to live of the keys of leaders, nodes and gateways. etcd's least is 2 s, and a keep-alive of a third of this
must survive a slow disk."""

_AGAIN_S: Final[Seconds] = 0.5


class NameInUse(EtcdRefused):
    """Another running process is registered by this name."""


class KnownLeader(Struct, frozen=True, omit_defaults=True):
    """The leading scheduler, as gateways and nodes see it. Without the epoch, it is the value of `LEADER`."""

    id: str
    address: str
    epoch: int = 0


class Leadership:
    """
    Held until `lost` is set; made by `campaign`. Before it acts, a leader asks `still_mine`.

    :ivar epoch: greater than that of every leader before
    :ivar lost: set when another scheduler leads, or may lead
    """

    def __init__(self, etcd: Etcd, lease: EtcdLease, leader: KnownLeader) -> None:
        self.leader = leader
        self.epoch = leader.epoch
        self.lost = asyncio.Event()
        self._etcd = etcd
        self._lease = lease
        self._watching = asyncio.create_task(self._watch(), name="leadership-watch")
        self._waiting = asyncio.create_task(self._wait(), name="leadership-lease")

    def still_mine(self, now: Seconds) -> bool:
        """
        Whether this process may act as leader; *now* by `Etcd.clock`. Costs two comparisons.

        Stays true while etcd does not answer: no other can be elected then. False after this process stood still
        (SIGSTOP, suspend, a blocked loop) for the lease's time, until `confirm` or the next keep-alive has asked etcd.
        """
        return not self.lost.is_set() and self._lease.hold.holds(now)

    async def confirm(self) -> bool:
        """
        Ask etcd whether it is still ours; False: `lost` is set.

        :raises EtcdUnreachable: etcd does not answer
        """
        if not await self._lease.confirm():
            self._lose("its lease has ended")
        return not self.lost.is_set()

    def compare(self) -> Compare:
        """The condition of a write that only the leader of this epoch may do."""
        return created_at(LEADER, self.epoch)

    async def resign(self) -> None:
        """Give the lead up: a scheduler that waits leads at once. No error when etcd is away."""
        await self.abandon()
        try:
            await self._lease.revoke()
        except EtcdUnreachable as exc:
            log.warning("leadership.not_resigned reason=%s", exc)
        log.info("leadership.resigned epoch=%d", self.epoch)

    async def abandon(self) -> None:
        """Stop the tasks of a leadership that was lost."""
        for task in (self._watching, self._waiting):
            task.cancel()
        await asyncio.gather(self._watching, self._waiting, return_exceptions=True)
        self.lost.set()
        await self._lease.abandon()

    def _lose(self, why: str) -> None:
        if not self.lost.is_set():
            log.warning("leadership.lost epoch=%d reason=%s", self.epoch, why)
            self.lost.set()

    async def _wait(self) -> None:
        await self._lease.lost.wait()
        self._lose("its lease has ended")

    async def _watch(self) -> None:
        """Lose the lead when the key is deleted or replaced by hand, while the lease lives."""
        is_there = False
        try:
            async with aclosing(self._etcd.watch(LEADER, exact=True)) as changes:
                async for change in changes:
                    match change:
                        case Put(item):
                            is_there = item.create_revision == self.epoch
                            if not is_there:
                                return self._lose("another leads")
                        case Deleted():
                            return self._lose("its key was deleted")
                        case Listed():
                            if not is_there:
                                return self._lose("its key was deleted")
        except StorageFailed as exc:
            self._lose(str(exc))


async def campaign(
    etcd: Etcd,
    name: str,
    address: str,
    *,
    ttl_s: int = TTL_S,
    on_trouble: Callable[[StorageFailed], None] | None = None,
) -> Leadership:
    """
    Wait until no scheduler leads, then lead. Goes on over restarts of etcd, until cancelled.

    :param address: where gateways and nodes reach this scheduler
    :param on_trouble: called each time that etcd does not answer
    :raises EtcdRefused: we may not write there
    """
    value = msgspec.json.encode(KnownLeader(name, address))
    while True:
        lease: EtcdLease | None = None
        try:
            await _wait_for_none(etcd, LEADER, on_trouble)
            lease = await etcd.grant(ttl_s)
            done = await etcd.txn((absent(LEADER),), (DoPut(LEADER, value, lease.id),), (DoGet(LEADER),))
            if done.succeeded:
                leadership = Leadership(etcd, lease, KnownLeader(name, address, done.revision))
                log.info("leadership.won id=%s epoch=%d", name, done.revision)
                lease = None
                return leadership
        except EtcdUnreachable as exc:
            # The key may have been written: giving the lease back deletes it.
            if on_trouble is not None:
                on_trouble(exc)
            await asyncio.sleep(_AGAIN_S)
        finally:
            if lease is not None:
                await _give_back(lease)


async def _wait_for_none(etcd: Etcd, key: str, on_trouble: Callable[[StorageFailed], None] | None) -> None:
    is_held = False
    async with aclosing(etcd.watch(key, exact=True, on_trouble=on_trouble)) as changes:
        async for change in changes:
            match change:
                case Put():
                    is_held = True
                case Deleted():
                    return
                case Listed():
                    if not is_held:
                        return


async def _give_back(lease: EtcdLease) -> None:
    try:
        await lease.revoke()
    except EtcdUnreachable:
        pass  # it ends by itself


async def watch_leader(etcd: Etcd) -> AsyncGenerator[KnownLeader | None]:
    """
    Yield the leader, now and after each change; None: there is none. While etcd is away the last one stays.

    :raises EtcdRefused: we may not watch this
    """
    seen: KnownLeader | None = None
    told = False
    async with aclosing(etcd.watch(LEADER, exact=True)) as changes:
        async for change in changes:
            before = seen
            if isinstance(change, Put):
                leader = decoded(change.item, KnownLeader)
                seen = leader and replace(leader, epoch=change.item.create_revision)
            elif isinstance(change, Deleted):
                seen = None
            if seen != before or (isinstance(change, Listed) and not told):
                told = True
                yield seen


class Registration:
    """
    Keys that are in etcd while this process runs, all under one lease. When the lease is lost (etcd, or this process,
    was away for long) they are written again under another. Made by `register`.

    :ivar lost: set while the keys may be gone
    """

    def __init__(self, etcd: Etcd, lease: EtcdLease, name: str, same: Callable[[bytes], bool]) -> None:
        self._etcd = etcd
        self.lease = lease
        """The lease in use; it is another one after a loss."""
        self._name = name
        self._same = same
        self._ttl_s = round(lease.ttl_s)
        self._values: dict[str, bytes] = {}
        self._lock = asyncio.Lock()
        self.lost = asyncio.Event()
        self._task = asyncio.create_task(self._keep(), name=f"etcd-registration-{name}")

    async def put(self, key: str, value: bytes) -> None:
        """
        Keep *key* with this value from now on, in place of what is there. When etcd is away it is written later.

        :raises EtcdRefused: we may not write there
        """
        self._values[key] = value
        async with self._lock:
            if self._values.get(key) != value:
                return  # a later call is about to write what it wants
            try:
                await self._write(key, value)
            except EtcdUnreachable as exc:
                log.warning("registration.delayed key=%s reason=%s", key, exc)
                self.lease.lost.set()  # with the next lease all is written
            except EtcdRefused:
                if await self.lease.confirm():
                    raise

    async def close(self) -> None:
        """Delete all keys. No error when etcd is away: then they end with the lease."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await _give_back(self.lease)

    async def _write(self, key: str, value: bytes) -> None:
        if key == self._name:
            await self._claim(value)
        else:
            await self._etcd.put(key, value, self.lease.id)

    async def _claim(self, value: bytes) -> None:
        """Write the key of the name, unless it belongs to another running process."""
        key, waited = self._name, False
        while True:
            put = DoPut(key, value, self.lease.id)
            done = await self._etcd.txn((absent(key),), (put,), (DoGet(key),))
            if done.succeeded:
                return
            held = done.found[0][0]
            if held.lease == self.lease.id or self._same(held.value):
                if (await self._etcd.txn((unchanged(key, held.mod_revision),), (put,))).succeeded:
                    return
            elif waited:
                raise NameInUse(
                    f"{key} is in use by another running process ({held.value.decode(errors='replace')[:200]}): "
                    "give this one another id, or stop that one"
                )
            else:
                # The key of a process that was killed a moment ago ends within the lease's time.
                log.warning("registration.waits_for_another key=%s", key)
                waited = True
                try:
                    async with asyncio.timeout(2.0 * self._ttl_s):
                        await _wait_for_none(self._etcd, key, None)
                except TimeoutError:
                    pass

    async def _keep(self) -> None:
        while True:
            await self.lease.lost.wait()
            self.lost.set()
            log.warning("registration.lost key=%s", self._name)
            await self.lease.abandon()
            told = ""
            while self.lease.lost.is_set():
                try:
                    await self._renew()
                except StorageFailed as exc:
                    if str(exc) != told:
                        told = str(exc)
                        log.warning("registration.waits key=%s reason=%s", self._name, exc)
                    await asyncio.sleep(_AGAIN_S)
            self.lost.clear()
            log.info("registration.renewed key=%s", self._name)

    async def _renew(self) -> None:
        lease = await self._etcd.grant(self._ttl_s)
        async with self._lock:
            before, self.lease = self.lease, lease
            try:
                for key, value in list(self._values.items()):
                    await self._write(key, value)
            except StorageFailed:
                self.lease = before
                await _give_back(lease)
                raise


async def register(
    etcd: Etcd, key: str, value: bytes, *, same: Callable[[bytes], bool] = lambda _: False, ttl_s: int = TTL_S
) -> Registration:
    """
    Write *key*, the name of this process, for as long as it runs; more keys may follow under the same lease.

    :param same: whether a value that is there was written by a predecessor of this process that cannot run any more
        (one with our address). A key of another process is waited for, two lease times at most
    :raises NameInUse: another running process has that name
    :raises StorageFailed: etcd is away, or refuses
    """
    lease = await etcd.grant(ttl_s)
    registration = Registration(etcd, lease, key, same)
    try:
        await registration._claim(value)
    except BaseException:
        await registration.close()
        raise
    registration._values[key] = value
    return registration
