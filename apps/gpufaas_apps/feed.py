"""What a gateway learns from etcd: functions, namespaces, quotas, and the counts of other gateways."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from gpufaas_adapters.etcd.client import Etcd, Listed, Put
from gpufaas_adapters.etcd.deployed import DeployedFunctions, EntryChanged, EntryRemoved, QuotaChanged
from gpufaas_adapters.etcd.functions import COUNTS, NAMESPACES
from gpufaas_adapters.etcd.plans import EtcdPlans
from gpufaas_apps.process import first_of
from gpufaas_core.errors import StorageFailed
from gpufaas_core.plans import PlanVersion
from gpufaas_gateway.deploy import Deployer

log = logging.getLogger("gateway")


class EtcdFeed:
    """Keeps a gateway's functions, namespaces, quotas and plan as they are in etcd, while `run` runs."""

    def __init__(self, etcd: Etcd, deployer: Deployer, learn: Callable[[PlanVersion], None]) -> None:
        """:param learn: is told the plan in force"""
        self._learn = learn
        self._etcd = etcd
        self._deployed = DeployedFunctions(etcd)
        self._deployer = deployer
        self.listed = asyncio.Event()
        """All functions of etcd are known."""
        self._limited = asyncio.Event()
        """All quotas of etcd are known."""
        self._planned = asyncio.Event()
        """The plan in force is known."""

    async def run(self) -> None:
        """Follow etcd, without end; raise what one of the watches raises."""
        await first_of(
            self._follow_functions(), self._follow_namespaces(), self._follow_quotas(), self._follow_counts(),
            EtcdPlans(self._etcd).follow(self._learn, self._planned),
        )  # fmt: skip

    async def _follow_functions(self) -> None:
        seen: set[str] = set()
        catalogue = self._deployer.catalogue
        async with aclosing(self._deployed.watch()) as changes:
            async for change in changes:
                match change:
                    case EntryChanged(entry):
                        seen.add(entry.record.full_name)
                        if entry.worker is not None and entry.function is not None and entry.is_complete:
                            self._deployer.adopt(entry.record, entry.worker, entry.function)
                    case EntryRemoved(name):
                        seen.discard(name)
                        self._deployer.dropped(name)
                    case Listed():
                        for each in catalogue.everywhere():
                            if each.full_name not in seen:
                                self._deployer.dropped(each.full_name)
                        await self._limited.wait()  # or early calls would pass quotas
                        await self._planned.wait()
                        catalogue.loaded = True
                        self.listed.set()

    async def _follow_namespaces(self) -> None:
        async with aclosing(self._etcd.watch(NAMESPACES)) as changes:
            async for _ in changes:
                try:
                    await self._deployer.namespaces.load()
                except StorageFailed as exc:
                    log.warning("namespaces.not_read, will be at the next change: %s", exc)

    async def _follow_quotas(self) -> None:
        seen: set[str] = set()
        quotas = self._deployer.quotas
        async with aclosing(self._deployed.watch_quotas()) as changes:
            async for change in changes:
                match change:
                    case QuotaChanged(namespace, quota):
                        (seen.discard if quota is None else seen.add)(namespace)
                        quotas.adopt(namespace, quota)
                    case Listed():
                        quotas.keep_only(seen)
                        self._limited.set()

    async def _follow_counts(self) -> None:
        """Take over what other gateways counted."""
        async with aclosing(self._etcd.watch(COUNTS)) as changes:
            async for change in changes:
                if isinstance(change, Put) and change.item.value.isdigit():
                    namespace, _, name = change.item.key.removeprefix(COUNTS).partition("/")
                    found = self._deployer.catalogue.find(f"{name}.{namespace}")
                    if found is not None:
                        found.stats.saved_before = max(0, int(change.item.value) - found.stats.saved)
