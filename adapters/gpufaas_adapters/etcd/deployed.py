"""`DeployedFunctions`: what is deployed in a cluster, read and followed on etcd's loop."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from gpufaas_adapters.etcd.client import Deleted, Etcd, Listed, Put
from gpufaas_adapters.etcd.reading import decoded, read_all
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import Function, Profile
from gpufaas_core.plausible import read_profile
from gpufaas_gateway.spec import FunctionRecord, Quota

log = logging.getLogger(__name__)

FUNCTIONS: Final = "v1/functions/"
PROFILES: Final = "v1/profiles/"
QUOTAS: Final = "v1/quotas/"


class FunctionEntry(Struct, frozen=True):
    """All that is kept of a deployed function, for gateways, nodes and the scheduler."""

    record: FunctionRecord
    """Its count of calls is not kept here: 0."""
    worker: WorkerSpec | None = None
    """None, or of an earlier revision: not yet known."""
    function: Function | None = None

    @property
    def is_complete(self) -> bool:
        """Whether worker and function are there, and of the record's revision."""
        mine = self.record.function_id
        return (
            self.worker is not None
            and self.worker.function == mine
            and self.function is not None
            and self.function.id == mine
        )

    def encoded(self) -> bytes:
        built: dict[str, Any] = msgspec.to_builtins(self)
        del built["record"]["invocations"]
        return msgspec.json.encode(built)


class EntryChanged(Struct, frozen=True, tag=True):
    entry: FunctionEntry


class EntryRemoved(Struct, frozen=True, tag=True):
    name: str
    """``NAME.NAMESPACE``"""


EntryChange: TypeAlias = EntryChanged | EntryRemoved | Listed


class QuotaChanged(Struct, frozen=True, tag=True):
    namespace: str
    quota: Quota | None
    """None: it has none any more."""


QuotaChange: TypeAlias = QuotaChanged | Listed


class DeployedFunctions:
    """Every method may raise `StorageFailed`. What cannot be read is logged and left out."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    async def entries(self) -> list[FunctionEntry]:
        """Return them ordered by namespace and name."""
        entries = await read_all(self._etcd, FUNCTIONS, FunctionEntry)
        return sorted(entries.values(), key=lambda each: (each.record.namespace, each.record.name))

    async def watch(self) -> AsyncGenerator[EntryChange]:
        """Yield what is there, then `Listed`, then each change, without end; see `Etcd.watch`."""
        async with aclosing(self._etcd.watch(FUNCTIONS)) as changes:
            async for change in changes:
                match change:
                    case Put(item):
                        if (entry := decoded(item, FunctionEntry)) is not None:
                            yield EntryChanged(entry)
                    case Deleted(key):
                        namespace, _, name = key.removeprefix(FUNCTIONS).partition("/")
                        yield EntryRemoved(f"{name}.{namespace}")
                    case Listed():
                        yield change

    async def watch_quotas(self) -> AsyncGenerator[QuotaChange]:
        """Yield quotas, as `watch` yields functions. One that cannot be read limits nothing."""
        async with aclosing(self._etcd.watch(QUOTAS)) as changes:
            async for change in changes:
                match change:
                    case Put(item):
                        yield QuotaChanged(item.key.removeprefix(QUOTAS), decoded(item, Quota))
                    case Deleted(key):
                        yield QuotaChanged(key.removeprefix(QUOTAS), None)
                    case Listed():
                        yield change

    async def profiles(self, digest: str) -> dict[str, Profile]:
        """Return what the bundle *digest* costs, by device kind."""
        prefix = f"{PROFILES}{digest}/"
        found: dict[str, Profile] = {}
        for item in (await self._etcd.range(prefix)).items:
            try:
                found[item.key.removeprefix(prefix)] = read_profile(item.value)
            except ValueError as exc:
                log.warning("profile.unreadable key=%s: it is learnt again: %s", item.key, exc)
        return found

    async def save_profile(self, digest: str, kind: str, profile: Profile) -> None:
        await self._etcd.put(f"{PROFILES}{digest}/{kind}", msgspec.json.encode(profile))
