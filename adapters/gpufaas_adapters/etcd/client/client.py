"""`Etcd`: etcd on asyncio. Only `Etcd.watch` waits without a limit."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, Self

from aetcd import rpc

from gpufaas_adapters.etcd.client.connection import EtcdConnection
from gpufaas_adapters.etcd.client.failures import Compacted
from gpufaas_adapters.etcd.client.lease import EtcdLease
from gpufaas_adapters.etcd.client.messages import Messages
from gpufaas_adapters.etcd.client.settings import EtcdSettings
from gpufaas_adapters.etcd.client.values import Change, Compare, DoDelete, DoGet, Item, Operation, Range, TxnResult
from gpufaas_adapters.etcd.client.watch import Watch
from gpufaas_core.errors import StorageFailed
from gpufaas_core.units import Seconds

_PAGE: Final = 500


class Etcd:
    """
    A connection to etcd. Belongs to the event loop on which it is first used; it is never used across a fork.

    Every method raises a `StorageFailed` that names the endpoint: `EtcdUnreachable`, `EtcdRefused`, `EtcdFull`.

    :raises InvalidSpec: a certificate or key cannot be read
    """

    def __init__(self, settings: EtcdSettings, clock: Callable[[], Seconds] | None = None) -> None:
        self.settings = settings
        self.clock: Callable[[], Seconds] = clock or _boottime
        self._connection = EtcdConnection(settings)
        self._messages = Messages(f"{settings.prefix}/")
        self._leases: set[EtcdLease] = set()

    async def __aenter__(self) -> Self:
        self._connection.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End watches and keep-alives. Leases are not revoked: what is under them stays until it times out."""
        for lease in list(self._leases):
            await lease.abandon()
        await self._connection.close()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, or the one that is tried next."""
        return self._connection.endpoint

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that it belongs to; None until it is used."""
        return self._connection.loop

    # --- keys ---

    async def get(self, key: str) -> Item | None:
        request = rpc.RangeRequest(key=self._messages.key(key))
        found = await self._connection.call(f"read {key}", lambda to: to.kv.Range, request, reads=True)
        return self._messages.item(found.kvs[0]) if found.kvs else None

    async def range(self, prefix: str) -> Range:
        """Return all that begins with *prefix*, as it was at one moment, in as many pages as it takes."""
        start, end = self._messages.span(prefix)
        items: list[Item] = []
        revision = 0
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=_PAGE, revision=revision)
            try:
                page = await self._connection.call(f"list {prefix}", lambda to: to.kv.Range, request, reads=True)
            except Compacted:
                # Between two pages: begin anew. Compactions are minutes apart.
                items.clear()
                (start, _), revision = self._messages.span(prefix), 0
                continue
            revision = revision or page.header.revision
            items += map(self._messages.item, page.kvs)
            if not page.more:
                return Range(tuple(items), revision)
            start = page.kvs[-1].key + b"\0"

    async def keys(self, prefix: str, limit: int = 0) -> list[str]:
        """Return the keys that begin with *prefix*, in order, without their values; *limit* 0: all of them."""
        start, end = self._messages.span(prefix)
        request = rpc.RangeRequest(key=start, range_end=end, keys_only=True, limit=limit)
        found = await self._connection.call(f"list {prefix}", lambda to: to.kv.Range, request, reads=True)
        return [self._messages.name(each.key) for each in found.kvs]

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write; return the revision. On a majority of the members' disks when it returns."""
        request = rpc.PutRequest(key=self._messages.key(key), value=value, lease=lease)
        done = await self._connection.call(f"write {key}", lambda to: to.kv.Put, request)
        return int(done.header.revision)

    async def delete(self, key: str, *, below: bool = False) -> int:
        """Delete it, or all that begins with it; return how many there were."""
        request = self._messages.operation(DoDelete(key, below)).request_delete_range
        done = await self._connection.call(f"delete {key}", lambda to: to.kv.DeleteRange, request)
        return int(done.deleted)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Carry out *then* if all of *compares* hold, else *otherwise*, in one step. At most `MAX_OPERATIONS` each."""
        messages = self._messages
        request = rpc.TxnRequest(
            compare=[messages.compare(each) for each in compares],
            success=[messages.operation(each) for each in then],
            failure=[messages.operation(each) for each in otherwise],
        )
        first = next((each for each in (*then, *otherwise, *compares)), None)
        what = f"change {first.key if first else ''}"
        reads = all(isinstance(each, DoGet) for each in (*then, *otherwise))
        done = await self._connection.call(what, lambda to: to.kv.Txn, request, reads=reads)
        found = tuple(tuple(map(messages.item, each.response_range.kvs)) for each in done.responses)
        return TxnResult(done.succeeded, done.header.revision, found)

    # --- leases ---

    async def grant(self, ttl_s: int) -> EtcdLease:
        """
        Return a lease that is kept alive until it is revoked or abandoned; what is put under it goes when it ends.

        :param ttl_s: etcd's least is about 2 s, and it is late by up to one
        """
        asked_at = self.clock()
        granted = await self._grant(ttl_s)
        ttl = float(min(ttl_s, granted.TTL))
        lease = EtcdLease(self._connection, int(granted.ID), ttl, asked_at, self.clock, self._leases.discard)
        self._leases.add(lease)
        return lease

    async def grant_once(self, ttl_s: int) -> int:
        """Return a lease that is not kept alive: what is put under it is forgotten after about so long."""
        return int((await self._grant(ttl_s)).ID)

    async def _grant(self, ttl_s: int) -> Any:
        # A lease that was granted without our knowing is not used, and ends by itself: it may be asked for again.
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        return await self._connection.call("grant a lease", lambda to: to.lease.LeaseGrant, request, reads=True)

    # --- watches ---

    def watch(
        self, prefix: str, *, exact: bool = False, on_trouble: Callable[[StorageFailed], None] | None = None
    ) -> AsyncGenerator[Change]:
        """
        Yield what is there (`Put`), then `Listed`, then each change as it comes, without end. After a restart of etcd,
        or a lost connection, it goes on; a key that was made and deleted meanwhile is not told.

        :param exact: *prefix* is one key
        :param on_trouble: called whenever etcd does not answer; it is asked again after at most a second
        :raises EtcdRefused: we may not watch this
        """

        async def listed() -> Range:
            if not exact:
                return await self.range(prefix)
            now = await self.txn((), (DoGet(prefix),))
            return Range(now.found[0], now.revision)

        span = (self._messages.key(prefix), b"") if exact else self._messages.span(prefix)
        watch = Watch(self._connection, self._messages, prefix, span, listed)
        return watch.changes(on_trouble)


def _boottime() -> Seconds:
    """Return the seconds since boot, suspended time included: a lease ends while its machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
