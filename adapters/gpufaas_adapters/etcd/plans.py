"""
`EtcdPlans`: the plans of a cluster (port: `PlanStore`).

::

    v1/plans/current           the plan in force
    v1/plans/history/VERSION   it and the last ones before it
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import msgspec

from gpufaas_adapters.etcd.blocking import Blocking
from gpufaas_adapters.etcd.client import DoDelete, DoPut, Etcd, Item, Listed, Put, unchanged
from gpufaas_adapters.etcd.reading import decoded, read_all
from gpufaas_core.errors import StorageFailed
from gpufaas_core.plans import KEPT, PlanVersion

CURRENT: Final = "v1/plans/current"
_HISTORY: Final = "v1/plans/history/"


class EtcdPlans:
    """The methods of the port block, and are called from other threads than that of *etcd*'s loop."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._blocking = Blocking(etcd)

    def latest(self) -> PlanVersion | None:
        return _plan(self._blocking(self._etcd.get(CURRENT)))

    def get(self, version: int) -> PlanVersion | None:
        return _plan(self._blocking(self._etcd.get(_key(version))))

    def history(self) -> list[PlanVersion]:
        plans = self._blocking(read_all(self._etcd, _HISTORY, PlanVersion))
        return sorted(plans.values(), key=lambda each: -each.version)

    def add(self, plan: PlanVersion) -> bool:
        return self._blocking(self._add(plan))

    async def _add(self, plan: PlanVersion) -> bool:
        item = await self._etcd.get(CURRENT)
        there = _plan(item)
        if (0 if there is None else there.version) != plan.version - 1:
            return False
        value = msgspec.json.encode(plan)
        done = await self._etcd.txn(
            [unchanged(CURRENT, 0 if item is None else item.mod_revision)],
            [DoPut(CURRENT, value), DoPut(_key(plan.version), value), DoDelete(_key(plan.version - KEPT))],
        )
        return done.succeeded

    async def watch(self) -> AsyncGenerator[PlanVersion | Listed]:
        """Yield the plan in force, if there is one, then `Listed`, then each that comes, without end."""
        async with aclosing(self._etcd.watch(CURRENT, exact=True)) as changes:
            async for change in changes:
                if isinstance(change, Listed):
                    yield change
                elif isinstance(change, Put) and (plan := decoded(change.item, PlanVersion)) is not None:
                    yield plan


def _key(version: int) -> str:
    return f"{_HISTORY}{version}"


def _plan(item: Item | None) -> PlanVersion | None:
    """:raises StorageFailed: it cannot be read, and must not count as none"""
    plan = None if item is None else decoded(item, PlanVersion)
    if item is not None and plan is None:
        raise StorageFailed(f"{item.key} in etcd cannot be read: a newer release wrote it, or somebody by hand")
    return plan
