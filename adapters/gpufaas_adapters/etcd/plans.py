"""`EtcdPlans`: the plans of a cluster, each at ``v1/plans/VERSION`` (port: `PlanStore`)."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import msgspec

from gpufaas_adapters.etcd.blocking import Blocking
from gpufaas_adapters.etcd.client import DoDelete, DoPut, Etcd, Listed, Put, absent, present
from gpufaas_adapters.etcd.reading import decoded, read_all
from gpufaas_core.plans import KEPT, PlanVersion

_PLANS: Final = "v1/plans/"


class EtcdPlans:
    """The methods of the port block, and are called from other threads than that of *etcd*'s loop."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._blocking = Blocking(etcd)

    def history(self) -> list[PlanVersion]:
        plans = self._blocking(read_all(self._etcd, _PLANS, PlanVersion))
        return sorted(plans.values(), key=lambda each: -each.version)

    def add(self, plan: PlanVersion) -> bool:
        key, before, oldest = (f"{_PLANS}{plan.version - ago}" for ago in (0, 1, KEPT))
        follows = (absent(key), present(before)) if plan.version > 1 else (absent(key),)
        changes = (DoPut(key, msgspec.json.encode(plan)), DoDelete(oldest))
        return self._blocking(self._etcd.txn(follows, changes)).succeeded

    async def follow(self, learn: Callable[[PlanVersion], None], known: asyncio.Event) -> None:
        """Tell *learn* the plan in force, if there is one, then set *known*, then tell each that comes, without end."""
        latest: PlanVersion | None = None
        async with aclosing(self._etcd.watch(_PLANS)) as changes:
            async for change in changes:
                if isinstance(change, Put) and (plan := decoded(change.item, PlanVersion)) is not None:
                    latest = plan if latest is None or plan.version > latest.version else latest
                if latest is not None and (known.is_set() or isinstance(change, Listed)):
                    learn(latest)
                if isinstance(change, Listed):
                    known.set()
