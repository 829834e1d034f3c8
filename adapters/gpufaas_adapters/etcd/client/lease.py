"""Leases: what is put under one is deleted when it ends, unless it is kept alive."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from aetcd import rpc

from gpufaas_adapters.etcd.client.connection import REQUIRE_LEADER, EtcdConnection, Member
from gpufaas_adapters.etcd.client.failures import EtcdRefused, EtcdUnreachable
from gpufaas_core.errors import StorageFailed
from gpufaas_core.units import Seconds

log = logging.getLogger(__name__)


class LeaseHold:
    """
    Whether a lease can still be counted on; pure, because a leader asks before each decision.

    Three things may have happened when nothing was heard for the lease's time:

    - etcd does not answer (`failed`, each time). Then no other process was told that the lease ended: it holds.
    - This process stood still (stopped, suspended, blocked). Then the lease may have ended long ago: it does not hold
      until etcd has answered (`renewed`).
    - etcd has said that it ended.

    What remains: we are cut off and etcd is not. Epochs are for that.
    """

    def __init__(self, ttl_s: Seconds, asked_at: Seconds) -> None:
        self.ttl_s = ttl_s
        self.renewed_at = asked_at
        self._sign_at = asked_at
        self._doubtful = False
        self._ended = False

    def holds(self, now: Seconds) -> bool:
        """Whether no other process can have been told that the lease ended."""
        if now - self._sign_at >= self.ttl_s:
            self._doubtful = True
        return not (self._doubtful or self._ended)

    def confirmed(self, now: Seconds) -> bool:
        """Whether etcd has confirmed the lease within the lease's time."""
        return not self._ended and now - self.renewed_at < self.ttl_s

    def renewed(self, asked_at: Seconds) -> None:
        """etcd answered that the lease lives, to what was asked at *asked_at*."""
        self.renewed_at = self._sign_at = asked_at
        self._doubtful = False

    def failed(self, now: Seconds) -> None:
        """etcd did not answer. If the request is older than the lease's time, that says nothing: we stood still."""
        if self.holds(now):
            self._sign_at = now

    def ended(self) -> None:
        self._ended = True


class EtcdLease:
    """
    A lease that a task keeps alive, asking every third of its time; made by `Etcd.grant`.

    `lost` is set when etcd says that it has ended.
    """

    def __init__(
        self,
        connection: EtcdConnection,
        lease_id: int,
        ttl_s: Seconds,
        asked_at: Seconds,
        clock: Callable[[], Seconds],
        on_end: Callable[["EtcdLease"], object],
    ) -> None:
        """:param on_end: called when no task keeps it alive any more"""
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self._connection = connection
        self._clock = clock
        self._on_end = on_end
        self.hold = LeaseHold(ttl_s, asked_at)
        """Whether it can be counted on meanwhile; by `Etcd.clock`."""
        self._asking = asyncio.Lock()
        self._task = asyncio.create_task(self._keep(), name=f"etcd-lease-{lease_id:x}")

    async def confirm(self) -> bool:
        """
        Ask etcd now. False: it has ended.

        :raises EtcdUnreachable: etcd does not answer
        """
        async with self._asking:
            if self.lost.is_set():
                return False
            asked_at = self._clock()
            self.hold.holds(asked_at)
            try:
                left_s = await _keep_alive(self._connection, self.id, self.ttl_s / 3)
            except EtcdUnreachable:
                self.hold.failed(self._clock())
                raise
            if left_s <= 0:
                self.hold.ended()
                self.lost.set()
                return False
            self.hold.renewed(asked_at)
            return True

    async def revoke(self) -> None:
        """End it now; what is under it is gone when this returns."""
        await self.abandon()
        self.hold.ended()
        self.lost.set()
        request = rpc.LeaseRevokeRequest(ID=self.id)
        try:
            await self._connection.call("revoke a lease", lambda to: to.lease.LeaseRevoke, request)
        except EtcdRefused:
            pass  # it has ended already

    async def abandon(self) -> None:
        """Keep it alive no longer; it ends by itself."""
        self._on_end(self)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        is_renewed = True
        while not self.lost.is_set():
            # A beat, not a poll: without it etcd ends the lease.
            await asyncio.sleep(self.ttl_s / 3 if is_renewed else min(0.5, self.ttl_s / 6))
            try:
                await self.confirm()
                is_renewed = True
            except StorageFailed as exc:
                if is_renewed:
                    log.warning("etcd.lease_not_renewed lease=%x reason=%s", self.id, exc)
                is_renewed = False
        self._on_end(self)


async def _keep_alive(connection: EtcdConnection, lease: int, timeout_s: Seconds) -> Seconds:
    """Return how long it has; 0: it has ended."""

    def once(to: Member) -> Callable[..., Awaitable[Any]]:
        async def ask(request: Any, timeout: Seconds, metadata: Any) -> Any:
            stream = to.lease.LeaseKeepAlive(timeout=timeout, metadata=(*metadata, *REQUIRE_LEADER))
            try:
                await stream.write(request)
                answer = await stream.read()
                if answer is grpc.aio.EOF:
                    raise EtcdUnreachable(f"etcd at {to.endpoint} ended a keep-alive without an answer")
                return answer
            finally:
                stream.cancel()

        return ask

    request = rpc.LeaseKeepAliveRequest(ID=lease)
    answer = await connection.call("keep a lease", once, request, reads=True, timeout_s=timeout_s)
    return float(answer.TTL)
