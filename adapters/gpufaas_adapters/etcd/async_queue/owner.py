"""`QueueOwner`: this process of a gateway, as the owner of calls."""

import secrets

from gpufaas_adapters.etcd.async_queue.records import GATEWAYS, GatewayRecord, encode
from gpufaas_adapters.etcd.client import Etcd, EtcdLease
from gpufaas_adapters.etcd.election import Registration, register
from gpufaas_core.errors import StorageAway


class QueueOwner:
    """Made by `register`."""

    @classmethod
    async def register(cls, etcd: Etcd, gateway: str, ttl_s: int) -> "QueueOwner":
        """:raises StorageFailed: etcd is away, or refuses"""
        name = f"{gateway}-{secrets.token_hex(4)}"
        path = f"{GATEWAYS}{name}"
        owner = cls(etcd, name, await register(etcd, path, encode(GatewayRecord(gateway)), ttl_s=ttl_s))
        try:
            item = await etcd.get(path)
            if item is None:
                raise owner.lease_ended()
            owner._base = item.create_revision
            await owner.registration.put(path, encode(GatewayRecord(gateway, owner._base)))
        except BaseException:
            await owner.registration.close()
            raise
        return owner

    def __init__(self, etcd: Etcd, name: str, registration: Registration) -> None:
        self.name = name
        self.path = f"{GATEWAYS}{name}"
        """The key of the registration."""
        self.registration = registration
        self._etcd = etcd
        self._base = 0
        """The revision of the registration, with which keys of calls begin: no other process has the same."""
        self._serial = 0
        self._known_under = registration.lease
        """The lease under which we know which calls are ours; under a later one they may be another's."""

    def new_key(self) -> int:
        """Return a key for a call, unique in the cluster."""
        self._serial += 1
        return self._base << 32 | self._serial

    @property
    def is_unsure(self) -> bool:
        """Whether another lease is in use than when we last read what is ours: others may have taken it over."""
        return self.registration.lease is not self._known_under

    def may_claim(self) -> bool:
        """Whether no other gateway can be taking our calls over."""
        lease = self.registration.lease
        return not self.is_unsure and not lease.lost.is_set() and lease.hold.confirmed(self._etcd.clock())

    def lease_ended(self) -> StorageAway:
        at = self._etcd.endpoint
        return StorageAway(f"this gateway's lease in etcd at {at} has ended, and is being renewed: ask again")

    def is_sure_under(self, lease: EtcdLease) -> None:
        """What is ours was read while *lease* was in use."""
        self._known_under = lease
